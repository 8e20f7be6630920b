"""Real inputs through every cut: what was measured, in tables, and beside the prediction, in a report.

settings    what a sweep measures: what must be the same to resume it
records     an answer as rows
runner      input by input, round by round
summary   each way's numbers, the decision
wording   what the page says in words
report    all files, from the journal; CSV and Parquet; the page (page.html.j2, page.js; charts: edge_client.pages)
compare     two sweeps side by side, taking noise into account; the same as a page (compare.html.j2, compare.js)
"""
