"""Ratings predicted from text."""
