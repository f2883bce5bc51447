"""Kernel microbenchmarks: `python -m benchmarks [NAME ...] [--device cuda] [--json FILE]`."""
