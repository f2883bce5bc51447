"""Benchmarks of ops and of training steps; `python -m benchmarks --help` lists the commands."""
