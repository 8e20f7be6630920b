"""``edge-client prune``: the data, every scoring tested on it, the service measured, a report.

data    the files on which channels are chosen and tested; every scoring at every number of channels
page    what the choice gains through a server; drawings and tables in one file
"""
