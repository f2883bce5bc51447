"""Predicts how users rate items, and compares with two baselines."""
