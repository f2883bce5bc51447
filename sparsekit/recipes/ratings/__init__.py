"""Ratings of items by users, predicted next to two baselines."""
