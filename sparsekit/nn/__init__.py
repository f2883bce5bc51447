"""Layers and initializers."""

from .embedding import All2AllDenseEmbedding, DistributedEmbedding, EmbeddingWeight
from .init import Constant, Initializer, Normal, Uniform

__all__ = [
    "All2AllDenseEmbedding",
    "Constant",
    "DistributedEmbedding",
    "EmbeddingWeight",
    "Initializer",
    "Normal",
    "Uniform",
]
