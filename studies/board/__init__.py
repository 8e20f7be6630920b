"""An edge's board without a board: 64-bit ARM with systemd, a slow card, a watchdog and a plug to pull, emulated.

image.sh     makes the disks: a Debian with a kernel, wheels for pip
emulated.py  the board: started, typed to on its console, its power cut
__main__.py  follows a page of docs/jobs on it: ``python -m studies.board DISKS docs/jobs/raspberry-pi.md``
"""
