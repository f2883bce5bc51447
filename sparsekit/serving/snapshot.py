"""Opens snapshots and looks keys up in them, without torch unless the keys are tensors."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from . import _library
from ._library import COMBINERS, MISSES, ROW_FORMATS
from .best_rows import best_rows
from .errors import BusyError
from .follow import Follower, Progress, follow_once
from .request import ReadRequest, Request, TableInfo, joined, room


class _Reader:
    """Looks keys up in one version of a snapshot."""

    def __init__(self, snapshot: Snapshot, pin: _library.Pin | None) -> None:
        self._snapshot = snapshot
        self._pin = pin

    def lookup(
        self,
        table: str,
        keys: Any,
        offsets: Any = None,
        weights: Any = None,
        combiner: str | None = None,
        found: bool = False,
    ) -> Any:
        """Return the vectors for bags of keys.

        Args:
            table: name of the table.
            keys: int64 or int32 keys. A NumPy array or a dense tensor on the CPU: 1-D with
                `offsets` for bags of any length, 1-D without them for single keys, or with more
                dimensions for bags along the last one. Also (values, offsets), a CSR matrix of
                scipy, and all other forms that a layer accepts (docs/inputs.md).
            offsets: int64 or int32 ``[bags + 1]``, rising from 0 to the number of keys.
            weights: a floating-point number for each key, flat or in the shape of keys.
            combiner: ``"sum"``, ``"mean"``, ``"sqrtn"``, ``"max"`` (without weights), or
                ``"none"`` for a vector for each key, without weights. None means the combiner of
                the layer that the table comes from, or "none" for single keys without weights.
            found: whether to also return which keys have a row.

        Returns:
            float32 vectors: ``[bags, dim]``, or ``[*keys.shape[:-1], dim]`` for a dense array of
            two or more dimensions, or ``[batch, slots, dim]`` for a KeyedJaggedTensor. With
            "none" ``[n, dim]``, or ``[*keys.shape, dim]`` for a dense array. A tensor if the keys
            are a tensor, else a NumPy array. With `found`, a pair of the vectors and a bool for
            each key, in the shape of the keys.

        Raises:
            TypeError, ValueError: an argument is invalid; nothing has been looked up.
            UnknownKeyError: the table refuses unknown keys, and a key is unknown.
        """
        return self.lookup_many([Request(table, keys, offsets, weights, combiner, found)])[0]

    def lookup_many(self, requests: Sequence[Request]) -> list[Any]:
        """Look up several requests in the same version with one call, and return their results.

        This is faster than a call per request, since memory accesses for the keys of all requests
        overlap.
        """
        read = [self._snapshot.read(request) for request in requests]
        # Join the arrays of all requests, because asking each array for its address is slow.
        keys, keys_at = joined([each.keys.values for each in read])
        offsets, offsets_at = joined([each.keys.offsets for each in read])
        weights, weights_at = joined([each.keys.weights for each in read])
        out, out_at = room([each.vectors * each.dim for each in read], np.float32)
        found, found_at = room([each.founds for each in read], np.bool_)
        features = (_library.Feature * len(read))()
        for i, each in enumerate(read):
            _library.FEATURE.pack_into(
                features,
                i * _library.FEATURE.size,
                _library.FEATURE.size,
                each.number,
                each.combiner,
                keys_at[i],
                len(each.keys.values),
                offsets_at[i],
                each.bags,
                weights_at[i],
                out_at[i],
                0,
                found_at[i],
            )
        pin = None if self._pin is None else ctypes.byref(self._pin)
        with self._snapshot.using() as handle:
            _library.check(_library.load().sk_lookup(handle, pin, features, len(read)))
        del keys, offsets, weights  # must not be freed before this point
        return [each.result(*parts) for each, *parts in zip(read, out, found, strict=True)]

    def top_k(self, table: str, queries: Any, k: int) -> tuple[Any, Any]:
        """Find the rows of a table that have the largest dot products with queries.

        The result is exact: scores are computed in float32, summed in an order that is the same on
        every machine. The padding key, and rows that unknown keys share, are left out. Reads all
        rows of the table.

        Args:
            table: name of the table.
            queries: ``[dim]`` or ``[n, dim]``, floating point: a NumPy array or a tensor on the
                CPU. They must be finite.
            k: number of rows to find for each query, >= 1.

        Returns:
            int64 keys and float32 scores, ``[k]`` or ``[n, k]``, best first, the smaller key first
            among equal scores; tensors if queries is a tensor. Fewer than k if the table has fewer
            rows. A query may find fewer rows than the others, since infinities in rows can make
            scores NaN; its results are then padded with keys of 0 and scores of -inf.

        Raises:
            TypeError, ValueError: an argument is invalid.
        """
        number, info = self._snapshot.table_number(table)
        name = f"{self._snapshot.path}: table {table!r}"
        if self._pin is None:
            with self._snapshot.pin() as pinned:  # one version for all queries
                return pinned.top_k(table, queries, k)
        with self._snapshot.using() as handle:
            return best_rows(handle, self._pin, number, info.dim, queries, k, name)


class Pinned(_Reader):
    """A version of a snapshot that does not change while it is pinned; see `Snapshot.pin`.

    Attributes:
        version: number of the version.
        dense_version: the trainer's number for the dense part that belongs to this version.
    """

    def __init__(self, snapshot: Snapshot, pin: _library.Pin) -> None:
        super().__init__(snapshot, pin)
        self.version = int(pin.version)
        self.dense_version = int(pin.dense_version)


class Snapshot(_Reader):
    """Looks up raw keys in a file with trained tables.

    Any number of threads may use it at the same time; they do not wait for one another. To replace
    the file of an open snapshot, rename another file to its name; never write to it, since it is
    mapped.

    Args:
        path: a snapshot file, or the folder of a delta log, whose newest base is opened.
        verify: whether to read the whole file and compare all checksums. Otherwise only those of
            the header are compared, so that opening a file of any size takes the same time.
        prefault: whether to read all pages into memory now, so that the first lookups are fast.
        lock: whether to keep all pages in memory.
        copy: whether to copy the file into this process's memory, in huge pages where the system
            has them. Lookups of random keys are then faster, but processes do not share the memory.

    Raises:
        OSError: the file cannot be read.
        SnapshotError: the file is damaged, or has a newer format; the message names it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = False,
        prefault: bool = False,
        lock: bool = False,
        copy: bool = False,
    ) -> None:
        super().__init__(self, None)
        self.path = os.fspath(path)
        self._handle = ctypes.c_void_p()
        self._users: set[object] = set()  # running calls to the library
        self._closing = threading.Lock()
        self.follower: Follower | None = None
        options = _library.OpenOptions(verify=verify, prefault=prefault, lock=lock, copy=copy)
        library = _library.load()
        name = os.fsencode(self.path)
        if b"\0" in name:
            raise ValueError(f"path has a zero byte: {self.path!r}")
        # The library stores the handle where __del__ finds it, even after an interrupt.
        handle = ctypes.byref(self._handle)
        _library.check(library.sk_open(name, ctypes.byref(options), handle))
        infos = [self._describe_table(t) for t in range(self._describe().tables)]
        self._numbers = {info.name: (t, info) for t, info in enumerate(infos)}

    def close(self) -> None:
        """Free the memory; closing a closed snapshot does nothing.

        Raises:
            BusyError: a version is pinned, or another thread is using the snapshot; it stays open.
        """
        if self.follower is not None:
            self.follower.close()
        with self._closing:
            handle = self._handle
            if not handle:
                return
            # A call adds itself to _users before it reads the handle. So either the call finds no
            # handle, or the check below finds the call.
            self._handle = ctypes.c_void_p()
            try:
                if self._users:
                    raise BusyError(f"{self.path}: another thread uses the snapshot")
                _library.check(_library.load().sk_close(handle))
            except BusyError:
                self._handle = handle
                raise

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # When the interpreter shuts down, modules may be gone.
        if getattr(self, "_handle", None) and sys is not None and not sys.is_finalizing():
            _library.load().sk_close(self._handle)

    def __repr__(self) -> str:
        return f"Snapshot({self.path!r}{'' if self._handle else ', closed'})"

    @property
    def handle(self) -> ctypes.c_void_p:
        """Return the sk_snapshot; `using` keeps it open while the library is called.

        Raises:
            ValueError: the snapshot is closed.
        """
        if not self._handle:
            raise ValueError(f"{self.path}: the snapshot is closed")
        return self._handle

    @contextmanager
    def using(self) -> Iterator[ctypes.c_void_p]:
        """Yield the sk_snapshot, which other threads cannot close within the block."""
        user = object()
        try:
            self._users.add(user)
            yield self.handle
        finally:
            self._users.discard(user)

    @property
    def tables(self) -> Mapping[str, TableInfo]:
        """Return a description of each table by name, in the file's order."""
        return {name: self._describe_table(t) for name, (t, _) in self._numbers.items()}

    @property
    def version(self) -> int:
        """Return the sequence number of the last delta that lookups see; 0 if there was none."""
        return int(self._describe().version)

    @property
    def dense_version(self) -> int:
        """Return the trainer's number for the dense part of this version."""
        return int(self._describe().dense_version)

    @property
    def step(self) -> int:
        """Return the training step; -1 if it is unknown."""
        return int(self._describe().step)

    @property
    def written_at(self) -> int:
        """Return when the version was written, in nanoseconds since 1970 UTC."""
        return int(self._describe().written_at)

    @property
    def log_id(self) -> int:
        """Return the ID of the delta log that the snapshot belongs to; 0 if there is none."""
        return int(self._describe().log_id)

    def refresh(self) -> Progress:
        """Load what has been added to the delta log's folder since the last call.

        All complete versions are loaded. Lookups in other threads can continue.

        Returns:
            Counts of what has been loaded.

        Raises:
            ValueError: the snapshot was opened from a file, not from the folder of its log.
            SnapshotError: a file is damaged or missing; the message names it. The last good version
                stays in use, and the next call tries again.
            BusyError: an older version is pinned; nothing has changed.
            OSError: a file cannot be read.
            MemoryError: there is not enough memory for the new rows.
        """
        with self.using() as handle:
            return follow_once(handle)

    def follow(self, every: float = 0.05) -> Follower:
        """Call `refresh` from a thread until the snapshot is closed.

        The first of several errors in a row is shown as a warning; ``follower.error`` is the last
        one. Closing the snapshot ends the thread.

        Args:
            every: seconds from the start of one call to the start of the next.

        Returns:
            The thread, whose ``close`` ends it.

        Raises:
            ValueError: the snapshot was opened from a file, not from the folder of its log; or
                `every` is not positive.
        """
        if os.path.isfile(self.path):
            raise ValueError(
                f"{self.path}: is a file, which does not change; open the folder of its delta log "
                f"to follow a trainer"
            )
        if self.follower is not None:
            self.follower.close()
        self.follower = Follower(self, every)
        return self.follower

    @contextmanager
    def pin(self) -> Iterator[Pinned]:
        """Pin the newest version within the block: lookups in it see no newer rows.

        Keep the block short. While an older version is pinned, only one newer version can be
        loaded.
        """
        pin = _library.Pin()
        library = _library.load()
        try:
            with self.using() as handle:
                _library.check(library.sk_pin_newest(handle, ctypes.byref(pin)))
            yield Pinned(self, pin)
        finally:
            if any(pin.internal):  # zeros if nothing was pinned because of an error
                _library.check(library.sk_unpin(self.handle, ctypes.byref(pin)))

    def table_number(self, table: str) -> tuple[int, TableInfo]:
        """Return a table's number, and its description from when the snapshot was opened.

        Raises:
            ValueError: there is no such table.
        """
        if table not in self._numbers:
            names = ", ".join(map(repr, self._numbers)) or "none"
            raise ValueError(f"{self.path}: no table named {table!r}; tables: {names}")
        return self._numbers[table]

    def read(self, request: Request) -> ReadRequest:
        """Read a request and check it, except for the values of keys and offsets.

        Raises:
            TypeError, ValueError: an argument is invalid, or there is no such table.
        """
        if not isinstance(request, Request):
            raise TypeError(
                f"{self.path}: lookup_many takes a list of Request(table, keys, ...), "
                f"got {type(request).__name__} in it"
            )
        return ReadRequest(self.path, *self.table_number(request.table), request)

    def _describe(self) -> _library.Info:
        info = _library.Info()
        with self.using() as handle:
            _library.check(_library.load().sk_describe(handle, ctypes.byref(info)))
        return info

    def _describe_table(self, number: int) -> TableInfo:
        info = _library.TableInfo()
        with self.using() as handle:
            status = _library.load().sk_describe_table(handle, number, ctypes.byref(info))
            _library.check(status)
            name = info.name.decode()
        return TableInfo(
            name,
            info.rows,
            info.dim,
            ROW_FORMATS[info.row_format],
            info.row_bytes,
            MISSES[info.miss],
            COMBINERS[info.combiner],
            info.padding_key if info.has_padding_key else None,
        )
