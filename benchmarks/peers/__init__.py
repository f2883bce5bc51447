"""Peers other than torch. All are optional: a missing peer is skipped, with a message."""
