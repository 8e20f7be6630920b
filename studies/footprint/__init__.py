"""What an edge and a server take: time to import, memory, disk. ``make footprint``; see docs/results/footprint.md.

imports    seconds and memory of an import, beside torch's own; which files they go to
starts     seconds to an answer of --help, --version, a slip
installed  what pip puts on a disk
heads      memory of an edge with all weights, and with those of its head
network    a network of ResNet-50's shape
"""
