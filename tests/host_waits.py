"""Counts how often the host would wait for a device, on a machine without one.

    waits = waits_of(step, layer, keys)
    assert waits.total() == 0, waits

All tensors are on the CPU here. The tensors that would be on a device are tracked: the given
tensors, tensors made with the ``device=`` of a tensor or a module (but not with the literal
``"cpu"``), and the results of ops on tracked tensors. These events are waits:

- a value or the number of elements of a device's tensor is read: item, bool, int, tolist, numpy,
  nonzero, a boolean mask, masked_select, unique, equal, repeat_interleave;
- bytes are copied from the device's memory to the host's, or from pageable memory of the host to
  the device's: cpu, to, copy_, tensor(device=), and an element set to a number, because torch
  copies the number there as a CPU tensor;
- an op of sparsekit reads words back, as counted by the host runner;
- a lookup waits for its report or for that of an earlier lookup (tests/deferred_errors.py).

This tracks the calling thread and its backward. Streams and events have a separate stand-in
(tests/nccl/streams.py).
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import simt
import torch
from deferred_errors import deferred_errors
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekit.lookup.inputs import _kept_offsets

# Overloads that read a tensor on the device to compute the size of their result.
_SIZED_BY_VALUES = {
    *("_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select"),
    *("nonzero", "repeat_interleave", "unique_consecutive", "unique_dim"),
}
_FACTORIES = {
    *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "tensor", "as_tensor", "zeros", "empty_strided"),
}
_OF_HOST = {"from_numpy", "frombuffer"}
_READS = {"tolist", "numpy", "__array__", "__dlpack__"}


class HostWaits(Counter[str]):
    """Counter of waits by kind."""


class _Device:
    """Storages that would be on a device. They stay alive, so that no address is reused."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        return any(part.untyped_storage()._cdata in self._storages for part in _strided(tensor))

    def add(self, tensor: torch.Tensor) -> None:
        for part in _strided(tensor):
            storage = part.untyped_storage()
            self._storages[storage._cdata] = storage


class _Functions(TorchFunctionMode):
    """Mode that intercepts functions that create, read, copy or set tensors."""

    def __init__(self, device: _Device, waits: HostWaits) -> None:
        super().__init__()
        self._device = device
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function and count the wait that it would cause."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        of_device = bool(args) and isinstance(args[0], torch.Tensor) and self._device.has(args[0])
        if name in _READS and of_device:
            self._waits[name] += 1
            return func(*args, **kwargs)
        if name in ("cpu", "to", "cuda"):
            return self._moved(name, of_device, func, args, kwargs)
        if name == "__setitem__" and of_device:
            return self._set(func, args, kwargs)
        if name in ("copy_", "set_data") and of_device and not self._device.has(args[1]):
            self._waits["copy_ from the host"] += 1
        result = func(*args, **kwargs)
        if name in _FACTORIES and isinstance(kwargs.get("device"), torch.device):
            self._device.add(result)
            if name in ("tensor", "as_tensor"):
                self._waits["tensor(device=)"] += 1
        if name in ("new_tensor",) and of_device:
            self._device.add(result)
            self._waits["new_tensor"] += 1
        return result

    def _moved(self, name: str, of_device: bool, func: Any, args: Any, kwargs: Any) -> Any:
        """Count a copy between host and device; a mere change of dtype does not count."""
        asked = [kwargs.get("device"), *args[1:]]
        to_host = name == "cpu" or "cpu" in [a for a in asked if isinstance(a, str)]
        to_device = any(isinstance(a, torch.device) for a in asked)
        result = func(*args, **kwargs)
        if not isinstance(args[0], torch.Tensor):  # the argument is a module
            return result
        if of_device and to_host:
            self._waits["to the host"] += 1
            return result.clone() if result is args[0] else result
        if not of_device and to_device:
            self._waits["to the device"] += 1
            result = result.clone() if result is args[0] else result
            self._device.add(result)
        return result

    def _set(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, index, value = args[:3]
        number = not isinstance(value, torch.Tensor)
        # torch makes a CPU tensor from the number, and copies it if the shapes are equal.
        if number and tensor[index].dim() == 0:
            self._waits["an element set to a number"] += 1
        elif not number and not self._device.has(value) and value.dim() > 0:
            self._waits["copy_ from the host"] += 1
        return func(*args, **kwargs)


class _Ops(TorchDispatchMode):
    """Mode that tracks the tensors that ops read and create, also in backward."""

    def __init__(self, device: _Device, waits: HostWaits) -> None:
        super().__init__()
        self._device = device
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the op and count the wait that it would cause."""
        name = func._schema.name.split("::")[1]
        inputs = _tensors([args, kwargs or {}])
        of_device = [self._device.has(tensor) for tensor in inputs]
        if func.namespace == "sparsekit":
            func = getattr(torch.ops.sparsekit_simt, name).default
        result = func(*args, **(kwargs or {}))
        if not any(of_device):
            return result
        told = "output_size" in (kwargs or {})
        if name in _SIZED_BY_VALUES and func.namespace == "aten" and not told:
            self._waits[name] += 1
        if "index" in name and any(tensor.dtype == torch.bool for tensor in inputs[1:]):
            self._waits["a boolean mask"] += 1
        for i, tensor in enumerate(_tensors(result)):
            if i not in simt.RESULTS_ON_HOST.get(name, ()):
                self._device.add(tensor)
        return result


def _counted_backward(*args: Any, **kwargs: Any) -> Any:
    """Run backward with the mode on: torch turns modes off when it calls backward."""
    with _following.mode or nullcontext():
        return _run_backward(*args, **kwargs)


class _Following(threading.local):
    """The counting mode of each thread."""

    mode: _Functions | None = None


_following = _Following()
_run_backward = torch.autograd._engine_run_backward
torch.autograd._engine_run_backward = _counted_backward


def _strided(tensor: Any) -> list[torch.Tensor]:
    """Return the dense tensors of which a sparse or jagged tensor consists."""
    if tensor.layout == torch.jagged:
        return [tensor._values, tensor._offsets] if hasattr(tensor, "_values") else []
    return [tensor] if tensor.layout == torch.strided else [tensor._indices(), tensor._values()]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def waits_of(step: Callable[[], object], *of_device: Any, warm_ups: int = 2) -> HostWaits:
    """Count how often this thread would wait in a call.

    Args:
        step: function to call and count. Its ops of sparsekit run on the host runner.
        of_device: tensors, modules, or lists and dicts of tensors that a device would have.
        warm_ups: number of calls before the counted one, because tensors that `step` keeps from
            call to call must be tracked as well.
    """
    return waits_of_each(step, *of_device, calls=warm_ups + 1)[-1]


def waits_of_each(step: Callable[[], object], *of_device: Any, calls: int) -> list[HostWaits]:
    """Count the waits of each of several calls one after another; see `waits_of`."""
    simt.load()
    library = ctypes.CDLL(str(simt.LIBRARY))
    library.sparsekit_num_waits.restype = ctypes.c_int64
    device, waits, found = _Device(), HostWaits(), []
    for thing in of_device:
        module = isinstance(thing, torch.nn.Module)
        for tensor in [*thing.parameters(), *thing.buffers()] if module else _tensors(thing):
            device.add(tensor)
    _kept_offsets.cache_clear()  # the cached offsets were made before tensors were tracked
    try:
        with (
            deferred_errors(on_wait=lambda: waits.update(["a report"])),
            _Functions(device, waits) as _following.mode,
            _Ops(device, waits),
        ):
            for _ in range(calls):
                waits.clear()
                before = library.sparsekit_num_waits()
                step()
                if of_ops := library.sparsekit_num_waits() - before:
                    waits["ops of sparsekit"] = of_ops
                found.append(HostWaits(waits))
    finally:
        _following.mode = None
    return found
