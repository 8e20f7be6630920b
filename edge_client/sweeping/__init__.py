"""Real inputs through every cut: what was measured, in tables, and beside the prediction, in a report.

extras    the libraries of the extra "sweep", or one clear line
ways      the ways to run a request: cuts, everything here, everything there; networked and local
inputs    what a sweep sends
meter     one request, measured and compared with the whole model
observed  what observers saw
columns   the columns of both tables, with their units
records   an answer as rows
settings  what a sweep measures: what must be the same to resume it
journal   what was measured so far, safe from interruption
runner    input by input, round by round
prediction  what the plan says before anything is measured
outcome   what a sweep found, made once
tables    CSV and Parquet
summary   each way's numbers, the decision
results   all files, from the journal
wording   what the page says in words
report    the page (page.html.j2, page.js; the charts are in edge_client.pages)
compare   two sweeps side by side, taking noise into account
compare_page  the same as a page (compare.html.j2, compare.js)
"""
