"""An exchange's own stream of a device, ordered with the current one by events.

Collectives run on it, and so does all that a lookup does ahead. It waits for what the current
stream has been given before that, not for what comes later; whoever takes a result makes the
current stream wait for it. The host waits for neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Cuda:
    """The part of torch.cuda in use. Tests have a stand-in that needs no device."""

    Stream: Any = torch.cuda.Stream
    Event: Any = torch.cuda.Event
    current_stream: Any = staticmethod(torch.cuda.current_stream)
    stream: Any = staticmethod(torch.cuda.stream)
    device: Any = staticmethod(torch.cuda.device)

    @staticmethod
    def keep(tensor: torch.Tensor, stream: Any) -> None:
        """Give the tensor's memory to nothing else before what the stream has now is through."""
        tensor.record_stream(stream)


class NoStream:
    """Replaces `OwnStream` on the CPU, where everything runs in the host's order."""

    def ahead(self) -> contextlib.AbstractContextManager[None]:
        """See `OwnStream`."""
        return contextlib.nullcontext()

    def begin(self, launch: Callable[..., Callable[[], T]], *arguments: Any) -> Callable[[], T]:
        """See `OwnStream`."""
        return launch(*arguments)


class OwnStream(NoStream):
    """A stream beside the current one.

    Args:
        device: which one's.
        cuda: how it is used.
    """

    def __init__(self, device: torch.device, cuda: Any = Cuda) -> None:
        self._device = device
        self._cuda = cuda
        self.stream = cuda.Stream(device)
        # Streams that use what was made on this one. torch gives memory back to the stream on which
        # it was made, and so to what this one does next.
        self._users: set[Any] = set()

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """What is queued in here goes to this stream, behind all that the current one has."""
        current = self._cuda.current_stream(self._device)
        if current == self.stream:
            yield
            return
        for stream in {current, *self._users}:
            self.stream.wait_event(stream.record_event())
        with self._cuda.stream(self.stream):
            yield

    def begin(self, launch: Callable[..., Callable[[], T]], *arguments: Any) -> Callable[[], T]:
        """Begin a collective on this stream.

        Args:
            launch: begins it on the current stream, and returns what waits for the others.
            arguments: of launch. It may read and write tensors among them.

        Returns:
            What waits for the others, and has the stream that is current then wait for the result.
        """
        with self.ahead():
            wait = launch(*arguments)
            done = self.stream.record_event()
        for argument in arguments:
            # Nobody may ever wait, and then this stream alone knows when it is free.
            if isinstance(argument, torch.Tensor):
                self._cuda.keep(argument, self.stream)

        def finish() -> T:
            current = self._cuda.current_stream(self._device)
            if current != self.stream:
                current.wait_event(done)
                self._users.add(current)
            return wait()

        return finish


def own_stream(device: torch.device) -> NoStream:
    """One for tensors of this device."""
    return OwnStream(device) if device.type == "cuda" else NoStream()
