"""Fixtures with pools of ranks."""

from ranks.conftest import ranks  # noqa: F401
