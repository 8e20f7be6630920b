"""Real inputs through every cut: what was measured, in tables, beside what was predicted, in a page.

extras.py    the libraries of the extra "sweep", or one clear line
ways.py      the ways to run a request: cuts, everything here, everything there; networked and local
feed.py      the inputs
measure.py   one request, measured and compared with the whole model
local.py     head and tail in this one process
columns.py   the columns of both tables, with their units
records.py   an answer as rows
settings.py  what a sweep is of: what must be the same to go on with it
journal.py   what was measured so far, safe from interruption
runner.py    input by input, round by round
foretell.py  what the plan says before anything is measured
tables.py    CSV and Parquet
summary.py   each way's numbers, the decision
outcome.py   what was found, as types and as JSON
results.py   all files, from the journal
report.py    the page (page.html.j2, page.css, page.js)
compare.py   two sweeps side by side, the noise taken into account
"""
