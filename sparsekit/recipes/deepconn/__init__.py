"""Predicts ratings from text."""
