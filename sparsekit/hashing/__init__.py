"""Stable integer codes for feature values.

A code depends on the value and the seed alone, not on other values, the process, the machine or
``PYTHONHASHSEED``. So a raw user name or product id can be a key of a hash table, and no dictionary
has to be built and kept.
"""

from .split_hash import Collisions, SplitHashEncoder
from .values import xxh64

__all__ = ["Collisions", "SplitHashEncoder", "xxh64"]
