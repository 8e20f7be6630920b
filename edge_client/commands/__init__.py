"""The commands of ``edge-client``.

layers.py    what a model's layers are, and where it can be cut
verify.py    is every cut exact?
run.py       inputs through a cut, predictions, where the time went
sweep.py     inputs through every way, in tables and on a page
compare.py   two sweeps side by side
report.py    what `run` prints and writes
progress.py  progress on a terminal, or in plain lines
loading.py   model, inputs and cut from the command line's words
exits.py     exit statuses
output.py    JSON and tables as text
text.py      text that a terminal can take
"""
