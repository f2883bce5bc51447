"""A race-detecting stand-in for torch.cuda's streams, over tensors in host memory.

Every op runs immediately, in the order in which the host issues it. Two ops of different streams
are recorded as a race if one of them writes memory that the other one uses, without an event
between the two ops.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    def __init__(self, streams: "Streams", name: str) -> None:
        self.streams, self.name = streams, name
        self.cuda_stream = next(streams.numbers)
        # Number of ops of each stream that must end before the next op on this stream.
        self.behind: dict[Stream, int] = {self: 0}

    def record_event(self) -> "Event":
        event = Event(self.streams)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.streams.log.append(f"{self.name} waits for {event.stream.name}")
        for stream, ops in event.behind.items():
            self.behind[stream] = max(self.behind.get(stream, 0), ops)


class Event:
    def __init__(self, streams: "Streams") -> None:
        self.streams = streams

    def record(self, stream: Stream) -> None:
        self.stream, self.behind = stream, dict(stream.behind)
        self.streams.log.append(f"{stream.name} records")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.streams.log.append("host waits")


class Streams:
    """Stand-in for `sparsekit.distributed.streams.Cuda`; each rank has one.

    Attributes:
        log: actions of streams, in the order in which the host issued them.
        ops: the torch ops, each with its stream.
        races: pairs of ops on the same memory whose order is not guaranteed.
        kept: memory that must not be reused before its stream has ended.
        memory: memory used by ops, by address.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.log: list[str] = []
        self.ops: list[tuple[str, str]] = []
        self.races: list[str] = []
        self.kept: set[tuple[int, Stream]] = set()
        self.names = itertools.chain(["warm-up", "own"], (f"own {i}" for i in itertools.count(2)))
        self.memory: dict[int, _Memory] = {}
        self._current = [Stream(self, "current")]

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, next(self.names))

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return self._current[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.kept.add((tensor.untyped_storage().data_ptr(), stream))

    def op(self, name: str, stream: Stream, read: list[Any], written: list[Any]) -> None:
        """Record an op on a stream, and the races that it causes on the memory of its tensors."""
        stream.behind[stream] += 1
        self.ops.append((name, stream.name))
        now = name, stream, stream.behind[stream]
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.nbytes() == 0:
                    continue
                memory = self.memory.setdefault(storage.data_ptr(), _Memory(storage, stream))
                earlier = [memory.written, *(memory.read.values() if writes else ())]
                for then in filter(None, earlier):
                    if stream.behind.get(then[1], 0) < then[2]:
                        self.races.append(
                            f"{name} on {stream.name} is not behind {then[0]} on {then[1].name}"
                        )
                if writes:
                    memory.written, memory.read = now, {}
                else:
                    memory.read[stream] = now


class _Memory:
    def __init__(self, storage: torch.UntypedStorage, first: Stream) -> None:
        self.storage = storage  # holding it keeps the address from being reused
        self.first = first
        self.written: Any = None
        self.read: dict[Stream, Any] = {}


class Noted(TorchDispatchMode):
    """Mode that tells the streams about the current thread's ops."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema
        given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
        read, written = [], []
        for argument in schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).extend(_dense(given.get(argument.name)))
        known = {t.untyped_storage().data_ptr() for t in read + written}
        made = [t for t in _dense(out) if t.untyped_storage().data_ptr() not in known]
        if made or written or not _dense(out):  # otherwise the result is a view
            self._streams.op(schema.name, self._streams.current_stream(), read, written + made)
        return out


def _dense(values: Any) -> list[torch.Tensor]:
    """Return all tensors in a value; a sparse tensor gives its indices and its values."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [
        part
        for tensor in tensors
        for part in ((tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,))
    ]


def note_collectives(transport: Any, streams: Streams) -> list[torch.Tensor]:
    """Record a transport's collectives in `streams`; return a list that collects their tensors."""
    begin = transport.begin_all_to_all
    used = []

    def noted(send: torch.Tensor, *arguments: Any) -> Any:
        stream = streams.current_stream()
        streams.log.append(f"{stream.name} sends")
        wait = begin(send, *arguments)
        received = wait()  # on a device, it may still be under way
        streams.op("send", stream, [send], [received])
        used.extend([send, received])
        return wait

    transport.begin_all_to_all = noted
    return used
