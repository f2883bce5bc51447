"""Bytes from rank to rank over libnccl itself, on the current stream."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from .. import _pybind
from .transport import TorchTransport, Transport, Unavailable, room_for

# Seconds between two looks at a communicator, and for which one waits for others at its end.
_INTERVAL, _PATIENCE = 1.0, 10.0


def missing() -> str:
    """What keeps this process from using libnccl, or nothing."""
    if not _pybind.build_info()["nccl"]:
        return (
            "this build of sparsekit has no NCCL: it found no nvcc or no nccl.h; "
            "SPARSEKIT_NCCL_INCLUDE names the folder of the latter to setup.py"
        )
    try:
        _pybind.NcclCommunicator.library_version()
    except RuntimeError as error:
        return str(error)
    return ""


def connect(teller: TorchTransport, device: torch.device, timeout: timedelta) -> NcclTransport:
    """The transport of a group for tensors of a device. A collective.

    The ranks learn what each has, and what the new communicator is called.

    Raises:
        Unavailable: on all ranks, where libnccl cannot be had on one of them.
    """
    reason, unique_id = missing(), b""
    if teller.rank == 0 and not reason:
        try:
            unique_id = _pybind.NcclCommunicator.unique_id()
        except RuntimeError as error:
            reason = str(error)
    offers = [pickle.loads(other) for other in teller.all_gather(pickle.dumps((reason, unique_id)))]
    for rank, (of_rank, _) in enumerate(offers):
        if of_rank:
            raise Unavailable(f"on rank {rank}: {of_rank}")
    return NcclTransport(teller.rank, teller.world_size, offers[0][1], device, timeout)


class NcclTransport(Transport):
    """Over a communicator of its own. Made on all ranks at the same time.

    Args:
        rank: of this process.
        world_size: how many there are.
        unique_id: ``_pybind.NcclCommunicator.unique_id()`` of one rank.
        device: of the tensors.
        timeout: after which a rank that waits for another one raises, or is freed from a kernel
            that waits.
    """

    exact = True

    def __init__(
        self,
        rank: int,
        world_size: int,
        unique_id: bytes,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        # One with an index, since the current device may change.
        self.device = torch.empty(0, device=device).device
        seconds = timeout.total_seconds()
        with self._on_device():
            self.communicator = _pybind.NcclCommunicator(rank, world_size, unique_id, seconds)
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        finished = self._event.query if self._event is not None else lambda: True
        self._watch = Watch(self.communicator, seconds, finished)
        self._watch.start()
        # At the latest before the interpreter ends, since CUDA may be gone after that.
        self._close = weakref.finalize(self, _close, self.communicator, self._watch)

    def close(self) -> None:
        """See `Transport`."""
        self._close()

    def begin_all_to_all(
        self,
        send: torch.Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        received: torch.Tensor | None = None,
    ) -> Callable[[], torch.Tensor]:
        """See `Transport`. The sizes are bytes to NCCL, so any dtype will do.

        Nothing waits but the stream.
        """
        # NCCL gets an address and would read whatever is there.
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
        with self._on_device():
            # On the tensors' own stream, so that torch may give their memory to something else
            # as soon as nobody has them any more: that comes later in the stream.
            stream = torch.cuda.current_stream() if send.is_cuda else None
            self.communicator.all_to_all(
                send.data_ptr(),
                [size * split for split in send_splits],
                received.data_ptr(),
                [size * split for split in receive_splits],
                stream.cuda_stream if stream is not None else 0,
            )
            self._watch.launched()
            if self._event is not None:
                self._event.record(stream)
        return lambda: received

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        # The tests have a stand-in for libnccl that works in host memory.
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.device(self.device)


class Watch(threading.Thread):
    """Looks after a communicator while a kernel waits on the device.

    The host may be waiting for that kernel, which ends only when somebody aborts the communicator:
    after an error on the network, or when the last launch is not through in time.

    Args:
        communicator: what is looked after.
        seconds: for which a launch may last.
        finished: whether the last launch is through.
    """

    def __init__(
        self,
        communicator: _pybind.NcclCommunicator,
        seconds: float,
        finished: Callable[[], bool],
    ) -> None:
        super().__init__(name="sparsekit-nccl", daemon=True)
        self._communicator = communicator
        self._seconds = seconds
        self._finished = finished
        self._deadline: float | None = None
        self._over = threading.Event()

    def launched(self) -> None:
        """Something is about to be waited for."""
        self._deadline = time.monotonic() + self._seconds

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join(_PATIENCE)

    def run(self) -> None:
        """Look, until told to stop or until there is nothing left to look after."""
        settled = None
        while not self._over.wait(_INTERVAL):
            try:
                self._communicator.check()  # aborts by itself
            except RuntimeError:
                return
            deadline = self._deadline
            if deadline in (None, settled) or time.monotonic() < deadline:
                continue
            # Asked as late as this, because a question would spoil a graph that is being captured.
            if self._finished():
                settled = deadline
            elif deadline == self._deadline:
                reason = f"an exchange has not ended within {self._seconds} s"
                reason += "; another rank may be gone"
                # What the kernel leaves behind is not what it should have received. The next
                # exchange raises, but there need not be one.
                print(f"sparsekit: {reason}", file=sys.stderr, flush=True)
                self._communicator.abort(reason)
                return


def _close(communicator: _pybind.NcclCommunicator, watch: Watch) -> None:
    watch.stop()
    # After an exception that nobody has caught the other ranks may never get here.
    if hasattr(sys, "last_value"):
        communicator.abort("the process ends with an exception")
        return
    with contextlib.suppress(RuntimeError):  # it has been aborted then, which is as good
        communicator.destroy(_PATIENCE)
