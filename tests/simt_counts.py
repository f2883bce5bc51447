"""Counts the work that a GPU would do: launches, memsets, waits, atomics, bytes.

    with counted() as counts:
        step()
    assert counts.sum().launches <= 40
    assert counts.sum("update_rows_").moved <= 1.5 * floor

Ops of `sparsekit` run on the host runner, which lists their launches and the memory accesses of
their kernels. Torch's ops are counted as they are dispatched: each one as a single kernel that
moves its inputs and outputs. All tensors are on the CPU here, so ops are counted even if a layer on
a GPU would keep their tensors on the CPU. As by default on a GPU, ops do not read back whether they
have met a bad row (`sparsekit.checked`).
"""

import ctypes
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import simt
import torch
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Count:
    """Work that an op causes on a GPU."""

    calls: int = 0
    """Calls of the op itself."""
    kernels: int = 0
    memsets: int = 0
    library: int = 0
    """Scans and sorts; each is one or more operations of CUB."""
    of_library: int = 0
    """Kernels and memsets of scans and sorts."""
    torch: int = 0
    """Torch's ops that launch something."""
    waits: int = 0
    """Times that the host waits for words from the device."""
    copies_in: int = 0
    """Tensors that torch makes from host values; each causes a wait if it goes to a GPU."""
    atomics: int = 0
    """Atomics on device memory, one per thread; a reduction of several floats counts once."""
    accessed: int = 0
    """Bytes that threads read and write, repeats included."""
    read: int = 0
    """Bytes of the distinct 32-byte sectors that a launch reads, as if its cache were perfect."""
    written: int = 0
    """Bytes of the distinct 32-byte sectors that a launch writes."""
    busiest: int = 0
    """Bytes that the block with the most accesses reads and writes, summed over launches."""

    def __add__(self, other: "Count") -> "Count":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Count(*(one + two for one, two in pairs))

    @property
    def launches(self) -> int:
        """Return the number of launches, where a scan or sort counts as one."""
        return self.kernels + self.memsets + self.library + self.torch

    @property
    def operations(self) -> int:
        """Return the number of operations put on the stream, CUB's included."""
        return self.kernels + self.memsets + self.of_library + self.torch

    @property
    def moved(self) -> int:
        """Return the bytes read and written; a launch counts each sector once."""
        return self.read + self.written


class Counts(dict[tuple[str, str], Count]):
    """Dict of (op, launch name) to Count; the name "" is for work outside the op's launches."""

    on_host: Sequence[torch.Tensor] = ()
    """The results in host memory of the last op that had any; reading them is no wait."""

    def sum(self, op: str | None = None, name: str | None = None) -> Count:
        """Add up all entries, or only the entries of an op or of a launch name."""
        chosen = (c for key, c in self.items() if op in (None, key[0]) and name in (None, key[1]))
        return sum(chosen, Count())

    def ops(self) -> list[str]:
        """Return the ops in the order in which they first ran."""
        return list(dict.fromkeys(op for op, _ in self))

    def names(self, op: str) -> list[str]:
        """Return the names of an op's launches, in the order in which they first ran."""
        return [name for of, name in self if of == op and name]

    def add(self, op: str, name: str, count: Count) -> None:
        """Add a count to the entry of an op and a launch name."""
        self[op, name] = self.get((op, name), Count()) + count


class _Request(IntEnum):
    """Copy of the enum of the same name in csrc/core/simt/host.h."""

    KERNEL, MEMSET, LIBRARY, READ_BACK = range(4)


class _Record(ctypes.Structure):
    """Copy of the struct of the same name in csrc/core/simt/counts.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("request", ctypes.c_int64),
        ("atomics", ctypes.c_int64),
        ("accessed", ctypes.c_int64),
        ("read", ctypes.c_int64),
        ("written", ctypes.c_int64),
        ("operations", ctypes.c_int64),
        ("busiest", ctypes.c_int64),
    )

    def count(self) -> Count:
        field = {
            _Request.KERNEL: "kernels",
            _Request.MEMSET: "memsets",
            _Request.LIBRARY: "library",
            _Request.READ_BACK: "waits",
        }[_Request(self.request)]
        return Count(
            of_library=self.operations if field == "library" else 0,
            atomics=self.atomics,
            accessed=self.accessed,
            read=self.read,
            written=self.written,
            busiest=self.busiest,
            **{field: 1},
        )


class Runner:
    """The host runner's list of launches; each thread has its own."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(simt.LIBRARY))
        self._library.sparsekit_simt_records.restype = ctypes.POINTER(_Record)
        self._mode = 0

    def count(self, on: bool, plan: bool = False) -> None:
        """Start recording launches in an empty list, or stop recording; see `counted`."""
        self._mode = 2 if plan else int(on)
        self._library.sparsekit_simt_count(self._mode)

    def take(self) -> list[tuple[str, Count]]:
        """Return the names and counts of the launches recorded so far, and empty the list."""
        number = ctypes.c_int64()
        records = self._library.sparsekit_simt_records(ctypes.byref(number))
        taken = [(r.name.decode(), r.count()) for r in records[: number.value]]
        self._library.sparsekit_simt_count(self._mode)
        return taken

    def sees_bytes(self) -> bool:
        """Return whether plain loads and stores are counted; sanitizer builds do not count them."""
        return bool(self._library.sparsekit_simt_sees_bytes())

    def set_checked(self, on: bool) -> bool:
        """Set whether ops read back the errors that kernels report; return the old setting."""
        return bool(self._library.sparsekit_set_checked(int(on)))


class _Unchecked:
    """Context in which checks are off for the whole process while any thread counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._before = Runner().set_checked(False)
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                Runner().set_checked(self._before)


_unchecked = _Unchecked()

# These ops launch nothing, and neither do views.
_NO_LAUNCH = {
    *("alias", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty"),
    *("new_empty_strided", "resize_", "set_", "_coalesced_", "_local_scalar_dense", "_nnz"),
    *("_sparse_coo_tensor_unsafe", "_sparse_coo_tensor_with_dims_and_tensors", "dense_dim"),
    *("is_coalesced", "is_same_size", "sparse_dim", "sym_size", "sym_stride", "sym_numel"),
}
_WAITS = {
    *("_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero"),
    *("unique_consecutive", "unique_dim"),
}
_OVERWRITES = {"copy_", "fill_", "zero_"}
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class _Dispatch(simt.SimtMode):
    """Mode that runs ops on the host runner and adds their launches to `counts`."""

    def __init__(self, counts: Counts, runner: Runner) -> None:
        super().__init__()
        self._counts = counts
        self._runner = runner
        self._op: str | None = None  # the op that is running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the op and count its work."""
        name = func._schema.name.split("::")[1]
        if func.namespace not in ("sparsekit", "sparsekit_simt"):
            result = func(*args, **(kwargs or {}))
            self._count_torch(func, name, (args, kwargs), result)
            return result
        op = getattr(torch.ops.sparsekit_simt, name).default
        self._counts.add(name, "", Count(calls=1))
        self._op = name
        try:
            # Skip autograd, and keep this mode on for the torch ops that the kernel calls.
            with self:
                result = op.redispatch(_CPU, *args, **(kwargs or {}))
                if name in simt.RESULTS_ON_HOST:
                    self._counts.on_host = [result[i] for i in simt.RESULTS_ON_HOST[name]]
                return result
        finally:
            self._op = None
            for launched, count in self._runner.take():
                self._counts.add(name, launched, count)

    def _count_torch(self, func: Any, name: str, inputs: Any, result: Any) -> None:
        made = _tensors(result)
        masks = [t for t in _tensors(inputs) if t.dtype == torch.bool] if "index" in name else []
        waits = name in _WAITS or bool(masks)
        count = Count(waits=int(waits), copies_in=int(name == "lift_fresh"))
        touched = made or _tensors(inputs)  # some in-place ops return nothing
        if name not in _NO_LAUNCH and not func.is_view and any(map(_bytes, touched)):
            written = sum(map(_bytes, made))
            # An op that selects elements reads at most as much as it writes, plus the indices.
            read = sum(
                _bytes(t) if t.dtype == torch.int64 else min(_bytes(t), written or _bytes(t))
                for t in _tensors(inputs)[name in _OVERWRITES :]
            )
            count += Count(torch=1, accessed=read + written, read=read, written=written)
        if count == Count():
            return
        if self._op is None:
            self._counts.add(f"aten::{name}", "", count + Count(calls=1))
        else:
            self._counts.add(self._op, f"aten::{name}", count)


class _Functions(TorchFunctionMode):
    """Mode that counts the waits of methods that read a CPU tensor without calling an op."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the method, and count a wait if it reads a tensor's values."""
        reads = func in (torch.Tensor.tolist, torch.Tensor.numpy)
        if reads and not any(args[0] is one for one in self._counts.on_host):
            self._counts.add(f"Tensor.{func.__name__}", "", Count(calls=1, waits=1))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.layout == torch.strided else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _bytes(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes in memory, counting repeated elements of an expanded tensor once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


_counting = threading.local()


@contextmanager
def counted(plan: bool = False) -> Iterator[Counts]:
    """Run this thread's sparsekit ops on the host runner and count their work in this block.

    With `plan`, launches are checked and counted but not executed, and results have addresses
    without memory, which may only be passed to other ops under `plan`. So tensors may have any
    size.

    Several threads may count at the same time; each counts its own ops. Initialization in the first
    call of an op in a process is not counted.
    """
    if getattr(_counting, "on", False):
        raise RuntimeError("counted: this thread is counting already")
    simt.load()
    runner, counts = Runner(), Counts()
    with _unchecked:
        torch.ops.sparsekit_simt.unique(torch.zeros(1, dtype=torch.int64))
        runner.count(True, plan)
        _counting.on = True
        try:
            with _Functions(counts), _Dispatch(counts, runner):
                yield counts
        finally:
            _counting.on = False
            runner.count(False)
