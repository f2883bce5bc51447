"""Recommends items to users from their earlier ratings."""
