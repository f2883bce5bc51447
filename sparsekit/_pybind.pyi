"""Types of the compiled module in csrc/pybind/module.cpp."""

from collections.abc import Sequence
from typing import Any

import numpy as np

def xxh64_many(values: Sequence[Any], seed: int, num_threads: int = 1) -> np.ndarray: ...
def xxh64_integers(values: np.ndarray, seed: int, num_threads: int = 1) -> np.ndarray: ...
def build_info() -> dict[str, Any]: ...
