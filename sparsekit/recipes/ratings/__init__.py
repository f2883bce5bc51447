"""Predicts users' ratings of items, and compares the predictions with two baselines."""
