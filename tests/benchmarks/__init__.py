"""Benchmarks: ratios within one run, no limits on time: ``python -m tests.benchmarks``; see docs/benchmarks.md."""
