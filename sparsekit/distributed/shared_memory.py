"""A transport between processes on one host, through shared memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, cast

import torch

from .. import _pybind
from .transport import TorchTransport, Transport, Unavailable, room_for

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MEMFD_FLAGS = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
# These seals keep a process from truncating memory that another process has mapped.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Time limit in seconds for the other ranks to connect; all ranks do so at about the same time.
_PATIENCE = 20.0
_TOKEN_BYTES, _RANK_BYTES = 16, 4
_STRANGERS = 64

_made: weakref.WeakSet[SharedMemoryTransport] = weakref.WeakSet()


def _leave_to_parent() -> None:
    # Close the transports in a forked child. While the child has its parent's sockets open, other
    # ranks do not notice that the parent has ended.
    for transport in _made:
        transport.close()


os.register_at_fork(after_in_child=_leave_to_parent)


class SharedMemoryTransport(Transport):
    """A transport over a `SharedMemoryCommunicator`; made by `connect`."""

    def __init__(
        self, rank: int, world_size: int, communicator: _pybind.SharedMemoryCommunicator
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.communicator = communicator
        _made.add(self)

    def begin_all_to_all(
        self,
        send: torch.Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        received: torch.Tensor | None = None,
    ) -> Callable[[], torch.Tensor]:
        """Start the collective: send what fits in the buffers now, and the rest while waiting."""
        # Check the tensor here: the communicator gets only an address, and would silently read the
        # wrong memory.
        if sum(send_splits) != send.numel() or not (send.is_contiguous() and send.is_cpu):
            raise ValueError(
                f"sparsekit: send must be contiguous, on the CPU, and hold the {sum(send_splits)} "
                f"elements of send_splits; it is {list(send.shape)} with strides "
                f"{list(send.stride())} on {send.device}"
            )
        received = room_for(send, receive_splits, received)
        size = send.element_size()
        number = self.communicator.begin(
            send.data_ptr(),
            [size * split for split in send_splits],
            received.data_ptr(),
            [size * split for split in receive_splits],
            (send, received),
        )
        # Use a weak reference: the returned function must not keep the transport alive, since other
        # ranks may wait for it to close.
        reference = weakref.ref(self)

        def wait() -> torch.Tensor:
            transport = reference()
            if transport is None:
                raise RuntimeError("sparsekit: the exchange ended while it was waited for")
            transport.communicator.wait(number)
            return received

        return wait

    def close(self) -> None:
        """Close the communicator."""
        self.communicator.close("it has closed its exchange")


def connect(teller: TorchTransport, timeout: timedelta) -> SharedMemoryTransport:
    """Make a group's transport for tensors on the CPU (a collective call).

    Args:
        teller: transport that the ranks use to exchange addresses and errors.
        timeout: how long a rank waits for another rank before it raises an error.

    Raises:
        Unavailable: (on all ranks, with the same reason) the ranks cannot share memory.
    """
    rank, world_size = teller.rank, teller.world_size
    with contextlib.ExitStack() as stack:
        meeting = _Meeting(rank, world_size, timeout.total_seconds(), stack)
        offers = teller.results(meeting.offer)
        if len({offer.host for offer in offers}) > 1:
            raise Unavailable("ranks run on several hosts")
        # Connect in a separate step, so that no rank waits in `meet` for a rank that could not
        # connect.
        teller.results(lambda: meeting.call(offers))
        teller.results(meeting.meet)
        communicator = cast(_pybind.SharedMemoryCommunicator, meeting.communicator)
        return SharedMemoryTransport(rank, world_size, communicator)


class _Offer(NamedTuple):
    host: str
    address: bytes  # address of this rank's socket
    token: bytes  # secret that a connecting rank must show, since any process can connect


class _Meeting:
    """Connects all processes with one another, and passes rank 0's memory to all of them."""

    def __init__(
        self, rank: int, world_size: int, seconds: float, stack: contextlib.ExitStack
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._seconds = seconds
        self._patience = min(seconds, _PATIENCE)
        self._sockets: dict[int, socket.socket] = {}  # socket of each rank
        self.communicator: _pybind.SharedMemoryCommunicator | None = None
        self._stack = stack  # closes everything that is opened here
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._memory = -1

    def offer(self) -> _Offer:
        """Open the socket for other ranks to connect to, and on rank 0 the shared memory."""
        if self.rank == 0:
            self._memory = self._file(os.memfd_create("sparsekit", _MEMFD_FLAGS))
            # Allocate all memory now: a later failure would kill the process that touches the
            # memory.
            size = _pybind.SharedMemoryCommunicator.total_bytes(self.world_size)
            os.posix_fallocate(self._memory, 0, size)
            fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, _SEALS)
        self._listener = self._socket(socket.socket(socket.AF_UNIX))
        # The kernel chooses an abstract name, which is not in the file system and disappears when
        # the process ends.
        self._listener.bind("")
        # The queue must hold connections from all ranks at the same time, and a few from unrelated
        # processes.
        self._listener.listen(self.world_size + _STRANGERS)
        return _Offer(_BOOT_ID.read_text(), self._listener.getsockname(), self._token)

    def call(self, offers: Sequence[_Offer]) -> None:
        """Connect to all lower ranks, without waiting for them to accept."""
        for other in range(self.rank):
            self._sockets[other] = connection = self._socket(socket.socket(socket.AF_UNIX))
            connection.settimeout(self._patience)
            connection.connect(offers[other].address)
            connection.sendall(offers[other].token + self.rank.to_bytes(_RANK_BYTES, "little"))

    def meet(self) -> None:
        """Accept the connections from all higher ranks, and make the communicator."""
        deadline = time.monotonic() + self._patience
        sockets = self._sockets
        while len(sockets) < self.world_size - 1:
            _limit(self._listener, deadline)
            connection = self._socket(self._listener.accept()[0])
            _limit(connection, deadline)
            hello = connection.recv(_TOKEN_BYTES + _RANK_BYTES)
            if hello[:_TOKEN_BYTES] == self._token:
                sockets[int.from_bytes(hello[_TOKEN_BYTES:], "little")] = connection
        if self.rank == 0:
            for connection in sockets.values():
                socket.send_fds(connection, [b"m"], [self._memory])
        else:
            _, files, _, _ = socket.recv_fds(sockets[0], 1, 1)
            if not files:
                raise ConnectionError("rank 0 has not sent its memory")
            self._memory = self._file(files[0])
        handles = [sockets[r].fileno() if r in sockets else -1 for r in range(self.world_size)]
        self.communicator = _pybind.SharedMemoryCommunicator(
            self.rank, self.world_size, self._memory, handles, self._seconds
        )

    def _file(self, file: int) -> int:
        self._stack.callback(os.close, file)
        return file

    def _socket(self, connection: socket.socket) -> socket.socket:
        return self._stack.enter_context(connection)


def _limit(connection: socket.socket, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
