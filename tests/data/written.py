"""Helpers that write text files for tests and read them."""

import gzip
import struct

import xxhash

from sparsekit.data import CsvReader


def write(path, content, compress=False):
    content = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(content) if compress else content)
    return path


def xxh(text, seed=0):
    text = text.encode() if isinstance(text, str) else text
    return struct.unpack("<q", struct.pack("<Q", xxhash.xxh64_intdigest(text, seed)))[0]


def one(path, **settings):
    """Return the only batch of a CSV file."""
    (batch,) = CsvReader(path, 1000, **settings)
    return batch
