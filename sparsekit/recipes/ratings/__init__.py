"""Predicts how users rate items, and compares the predictions with two baselines."""
