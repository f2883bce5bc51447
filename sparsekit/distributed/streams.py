"""A separate stream for an exchange's work, ordered relative to the current stream by events.

Collectives run on this stream, as does all work that a lookup does ahead of time. The stream waits
for work that is already queued on the current stream, but not for later work. The current stream
waits for a result only when the caller requests that result. The host never waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Cuda:
    """The torch.cuda functions used here; tests replace them to run without a device."""

    Stream: Any = torch.cuda.Stream
    Event: Any = torch.cuda.Event
    current_stream: Any = staticmethod(torch.cuda.current_stream)
    stream: Any = staticmethod(torch.cuda.stream)
    device: Any = staticmethod(torch.cuda.device)

    @staticmethod
    def keep(tensor: torch.Tensor, stream: Any) -> None:
        """Keep the tensor's memory from being reused before the stream has finished its work."""
        tensor.record_stream(stream)


class NoStream:
    """Replaces `OwnStream` on the CPU, where everything runs in program order."""

    def ahead(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def begin(self, launch: Callable[..., Callable[[], T]], *arguments: Any) -> Callable[[], T]:
        """Start a collective immediately."""
        return launch(*arguments)


class OwnStream(NoStream):
    """An exchange's own stream, separate from the current stream.

    Args:
        device: device of the stream.
        cuda: `Cuda`, or a stand-in for tests.
    """

    def __init__(self, device: torch.device, cuda: Any = Cuda) -> None:
        self._device = device
        self._cuda = cuda
        self.stream = cuda.Stream(device)
        # Streams that use tensors made on this stream. `ahead` waits for those streams, since work
        # on this stream may reuse a tensor's memory once the tensor is freed.
        self._users: set[Any] = set()

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Queue the body's work on this stream, after work already queued on the current stream."""
        current = self._cuda.current_stream(self._device)
        if current == self.stream:
            yield
            return
        for stream in {current, *self._users}:
            self.stream.wait_event(stream.record_event())
        with self._cuda.stream(self.stream):
            yield

    def begin(self, launch: Callable[..., Callable[[], T]], *arguments: Any) -> Callable[[], T]:
        """Start a collective on this stream.

        Args:
            launch: starts the collective on the current stream, and returns a function that waits
                for the other ranks.
            arguments: arguments of `launch`, which may read and write the tensors among them.

        Returns:
            A function that waits for the other ranks, and makes the stream that is current at that
            time wait for the result.
        """
        with self.ahead():
            wait = launch(*arguments)
            done = self.stream.record_event()
        for argument in arguments:
            # Keep the tensor's memory until this stream has finished, even if nothing waits for the
            # result.
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
    """Return the stream for an exchange of tensors on this device."""
    return OwnStream(device) if device.type == "cuda" else NoStream()
