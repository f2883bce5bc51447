"""Batches that are read while the model computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..errors import check_int

__all__ = ["Prefetcher"]


# A batch, the reader's state after it, and what was raised in its place.
_Ready = tuple[Any, dict[str, Any] | None, BaseException | None]


class Prefetcher:
    """Iterate over a reader, or any iterable, in a thread of its own, some batches ahead.

    Batches keep their order, the last one may be short, and an error of the reader is raised where
    its batch would have been. Reading releases the GIL. When an iteration is left early, its thread
    ends.

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
            target=self._read, args=(ready, free, ended), name="sparsekit-prefetch", daemon=True
        )
        thread.start()
        try:
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
            thread.join()

    def state_dict(self) -> dict[str, Any]:
        """The reader's state after the batch that was handed out last, not the one read last.

        Raises:
            TypeError: what is iterated over has no state.
        """
        if self._state is not None:
            return self._state
        return self._stateful().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration with the batch after the one to which `state` belongs."""
        self._stateful().load_state_dict(state)
        self._state = None

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
        try:
            iterator = iter(batches)
            while True:
                free.acquire()
                if ended.is_set():
                    return
                batch = self._moved(next(iterator))
                ready.put((batch, batches.state_dict() if stateful else None, None))
        except BaseException as error:  # StopIteration among them
            ready.put((None, batches.state_dict() if stateful else None, error))

    def _moved(self, batch: Any) -> Any:
        if self.device is None or not hasattr(batch, "to"):
            return batch
        if self.device.type == "cuda":
            return batch.pin_memory().to(self.device, non_blocking=True)
        return batch.to(self.device)
