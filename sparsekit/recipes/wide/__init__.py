"""Predicts incomes with a wide network on hashed features."""
