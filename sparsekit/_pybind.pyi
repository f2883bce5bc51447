"""Types of the compiled module in csrc/pybind/module.cpp."""

from collections.abc import Sequence
from typing import Any

import numpy as np

def xxh64_many(values: Sequence[Any], seed: int, num_threads: int = 1) -> np.ndarray: ...
def xxh64_arrow(schema: Any, array: Any, seed: int, num_threads: int = 1) -> np.ndarray: ...
def xxh64_arrow_stream(stream: object, seed: int, num_threads: int = 1) -> np.ndarray: ...
def xxh64_fixed_width(
    texts: int, size: int, unicode: bool, n: int, seed: int, num_threads: int = 1
) -> np.ndarray: ...
def xxh64_numpy_strings(
    dtype: np.dtype,
    texts: int,
    stride: int,
    n: int,
    missing: bytes,
    seed: int,
    num_threads: int = 1,
) -> np.ndarray: ...
def use_xxh64_engine(wanted: str) -> str | None: ...
def build_info() -> dict[str, Any]: ...

class TextField:
    def __init__(
        self,
        kind: str,
        column: int = 0,
        missing: float = 0.0,
        required: bool = False,
        separator: str = "",
        missing_key: int | None = None,
        seed: int = 0,
    ) -> None: ...

class TextFormat:
    def __init__(
        self, delimiter: str, quote: str, max_line_bytes: int, fields: Sequence[TextField]
    ) -> None: ...

class TextLines:
    end: int
    unclosed: bool
    def __init__(
        self, text: bytes, stop: int, delimiter: str, quote: str, skip_blank: bool, complete: bool
    ) -> None: ...
    def __len__(self) -> int: ...
    def begin_of(self, i: int) -> int: ...
    def line(self, i: int) -> bytes: ...
    def parse(self, format: TextFormat, order: np.ndarray, num_threads: int) -> tuple[Any, ...]: ...

def skip_line(
    text: bytes, begin: int, delimiter: str, quote: str, place: int
) -> tuple[int, int]: ...

class RowBound:
    """An upper bound on the rows in use of a table, known without waiting for the table's device.

    The bound belongs to the tensor `size` and its version: after anything else writes to `size`,
    the bound is unknown.

    Attributes:
        most: the bound; infinite if it is unknown.
        entries: total number of keys that have been looked up and may have been inserted.
    """

    most: float
    entries: int
    def add(self, size: Any, entries: int) -> int:
        """Count keys that are about to be looked up, and return the new total number."""

    def most_for(self, size: Any) -> float:
        """Return the bound if it belongs to this tensor `size`, else infinity; count no keys."""

    def lose(self) -> None:
        """Give up the bound for good, because replays of a graph also insert keys."""

    def learn(self, rows: int, entries: int) -> None:
        """Update the bound, given the rows in use after `entries` keys; ignore outdated numbers."""

class RowBounds:
    """The bounds of the tables of a lookup that insert keys, and the capacities of the tables.

    `numbers` are the indices of these tables among all tables of the lookup.
    """

    def __init__(
        self, bounds: list[RowBound], capacities: list[int], numbers: list[int]
    ) -> None: ...
    def add(self, sizes: list[Any], entries: list[int]) -> list[int]:
        """Count the keys that are looked up in each table of the lookup; see `RowBound.add`."""

    def fit(self) -> bool:
        """Return whether no bound exceeds its table's capacity."""

    def learn(self, words: Any, counted: list[int]) -> bool:
        """Learn from three int64 words of each table; return whether a table has refused keys.

        The words are the rows in use before the lookup, refused keys, and rows in use after it;
        `counted` is the result of `add` for the lookup.
        """

def entries_by_table(
    limits: list[tuple[int, int, int]], lengths: list[int], num_tables: int
) -> list[int]: ...
def dict_has(dict: dict[Any, Any], keys: list[Any], values: list[Any]) -> bool: ...
def dict_is(dict: dict[Any, Any], keys: list[Any], values: list[Any]) -> bool: ...
def each_dict_has(dicts: list[Any], keys: list[str], values: list[Any]) -> bool: ...
def no_dict_has(dicts: list[Any], key: str) -> bool: ...
def lists_are(items: list[Any], others: list[Any]) -> bool: ...
def each_is(objects: list[Any], name: str, value: object) -> bool: ...
def each_equal(objects: list[Any], name: str, other: str) -> bool: ...
def count_up(objects: list[Any], name: str) -> None: ...

class TensorPlaces:
    def __init__(self, tensors: list[Any]) -> None: ...
    def are_of(self, tensors: list[Any]) -> bool: ...

class SharedMemoryCommunicator:
    def __init__(
        self, rank: int, world_size: int, file: int, sockets: Sequence[int], seconds: float
    ) -> None: ...
    def begin(
        self,
        send: int,
        send_bytes: Sequence[int],
        receive: int,
        receive_bytes: Sequence[int],
        keep: object,
    ) -> int: ...
    def wait(self, number: int) -> None: ...
    def close(self, reason: str) -> None: ...
    @staticmethod
    def total_bytes(world_size: int) -> int: ...

# Only where build_info()["nccl"] is not False.
class NcclCommunicator:
    def __init__(self, rank: int, world_size: int, unique_id: bytes) -> None: ...
    def all_to_all(
        self,
        send: int,
        send_bytes: Sequence[int],
        receive: int,
        receive_bytes: Sequence[int],
        stream: int,
    ) -> None: ...
    def check(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def destroy(self) -> None: ...
    @staticmethod
    def library_version() -> int: ...
    @staticmethod
    def unique_id() -> bytes: ...
