"""``edge-client prune``: the data, every scoring tested on it, the service measured, a report.

data    the files on which channels are chosen and tested; every scoring at every number of channels
served  what the choice gains through a server
page    drawings and tables in one file; what a pruning found, made once
"""
