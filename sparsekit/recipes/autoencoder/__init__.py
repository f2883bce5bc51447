"""Recommendations by what a user has rated."""
