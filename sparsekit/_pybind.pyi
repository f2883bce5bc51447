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
