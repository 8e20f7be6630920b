"""Implement ``edge-client prune``: data, evaluation of every scoring, measurements of the service, a report.

data    the validation and test files; every scoring at every number of channels
page    what a pruning gains through a server; charts and tables in one file
"""
