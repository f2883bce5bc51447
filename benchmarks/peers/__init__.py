"""Peers besides torch; each is optional, and skipped with a reason."""
