"""Stable integer codes for feature values.

A code depends only on the value and the seed, not on other values, the process, the machine or
``PYTHONHASHSEED``. Thus the code of a user name or product id can be a key in a hash table, and no
dictionary of all values is needed.
"""

from .split_hash import Collisions, SplitHashEncoder
from .values import xxh64

__all__ = ["Collisions", "SplitHashEncoder", "xxh64"]
