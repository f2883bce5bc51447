"""Optimizers for sparse rows, and the split of a model into sparse and dense parameters."""

from .lazy_adam import LazyAdam
from .split import split_embedding_variable_from_others

__all__ = ["LazyAdam", "split_embedding_variable_from_others"]
