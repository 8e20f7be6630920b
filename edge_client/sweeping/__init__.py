"""Run real inputs through every cut, and report measurements next to predictions.

settings    what a sweep measures: must be the same to resume it
records     an answer as rows
runner      input by input, round by round
summary     each way's numbers, the decision
wording     the page's text
report      all files, from the journal; CSV and Parquet; the page (page.html.j2, page.js; charts: edge_client.pages)
compare     two sweeps compared, given the noise; as a page (compare.html.j2, compare.js)
"""
