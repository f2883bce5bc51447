"""Readers that yield batches of keys and numbers from files, and a prefetcher."""

from .batch import Batch, KeyedJaggedTensor
from .columns import Keys
from .criteo_sample import write_criteo_sample
from .parquet import ParquetReader
from .prefetch import Prefetcher
from .text import CriteoReader, CsvReader

__all__ = [
    "Batch",
    "CriteoReader",
    "CsvReader",
    "KeyedJaggedTensor",
    "Keys",
    "ParquetReader",
    "Prefetcher",
    "write_criteo_sample",
]
