"""Predicts ratings from the texts of reviews."""
