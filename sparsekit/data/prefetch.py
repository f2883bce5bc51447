"""Reads batches in the background while the model computes."""

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


# A batch, the reader's state after it, and the error, if reading the batch raised one.
_Ready = tuple[Any, dict[str, Any] | None, BaseException | None]
# When an iteration is left early: how many seconds to wait for the batch being read. A thread
# cannot be stopped while it waits for a source, such as a network, so after this time it is left
# behind.
_GRACE_S = 2.0
# For each source: the thread that is still reading a batch for an iteration that was left early.
_left: weakref.WeakKeyDictionary[Any, threading.Thread] = weakref.WeakKeyDictionary()


class Prefetcher:
    """Iterate over a reader or any iterable, reading some batches ahead in a background thread.

    Batches keep their order, and the last one may be short. An error from the reader is raised
    where the failed batch would have been yielded. Reading releases the GIL. When an iteration is
    left early, its thread ends after the batch that it is reading. If that takes more than two
    seconds, the thread is left behind, and the next iteration first waits for it.

    Args:
        batches: A `Reader`, a DataLoader or any other iterable that can be iterated repeatedly.
        depth: Maximum number of batches to read ahead.
        device: Device for batches that have a method ``to(device, non_blocking)``, such as tensors
            and `Batch`. Copies to a CUDA device go through pinned memory and do not block.

    Raises:
        TypeError, ValueError: depth is not an int >= 1.

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
                # A list cannot be a dict key, and need not be: several threads may read it at once.
                with contextlib.suppress(TypeError):
                    _left[self.batches] = thread
                thread.join(_GRACE_S)

    def state_dict(self) -> dict[str, Any]:
        """Return the reader's state just after the last yielded batch, ignoring batches read ahead.

        Raises:
            TypeError: the source has no state.
        """
        if self._state is not None:
            return self._state
        return self._stateful().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume: the next iteration begins just after the batch where `state` was taken.

        Raises:
            RuntimeError: an iteration that was left early is still reading the source, so the
                source's state cannot be set.
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
                before.join()  # two threads must not read the source at the same time
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
            ready.put((None, state, error))  # `state` is still the previous batch's

    def _moved(self, batch: Any) -> Any:
        if self.device is None or not hasattr(batch, "to"):
            return batch
        if self.device.type == "cuda":
            return batch.pin_memory().to(self.device, non_blocking=True)
        return batch.to(self.device)
