"""Benchmarks: ratios within one run, no limits on time: ``python -m studies.benchmarks``; see docs/benchmarks.md."""
