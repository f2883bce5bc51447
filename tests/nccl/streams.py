"""A stand-in for the streams of torch.cuda, over tensors in host memory, that finds races.

All runs at once and in the order of the host. What a device may do in another order is noted: an op
that reads or writes memory which an op of another stream has written or read before, without an
event between them, is a race.
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
        # How many ops of each stream all that comes next on this one is behind.
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
    """In place of `sparsekit.distributed.streams.Cuda`; one for each rank.

    Attributes:
        log: what streams have done, in the order of the host.
        ops: the ops of torch, and the stream of each.
        races: what may happen in another order.
        kept: memory that is not to be given away before its stream is through.
        memory: what ops have used, by address.
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
        """Note an op on a stream, and what it may get in the way of. Memory is that of tensors."""
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
        self.storage = storage  # which keeps its address from being that of another
        self.first = first
        self.written: Any = None
        self.read: dict[Stream, Any] = {}


class Noted(TorchDispatchMode):
    """While this is on, streams know of the current thread's ops."""

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
        if made or written or not _dense(out):  # else it is a view
            self._streams.op(schema.name, self._streams.current_stream(), read, written + made)
        return out


def _dense(values: Any) -> list[torch.Tensor]:
    """All tensors in there, with the two that a sparse one consists of."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [
        part
        for tensor in tensors
        for part in ((tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,))
    ]


def note_collectives(transport: Any, streams: Streams) -> list[torch.Tensor]:
    """Have streams know of a transport's collectives, and return a list of all that these use."""
    begin = transport.begin_all_to_all
    used = []

    def noted(send: torch.Tensor, *arguments: Any) -> Any:
        stream = streams.current_stream()
        streams.log.append(f"{stream.name} sends")
        wait = begin(send, *arguments)
        received = wait()  # which on a device means only that it is under way
        streams.op("send", stream, [send], [received])
        used.extend([send, received])
        return wait

    transport.begin_all_to_all = noted
    return used
