"""Kernel microbenchmarks: `python -m benchmarks [--device cuda] [NAME ...] [--quick] [--json ...]`."""
