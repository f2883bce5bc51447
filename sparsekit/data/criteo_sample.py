"""Generates files in Criteo's format, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

import numpy as np

from .._replacing import replacing
from ..errors import check_int

__all__ = ["write_criteo_sample"]

# Number of distinct values in each category and, below, number of keys in each category's bags.
# Both are from MLPerf's DLRM-DCNv2 on Criteo 1TB (github.com/mlcommons/training,
# recommendation_v2/torchrec_dlrm).
CARDINALITIES = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282,
    10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108,
    36,
)  # fmt: skip
KEYS_PER_BAG = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)

_NUMBERS = 13
_ZIPF = 1.1
# Number of keys to generate at a time; it limits the memory used.
_BLOCK_KEYS = 1 << 20
# Entry i contains the four hexadecimal digits of the 16-bit number i, packed into 32 bits.
_HEX = np.frombuffer("".join(f"{i:04x}" for i in range(1 << 16)).encode(), np.uint32)


def write_criteo_sample(
    path: str | os.PathLike[str],
    rows: int,
    seed: int = 0,
    multi_hot: bool = False,
    *,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> None:
    r"""Write a file that looks like Criteo's click logs, for `CriteoReader`.

    A line has a label, 13 integers and 26 categories of 8 hexadecimal digits, separated by tabs.
    Some integers are missing or negative, and some categories are missing. Each category has as
    many distinct values as MLPerf's DLRM-DCNv2 uses for Criteo 1TB; their frequencies follow Zipf's
    law with exponent 1.1. About a quarter of the labels are 1 (in Criteo 1TB: 3%). Labels depend on
    the categories, so that a model has something to learn. Equal arguments produce equal bytes, and
    a longer file begins with the rows of a shorter one.

    Args:
        path: Path of the file, which is compressed by gzip if the path ends in ``.gz``. The file
            appears only when it is complete.
        rows: Number of lines, >= 0.
        seed: Seed of the random contents, in ``[0, 2**63)``.
        multi_hot: Whether each category has as many keys as in MLPerf, 1 to 100, separated by
            commas. To read them, pass ``keys=Keys("hex", separator=",")`` to `CriteoReader`.
        on_rows: A callback that receives the number of rows written since the last call.

    Raises:
        TypeError, ValueError: rows or seed is not an integer or is out of range.
        OSError: the file cannot be written.
    """
    check_int("write_criteo_sample", "rows", rows, 0, 2**40)
    check_int("write_criteo_sample", "seed", seed, 0, 2**63 - 1)
    path = Path(path)
    keys = KEYS_PER_BAG if multi_hot else (1,) * len(CARDINALITIES)
    block = _BLOCK_KEYS // sum(keys)
    with contextlib.ExitStack() as files:
        file: IO[bytes] = files.enter_context(files.enter_context(replacing(path)).open("wb"))
        if path.suffix == ".gz":
            # Store neither a file name nor a time, so that the same arguments give the same bytes.
            file = cast(IO[bytes], gzip.GzipFile("", "wb", 1, file, mtime=0))
            files.callback(file.close)
        for number, begin in enumerate(range(0, rows, block)):
            wanted = min(block, rows - begin)
            file.write(_lines(np.random.default_rng([seed, number]), block, keys, wanted))
            on_rows(wanted)


def _lines(draw: np.random.Generator, rows: int, keys: tuple[int, ...], wanted: int) -> bytes:
    """Generate ``rows`` lines, and return the first ``wanted`` of them."""
    numbers, weights = _categories(draw, rows, keys)
    chance = 1 / (1 + np.exp(1.3 - weights))
    label = (draw.random(rows) < chance) + np.uint8(ord("0"))
    parts = [np.stack([label, np.full(rows, ord("\t"), np.uint8)], 1)]
    parts += [_integers(draw, rows, column) for column in range(_NUMBERS)]
    begin = 0
    for column, count in enumerate(keys):
        missing = draw.random(rows) < (0.0, 0.03, 0.1, 0.4)[column % 4]
        parts.append(_hex(numbers[:, begin : begin + count], missing))
        begin += count
    # Every field has been padded with zero bytes to its largest width; remove the padding.
    text = np.concatenate(parts, 1)[:wanted]
    text[:, -1] = ord("\n")
    return text[text != 0].tobytes()


def _categories(
    draw: np.random.Generator, rows: int, keys: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw keys, uint32 [rows, sum(keys)]; also return their effect on each row's log-odds."""
    features = np.repeat(np.arange(len(keys)), keys)
    most = np.array(CARDINALITIES, np.float64)[features]
    # Invert the distribution function of the density x ** -_ZIPF on [1, most + 1).
    power = 1 - _ZIPF
    uniform = draw.random((rows, len(features)))
    ids = (1 + uniform * ((most + 1) ** power - 1)) ** (1 / power)
    ids = np.minimum(ids, most).astype(np.uint32)
    mixed = _mix(ids + (features * 0x9E3779B1).astype(np.uint32))
    first = np.cumsum([0, *keys[:-1]])
    weights = _mix(mixed[:, first]).astype(np.float32) / 2**32 - 0.5
    return mixed, weights.sum(1)


def _mix(words: np.ndarray) -> np.ndarray:
    """Scramble 32-bit words one-to-one, with the finalizer of MurmurHash3."""
    words = (words ^ words >> 16) * np.uint32(0x85EBCA6B)
    words = (words ^ words >> 13) * np.uint32(0xC2B2AE35)
    return words ^ words >> 16


def _integers(draw: np.random.Generator, rows: int, column: int) -> np.ndarray:
    """Draw a column of integers; return their characters, uint8 [rows, 8]."""
    numbers = draw.exponential(4.0 ** (column % 9 + 1), rows).astype(np.int64)
    numbers = np.minimum(numbers, 999_999)
    text = np.zeros((rows, 8), np.uint8)
    text[:, 7] = ord("\t")
    for place in range(6):
        digits = numbers // 10**place
        shown = (digits > 0) | (place == 0)
        text[:, 6 - place] = np.where(shown, digits % 10 + ord("0"), 0)
    if column == 1:  # the only column with negative numbers
        text[:, 0] = np.where((draw.random(rows) < 0.1) & (numbers > 0), ord("-"), 0)
    text[draw.random(rows) < 0.05 * (column % 9), :7] = 0
    return text


def _hex(numbers: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Format numbers in hexadecimal; return their characters, uint8 [rows, 9 * keys]."""
    rows, keys = numbers.shape
    text = np.empty((rows, keys, 9), np.uint8)
    text[:, :, :4] = _HEX[numbers >> 16].view(np.uint8).reshape(rows, keys, 4)
    text[:, :, 4:8] = _HEX[numbers & 0xFFFF].view(np.uint8).reshape(rows, keys, 4)
    text[:, :, 8] = ord(",")
    text[:, -1, 8] = ord("\t")
    flat = text.reshape(rows, keys * 9)
    flat[missing, :-1] = 0
    return flat
