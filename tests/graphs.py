"""Captures a step with the host runner and replays it, as a CUDA graph does.

While a step is captured, launches of sparsekit's ops and torch's ops on tensors are recorded with
their arguments, and nothing runs: results are garbage until a replay has written to them. Anything
that waits for a device is an error.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import deferred_errors
import pytest
import simt
import torch
from host_waits import _SIZED_BY_VALUES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from sparsekit.tables import reports
from sparsekit.train import captured_step

T = TypeVar("T")
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _library() -> ctypes.CDLL:
    simt.load()
    library = ctypes.CDLL(str(simt.LIBRARY))
    library.sparsekit_simt_new_recording.restype = ctypes.c_void_p
    library.sparsekit_simt_recorded.restype = ctypes.c_int64
    library.sparsekit_simt_replay.restype = ctypes.c_char_p
    return library


class _Recorder(TorchDispatchMode):
    """Mode that records the ops of a capture as calls to make in a replay."""

    def __init__(self) -> None:
        super().__init__()
        self._library = _library()
        self._recording = ctypes.c_void_p(self._library.sparsekit_simt_new_recording())
        self._done = 0
        self.calls: list[Callable[[], object]] = []
        self._kept: list[Any] = []  # arguments and results, whose memory a graph keeps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the op; return results that it has not computed yet."""
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if func.namespace == "sparsekit":
            return self._launches(getattr(torch.ops.sparsekit_simt, name).default, args, kwargs)
        if name in _SIZED_BY_VALUES:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        arguments = func._schema.arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        if written:
            self._record(func, args, kwargs, None)
            given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
            return given[written[0]] if len(func._schema.returns) == 1 else None
        if "empty" in name or (name != "contiguous" and _returns_views(func)):
            return func(*args, **kwargs)
        meta = tree_map(_as_meta, (args, kwargs))
        if "device" in meta[1]:
            meta[1]["device"] = "meta"
        results = tree_map(_garbage, func(*meta[0], **meta[1]))
        self._record(func, args, kwargs, results)
        return results

    def _record(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        self._flush()

        def call() -> None:
            found = func(*args, **kwargs)
            if results is not None:
                tree_map(_copy, results, found)

        self.calls.append(call)

    def _launches(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._library.sparsekit_simt_record(self._recording)
        try:
            with self:  # an op calls torch itself where it needs a contiguous copy
                results = func.redispatch(_CPU, *args, **kwargs)
        finally:
            self._library.sparsekit_simt_record(None)
        self._kept.append((args, kwargs, results))
        self._flush()
        return results

    def _flush(self) -> None:
        """Let a replay execute the launches that have been recorded since the last call."""
        begin, self._done = self._done, self._library.sparsekit_simt_recorded(self._recording)
        span = ctypes.c_int64(begin), ctypes.c_int64(self._done)

        def call() -> None:
            error = self._library.sparsekit_simt_replay(self._recording, *span)
            if error is not None:
                raise RuntimeError(error.decode())

        self.calls.append(call)


def _returns_views(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)


def _copy(into: Any, new: Any) -> None:
    if isinstance(into, torch.Tensor):
        into.copy_(new)


def _as_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _garbage(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    made.untyped_storage().fill_(0x5B) if made.numel() else None
    return made


class HostGraph:
    """Stand-in for `captured_step.Graph`."""

    capturing = False
    replays = 0

    def __init__(self, device: torch.device) -> None:
        self._recorder: _Recorder | None = None

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run the step."""
        return run()

    def capture(self, run: Callable[[], T]) -> T:
        """Record the step."""
        self._recorder = _Recorder()
        HostGraph.capturing = True
        try:
            with self._recorder:
                return run()
        finally:
            HostGraph.capturing = False

    def replay(self) -> None:
        """Make the recorded calls."""
        HostGraph.replays += 1
        with torch.no_grad():
            for call in self._recorder.calls:
                call()


@contextmanager
def host_graphs(
    is_made: Callable[[int], bool] = lambda looks: looks > 0,
    on_wait: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Context in which `CapturedStep` captures with the host runner, on tensors of the CPU.

    The arguments are those of `deferred_errors`.
    """

    def looked(looks: int) -> bool:
        if HostGraph.capturing:
            raise RuntimeError("operation not permitted when stream is capturing: event query")
        return is_made(looks)

    with (
        pytest.MonkeyPatch.context() as patch,
        simt.SimtMode(),
        deferred_errors.deferred_errors(looked, on_wait),
    ):
        patch.setattr(captured_step, "Graph", HostGraph)
        patch.setattr(reports, "is_capturing", lambda device: HostGraph.capturing)
        HostGraph.replays = 0
        yield
