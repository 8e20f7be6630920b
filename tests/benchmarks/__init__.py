"""Benchmarks: ratios within one run, no limits on time. Run ``python -m tests.benchmarks``; see docs/benchmarks.md."""
