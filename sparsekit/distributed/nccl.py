"""A transport that calls libnccl directly, on the current stream."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from .. import _pybind
from .streams import Cuda
from .transport import TorchTransport, Transport, room_for
from .watch import Watch, within


def missing() -> str:
    """Return the reason why this process cannot use libnccl, or an empty string if it can."""
    if not _pybind.build_info()["nccl"]:
        return (
            "this build of sparsekit has no NCCL: it was built without CUDA (SPARSEKIT_CUDA=1 asks "
            "for it) or found no nccl.h, whose folder SPARSEKIT_NCCL_INCLUDE names to setup.py"
        )
    try:
        _pybind.NcclCommunicator.library_version()
    except RuntimeError as error:
        return str(error)
    return ""


def connect(teller: TorchTransport, device: torch.device, timeout: timedelta) -> NcclTransport:
    """Make a group's transport for tensors on a device (a collective call).

    The ranks tell each other whether they have libnccl, and exchange the id of the new
    communicator.

    Raises:
        Unavailable: (on all ranks) libnccl is not available on at least one rank.
    """

    def offer() -> bytes:
        if reason := missing():
            raise RuntimeError(reason)
        return _pybind.NcclCommunicator.unique_id() if teller.rank == 0 else b""

    unique_id, *_ = teller.results(offer)
    return NcclTransport(teller.rank, teller.world_size, unique_id, device, timeout)


class NcclTransport(Transport):
    """A transport over its own NCCL communicator, made on all ranks at the same time.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        unique_id: result of ``_pybind.NcclCommunicator.unique_id()`` on one rank.
        device: device of the tensors.
        timeout: time limit for waiting for another rank. When it expires, a waiting rank raises an
            error, and a waiting kernel is aborted.
        cuda: stands in for `Cuda` in tests; None means `Cuda` for a CUDA device, otherwise no
            streams.
    """

    exact = True

    def __init__(
        self,
        rank: int,
        world_size: int,
        unique_id: bytes,
        device: torch.device,
        timeout: timedelta,
        cuda: Any = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        # Store the device with its index, since the current device may change.
        self.device = torch.empty(0, device=device).device
        # Tests use a stand-in for libnccl that works in host memory; there are no streams then.
        self._cuda = Cuda if cuda is None and device.type == "cuda" else cuda
        seconds = timeout.total_seconds()

        def make() -> _pybind.NcclCommunicator:
            with self._on_device():
                return _pybind.NcclCommunicator(rank, world_size, unique_id)

        self.communicator = within(seconds, make, "ncclCommInitRankConfig")
        self._event = self._cuda.Event() if self._cuda is not None else None
        finished = self._event.query if self._event is not None else lambda: True
        self._watch = Watch(self.communicator, seconds, finished)
        self._watch.start()
        # Close no later than at interpreter exit, since CUDA may be unavailable afterwards.
        self._close = weakref.finalize(self, _close, self._watch)
        try:
            self._warm_up()
        except BaseException:
            self.close()
            raise

    def _warm_up(self) -> None:
        """Exchange one byte with every rank.

        NCCL connects two ranks, and allocates memory for the connection, at their first message.
        During this call all ranks are sure to take part, whereas during a step one of them may be
        waiting for something else.
        """
        count = [1] * self.world_size
        with self._on_device(), self._beside():
            sent = torch.zeros(self.world_size, dtype=torch.uint8, device=self.device)
            self.all_to_all(sent, count, count)
            if self._event is not None:
                self._event.synchronize()
        self.communicator.check()  # synchronize() also returns after an abort

    def close(self) -> None:
        """Close the communicator."""
        self._close()

    def begin_all_to_all(
        self,
        send: torch.Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        received: torch.Tensor | None = None,
    ) -> Callable[[], torch.Tensor]:
        """Start the collective. Any dtype is allowed, since NCCL gets sizes in bytes.

        The collective runs on the current stream, and only that stream waits.
        """
        # Check the tensor here: NCCL gets only an address, and would silently read the wrong
        # memory.
        if sum(send_splits) != send.numel() or not send.is_contiguous():
            raise ValueError(
                f"sparsekit: send must be contiguous and hold the {sum(send_splits)} elements of "
                f"send_splits; it is {list(send.shape)} with strides {list(send.stride())}"
            )
        if send.device != self.device:
            raise ValueError(
                f"sparsekit: send is on {send.device}, the communicator on {self.device}"
            )
        received = room_for(send, receive_splits, received)
        size = send.element_size()
        with self._on_device(), self._watch.launch():
            stream = None if self._cuda is None else self._cuda.current_stream()
            self.communicator.all_to_all(
                send.data_ptr(),
                [size * split for split in send_splits],
                received.data_ptr(),
                [size * split for split in receive_splits],
                0 if stream is None else stream.cuda_stream,
            )
            if self._event is not None:
                self._event.record(stream)
        return lambda: received

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._cuda is None else self._cuda.device(self.device)

    def _beside(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that makes a new stream the current stream."""
        if self._cuda is None:
            return contextlib.nullcontext()
        return self._cuda.stream(self._cuda.Stream(self.device))


def _close(watch: Watch) -> None:
    # After an uncaught exception, abort instead of waiting: the other ranks may never get here.
    watch.close("the process ends with an exception" if hasattr(sys, "last_value") else "")
