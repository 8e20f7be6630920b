"""``edge-client prune``: the data, every scoring judged on it, the service measured, a page.

data     the files that channels are chosen by and judged on
trial    every scoring at every number of channels
served   what the choice gains through a server
report   what a pruning found, made once
page     drawings and tables in one file
"""
