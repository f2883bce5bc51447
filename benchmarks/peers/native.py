"""Peers written in C++, which are compiled on first use and called through ctypes.

They are compiled for this processor into ``build/peers``. Outputs are torch tensors, so that
allocating them takes a peer as long as it takes sparsekit.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import weakref
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "peers"
FLAGS = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"]


@cache
def missing(name: str) -> str | None:
    """Return why the peer "gather" or "flat_map" cannot be measured; None if it can."""
    if _compiler() is None:
        return "there is no C++ compiler (g++, or CXX)"
    if name == "flat_map" and not _includes():
        return "libboost-headers is not installed (pip install libboost-headers, or make bench)"
    try:
        _library(name)
    except (subprocess.CalledProcessError, OSError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"{name}.cpp did not compile: {said.strip().splitlines()[0]}"
    return None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _includes() -> list[str]:
    """Return folders with boost's headers; the wheel's folder comes first."""
    spec = find_spec("libboost_headers")
    folders = (spec and spec.submodule_search_locations) or []
    wheel = [str(Path(folder) / "include") for folder in folders]
    return [x for x in (*wheel, "/usr/include", "/usr/local/include") if _has_flat_map(x)]


def _has_flat_map(folder: str) -> bool:
    return (Path(folder) / "boost/unordered/unordered_flat_map.hpp").exists()


@cache
def _library(name: str) -> ctypes.CDLL:
    source = HERE / f"{name}.cpp"
    compiler = _compiler()
    assert compiler is not None
    flags = FLAGS + [f"-I{x}" for x in _includes()[:1] if not x.startswith("/usr/")]
    stamp = f"{source.read_text()} {compiler} {flags} {_processor()}"
    target = BUILD / f"{name}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}.so"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        # Compile to a temporary file, then rename it: another process may be loading the library.
        part = target.with_suffix(f".{os.getpid()}")
        command = [compiler, *flags, str(source), "-o", str(part)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        part.replace(target)
    return ctypes.CDLL(str(target))


def _processor() -> str:
    """Return the processor's flags; they distinguish builds for different machines in BUILD."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")


def _function(library: str, name: str, result: type | None = None) -> Any:
    function = getattr(_library(library), name)
    function.restype = result
    return function


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def pages(num_bytes: int, huge: bool) -> torch.Tensor:
    """Return uint8 zeros ``[num_bytes]``; with a C++ compiler, in 2 MiB (`huge`) or 4 KiB pages."""
    if missing("gather") is not None:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    address = _function("gather", "pages_new", ctypes.c_void_p)(
        ctypes.c_int64(num_bytes), ctypes.c_int(huge)
    )
    if not address:
        raise MemoryError(f"no memory for {num_bytes:,} bytes")
    array = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    tensor = torch.from_numpy(array)
    # Free the pages when the array is freed, after all tensors that share its memory.
    weakref.finalize(array, partial(_free, "gather", "pages_free", address))
    return tensor


def _free(library: str, function: str, address: int) -> None:
    _function(library, function)(ctypes.c_void_p(address))


def gather(array: torch.Tensor, keys: torch.Tensor) -> int:
    """Read line ``keys[i]`` of a float32 array ``[lines, 16]`` for each i; return their sum."""
    return _function("gather", "gather", ctypes.c_int64)(
        _pointer(array),
        _pointer(keys),
        ctypes.c_int64(len(keys)),
        ctypes.c_int(torch.get_num_threads()),
    )


class FlatMap:
    """boost::unordered_flat_map from int64 keys to int64 values, with a given capacity."""

    def __init__(self, capacity: int) -> None:
        address = _function("flat_map", "map_new", ctypes.c_void_p)(ctypes.c_int64(capacity))
        self._map = ctypes.c_void_p(address)
        weakref.finalize(self, partial(_free, "flat_map", "map_free", address))

    def clear(self) -> None:
        """Remove all keys, but keep the memory."""
        _function("flat_map", "map_clear")(self._map)

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the values of keys ``[n]``, -1 for unknown keys."""
        return self._call("map_find", keys)

    def emplace(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the values of keys ``[n]``; a new key's value is the number of keys so far."""
        return self._call("map_emplace", keys)

    def _call(self, name: str, keys: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(keys)
        _function("flat_map", name)(
            self._map, _pointer(keys), ctypes.c_int64(len(keys)), _pointer(out)
        )
        return out
