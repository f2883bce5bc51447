"""Peers other than torch. All are optional: a missing one is skipped, and the reason is printed."""
