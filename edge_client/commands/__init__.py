"""The commands of ``edge-client``.

arguments.py the words of the command line
layers.py    what a model's layers are, and where it can be cut
verify.py    is every cut exact?
run.py       inputs through a cut, predictions, where the time went
watch.py     the same, and what observers see, live
auto.py      run with --split auto
profile.py   where time, memory and energy go, on this side and that
plan.py      what every cut would take
sweep.py     inputs through every way, in tables and on a page
compare.py   two sweeps side by side
hierarchy.py the module tree, what ran of it, ONNX files
prune.py     which channels are worth sending
report.py    what `run` prints and writes
progress.py  progress on a terminal, or in plain lines
loading.py   model, inputs and cut from the command line's words
exits.py     exit statuses
output.py    JSON and tables as text
text.py      text that a terminal can take
"""
