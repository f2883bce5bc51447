"""Kernel microbenchmarks: `python -m benchmarks [NAME ...] [--quick] [--json FILE]`."""
