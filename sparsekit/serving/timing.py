"""Times lookups in a snapshot, for a given batch size and number of threads."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from . import _library
from .format import BUCKET, SNAPSHOT_HEADER, TABLE_RECORD
from .request import TableInfo
from .snapshot import Snapshot

# Fraction of the calls that serve as a warm-up and are not counted; 0 for a cold measurement.
_WARM_UP = 0.1
# Maximum number of buckets per table to draw keys from; buckets are read one by one.
_MOST_BUCKETS = 1 << 16
# Maximum number of keys per thread; the keys of all calls are drawn before the first call.
_MOST_KEYS = 1 << 24


class Load(NamedTuple):
    """Describes the calls to measure.

    Attributes:
        batch: samples per call; a sample has a bag in each table.
        keys: keys per bag. All keys of a table are equally likely.
        misses: fraction of keys that have no row.
        calls: calls per thread; fewer are made if their keys would take much memory.
        threads: number of threads that make calls at the same time.
        cold: whether to drop the file from memory first.
    """

    batch: int = 1
    keys: int = 1
    misses: float = 0.0
    calls: int = 10_000
    threads: int = 1
    cold: bool = False


class Times(NamedTuple):
    """The result of a measurement.

    Attributes:
        load: the calls that were made.
        tables: number of tables that each call looks keys up in.
        microseconds: durations of the calls of all threads, float64 ``[calls]``, ascending.
    """

    load: Load
    tables: int
    microseconds: np.ndarray

    def at(self, fraction: float) -> float:
        """Return the duration that this fraction of the calls did not exceed, in microseconds."""
        last = len(self.microseconds) - 1
        return float(self.microseconds[min(last, int(fraction * len(self.microseconds)))])

    @property
    def calls_per_second(self) -> float:
        """Calls per second, over all threads."""
        return 1e6 * self.load.threads / float(self.microseconds.mean())

    @property
    def keys_per_second(self) -> float:
        """Keys per second, over all threads."""
        return self.calls_per_second * self.load.batch * self.load.keys * self.tables


def time_lookups(path: str | os.PathLike[str], load: Load, seed: int = 0, **options: Any) -> Times:
    """Open a snapshot, and time lookups in all of its tables.

    Threads run native code, without the interpreter between calls, and each call has its own keys.
    For a warm measurement, all pages are read into memory first. For a cold one, they are dropped
    from the page cache, which has no effect on pages that another process has mapped.

    Args:
        path: the file of a snapshot.
        load: the calls.
        seed: seed of the keys.
        options: how to open the snapshot; see `Snapshot`.

    Raises:
        OSError, SnapshotError: the snapshot cannot be opened.
        ValueError: a table has no rows.
    """
    draw = np.random.default_rng(seed)
    with open(path, "rb") as file:
        # Read keys without mapping the file, because mapped pages cannot be dropped.
        keys = _keys_of_tables(file, draw)
        most = _MOST_KEYS // (load.batch * load.keys * max(1, len(keys)))
        load = load._replace(calls=max(1, min(load.calls, most)))
        if load.cold:
            os.fsync(file.fileno())  # a page that is not on disk yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with Snapshot(path, **{"prefault": not load.cold, **options}) as snapshot:
        callers = [_Caller(snapshot, load, keys, draw) for _ in range(load.threads)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    first = 0 if load.cold else int(_WARM_UP * load.calls)
    times = np.concatenate([caller.taken()[first:] for caller in callers])
    return Times(load, len(keys), np.sort(times) / 1000)


class _Caller(threading.Thread):
    """A thread that makes calls; it owns their inputs."""

    def __init__(
        self, snapshot: Snapshot, load: Load, keys: list[np.ndarray], draw: np.random.Generator
    ) -> None:
        super().__init__()
        self._snapshot, self._load = snapshot, load
        infos = list(snapshot.tables.values())
        count = load.batch * load.keys
        self._offsets = np.arange(0, count + 1, load.keys)
        self._keys = np.empty((load.calls, len(infos), count), np.int64)
        for t, known in enumerate(keys):
            self._keys[:, t] = draw.choice(known, (load.calls, count))
        missed = draw.random(self._keys.shape) < load.misses
        self._keys[missed] = draw.integers(-(2**62), 2**62, int(missed.sum()))
        self._out = [np.empty((load.batch, info.dim), np.float32) for info in infos]
        self._features = self._described(infos)
        self._nanoseconds = np.zeros(load.calls, np.int64)
        self._failed: Exception | None = None

    def _described(self, infos: list[TableInfo]) -> np.ndarray:
        """Return the sk_features of all calls, ``[calls, tables]``."""
        features = np.zeros((self._load.calls, len(infos)), np.dtype(_library.Feature))
        features["size"] = features.dtype.itemsize
        features["table"] = np.arange(len(infos))
        combiners = [_library.COMBINERS.index(info.combiner) for info in infos]
        features["combiner"] = [_library.COMBINERS.index("sum") if c == 3 else c for c in combiners]
        each = self._keys.strides[1] * np.arange(features.size).reshape(features.shape)
        features["keys"] = self._keys.ctypes.data + each
        features["num_keys"] = self._keys.shape[2]
        features["offsets"] = self._offsets.ctypes.data
        features["num_bags"] = self._load.batch
        features["out"] = [out.ctypes.data for out in self._out]
        return features

    def run(self) -> None:
        """Make the calls."""
        calls, tables = self._features.shape
        try:
            status = _library.load().sk_time_lookups(
                self._snapshot.handle,
                ctypes.cast(self._features.ctypes.data, ctypes.POINTER(_library.Feature)),
                tables,
                calls,
                self._nanoseconds.ctypes.data,
            )
            _library.check(status)
        except Exception as error:
            self._failed = error

    def taken(self) -> np.ndarray:
        """Return the duration of each call in nanoseconds; raise the error if a call failed."""
        if self._failed is not None:
            raise self._failed
        return self._nanoseconds


def _keys_of_tables(file: BinaryIO, draw: np.random.Generator) -> list[np.ndarray]:
    """Return keys for each table of a snapshot, from buckets chosen at random."""
    header = np.fromfile(file, SNAPSHOT_HEADER, 1)[0]
    records = np.fromfile(file, TABLE_RECORD, int(header["num_tables"]))
    found = []
    for record in records:
        count = int(record["num_buckets"])
        chosen = np.arange(count)
        if count > _MOST_BUCKETS:
            chosen = np.sort(draw.integers(0, count, _MOST_BUCKETS))
        begins = int(record["index_offset"]) + chosen * BUCKET.itemsize
        read = (os.pread(file.fileno(), BUCKET.itemsize, begin) for begin in begins.tolist())
        buckets = np.frombuffer(b"".join(read), BUCKET)
        keys = buckets["keys"][buckets["rows"] >= 0]
        if not len(keys):
            raise ValueError(f"{file.name}: a table has no rows to look up")
        found.append(keys)
    return found
