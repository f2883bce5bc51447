"""Recommends items to users, based on their earlier ratings."""
