"""Predicts ratings from review texts."""
