"""Predicts ratings from reviews."""
