"""Batches that are read while the model computes."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..errors import check_int

__all__ = ["Prefetcher"]


# A batch, the reader's state after it, and what was raised in its place.
_Ready = tuple[Any, dict[str, Any] | None, BaseException | None]
# For the batch that is being read when an iteration is left. Nothing can stop a source that waits
# for longer, on a network for instance: it is left to its thread.
_GRACE_S = 2.0
# Source -> the thread that still reads a batch of it for an iteration that was left.
_left: weakref.WeakKeyDictionary[Any, threading.Thread] = weakref.WeakKeyDictionary()


class Prefetcher:
    """Iterate over a reader, or any iterable, in a thread of its own, some batches ahead.

    Batches keep their order, the last one may be short, and an error of the reader is raised where
    its batch would have been. Reading releases the GIL. When an iteration is left early, its thread
    ends, after the batch that it is reading; a source that gives none for two seconds is no longer
    waited for, and the next iteration begins when it does.

    Args:
        batches: A `Reader`, a DataLoader or another iterable, iterated anew each time.
        depth: How many batches at most are ready and not yet handed out.
        device: Where batches go, those that have a method ``to(device, non_blocking)``: tensors,
            `Batch`. To a CUDA device they go through pinned memory, without waiting.

    Raises:
        TypeError, ValueError: depth is no int >= 1.

    Example:
        >>> for label, dense, sparse in Prefetcher(reader, device="cuda"):
        ...     step(label, dense, sparse)

    """

    def __init__(
        self, batches: Iterable[Any], depth: int = 2, device: torch.device | str | None = None
    ) -> None:
        self.batches = batches
        self.depth = check_int(type(self).__name__, "depth", depth, 1, 2**31 - 1)
        self.device = None if device is None else torch.device(device)
        self._state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        ready: queue.SimpleQueue[_Ready] = queue.SimpleQueue()
        free = threading.Semaphore(self.depth)
        ended = threading.Event()
        thread = threading.Thread(
            target=self._read,
            args=(ready, free, ended),
            name="sparsekit-prefetch",
            daemon=True,
        )
        try:
            thread.start()
            while True:
                batch, self._state, error = ready.get()
                if isinstance(error, StopIteration):
                    return
                if error is not None:
                    raise error
                free.release()
                yield batch
        finally:
            ended.set()
            free.release()
            if thread.ident is not None:
                with contextlib.suppress(TypeError):  # a list, which any number may read at once
                    _left[self.batches] = thread
                thread.join(_GRACE_S)

    def state_dict(self) -> dict[str, Any]:
        """The reader's state after the batch that was handed out last, not the one read last.

        Raises:
            TypeError: what is iterated over has no state.
        """
        if self._state is not None:
            return self._state
        return self._stateful().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration with the batch after the one to which `state` belongs.

        Raises:
            RuntimeError: an iteration that was left still waits for its source, whose state cannot
                be set under it.
        """
        before = self._before()
        if before is not None:
            before.join(_GRACE_S)
            if before.is_alive():
                raise RuntimeError(
                    f"Prefetcher: {type(self.batches).__name__} still reads a batch of an "
                    f"iteration that was left, so its state cannot be set; make another one"
                )
        self._stateful().load_state_dict(state)
        self._state = None

    def _before(self) -> threading.Thread | None:
        try:
            return _left.get(self.batches)
        except TypeError:
            return None

    def _stateful(self) -> Any:
        if not hasattr(self.batches, "state_dict"):
            raise TypeError(f"Prefetcher: {type(self.batches).__name__} has no state_dict")
        return self.batches

    def _read(
        self,
        ready: queue.SimpleQueue[_Ready],
        free: threading.Semaphore,
        ended: threading.Event,
    ) -> None:
        batches: Any = self.batches
        stateful = hasattr(batches, "state_dict")
        state = None
        try:
            before = self._before()
            if before is not None:
                before.join()  # two at once would mix up the source's place
            if ended.is_set():
                return
            iterator = iter(batches)
            while True:
                free.acquire()
                if ended.is_set():
                    return
                try:
                    batch, end = self._moved(next(iterator)), None
                except StopIteration as error:
                    batch, end = None, error
                state = batches.state_dict() if stateful else None
                ready.put((batch, state, end))
                if end is not None:
                    return
        except BaseException as error:
            ready.put((None, state, error))  # the state is that of the batch before

    def _moved(self, batch: Any) -> Any:
        if self.device is None or not hasattr(batch, "to"):
            return batch
        if self.device.type == "cuda":
            return batch.pin_memory().to(self.device, non_blocking=True)
        return batch.to(self.device)
