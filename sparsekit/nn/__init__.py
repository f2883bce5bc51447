"""Layers and initializers."""

from ..tables.initializers import Constant, Initializer, Normal, Uniform
from ..tables.weight import EmbeddingWeight
from . import wrappers  # noqa: F401 (it registers hooks with torch)
from .clock import set_clock
from .dropin_embedding import Embedding
from .dropin_embedding_bag import EmbeddingBag
from .embedding import All2AllDenseEmbedding, DistributedEmbedding
from .features import Feature
from .group import EmbeddingGroup, group_embedding_lookup_sparse
from .load_torch import load_torch_state_dict
from .memory_report import MemoryReport, TableMemory, memory_report
from .replace import Replacement, replace_embeddings

__all__ = [
    "All2AllDenseEmbedding",
    "Constant",
    "DistributedEmbedding",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingGroup",
    "EmbeddingWeight",
    "Feature",
    "Initializer",
    "MemoryReport",
    "Normal",
    "Replacement",
    "TableMemory",
    "Uniform",
    "group_embedding_lookup_sparse",
    "load_torch_state_dict",
    "memory_report",
    "replace_embeddings",
    "set_clock",
]
