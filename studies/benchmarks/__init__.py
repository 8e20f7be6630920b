"""Benchmarks: ratios within one run, no limits on time: ``python -m studies.benchmarks``; docs/results."""
