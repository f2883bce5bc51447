"""Runs the CUDA kernels on the host: ops of `sparsekit` are redirected to `sparsekit_simt`.

A test under `SimtMode` calls public functions, gradients and layers as usual. Below autograd, an op
of the same name replaces each op and executes the CUDA kernels on the host runner (csrc/core/simt).
"""

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sparsekit

LIBRARY = Path(
    os.environ.get("SPARSEKIT_SIMT_LIBRARY")
    or Path(sparsekit.__file__).parent / "lib" / "simt" / "libsparsekit_simt.so"
)


# The positions of an op's results that are in host memory on every device.
RESULTS_ON_HOST = {"group_embedding_bag_backward": (2,), "group_drop_lowest_": (0, 1)}


class SimtMode(TorchDispatchMode):
    """Mode in which the current thread's sparsekit ops run on the host runner."""

    def __init__(self) -> None:
        load()
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the op, or its counterpart on the host runner."""
        if func.namespace == "sparsekit":
            func = getattr(torch.ops.sparsekit_simt, func._schema.name.split("::")[1]).default
        return func(*args, **(kwargs or {}))


@functools.cache
def load() -> None:
    """Make `torch.ops.sparsekit_simt` available.

    Raises:
        FileNotFoundError: this build has no host runner, for example after `make demo`.
    """
    if not LIBRARY.exists():
        raise FileNotFoundError(
            f"the tests run the CUDA kernels on the host, but this build of sparsekit has no "
            f"{LIBRARY}: run `make build`"
        )
    torch.ops.load_library(str(LIBRARY))
