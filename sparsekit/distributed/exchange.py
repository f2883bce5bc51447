"""Collectives that all ranks agree on.

A lookup begins with a handshake. Each rank sends every other rank a block of fixed size that states
its next operation, whether it has an error, and how many rows of each table will follow. If ranks
disagree, they find out immediately. An error on one rank is raised on all ranks, so no rank is
left waiting. After the handshake, all ranks know the sizes of the messages that follow. Each part
of a message begins with a head, which identifies the part and says whether there is an error.
Receive buffers have room even for an unexpected part. A rank does not send the part for itself, but
reads it from its own send buffer.
"""

import contextlib
import functools
import itertools
import pickle
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from .._reports import reports_of
from .reports import INTERRUPTED, RemoteError, brief, check_late, of_rank, where_they_differ
from .streams import own_stream
from .transport import TorchTransport, Transport
from .wire import ALIGNMENT, Parts, heads_of, part_bytes, write_heads

# Size of the handshake block in words, and number of words before its row counts: the hash of the
# plan, an error flag, and three numbers from the caller. Counts that do not fit in the block follow
# in a second message.
_BLOCK, _FACTS = 512, 5


@dataclass
class Proposal:
    """A rank's announcement of a lookup to the other ranks."""

    what: str  # description of the operation, the same on all ranks
    counts: torch.Tensor  # int64 [world_size, tables], number of rows to send to each rank
    facts: tuple[int, int, int] = (0, 0, 0)


@dataclass
class Agreement:
    """The proposals from all ranks, once they are known to agree."""

    facts: list[list[int]]
    counts: np.ndarray  # int64 [world_size, tables], number of rows to receive from each rank
    own: np.ndarray  # int64 [world_size, tables], number of rows to send to each rank


Made = TypeVar("Made")


def attempt(make: Callable[[], Made]) -> Made | Exception:
    """Return the result of a function, or the error that it raises, for `Exchange.agree`."""
    try:
        return make()
    except Exception as error:
        return error


class Exchange:
    """The collectives of one process group, over torch.distributed or another transport."""

    # Hook set by `sparsekit.train.profile`. It is called with the exchange and the number of bytes
    # to send, or 0 for a wait, and returns a context manager that is active while the collective is
    # started or waited for.
    watch: ClassVar[Callable[["Exchange", int], contextlib.AbstractContextManager[Any]] | None] = (
        None
    )

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        transport: Transport | None = None,
    ) -> None:
        self.transport: Transport = transport or TorchTransport(group)
        self.group = group
        self.device = device
        self.rank = self.transport.rank
        self.world_size = self.transport.world_size
        # The stream that collectives run on.
        self.stream = own_stream(device)
        # Held during a lookup, so that only one thread at a time performs a lookup.
        self.lock = threading.RLock()
        # Number of lookups that have begun, successful or not; equal on all ranks, unless a rank
        # has left a lookup early.
        self.lookups = 0
        # Number of errors that all ranks have raised together.
        self._raised_together = 0
        # Signatures of the plans whose keys all ranks have agreed to send without a handshake.
        self.at_once: set[str] = set()
        # Number of table parts that this rank has saved since the last lookup.
        self.parts_saved = 0
        # The reason why this exchange can no longer be used; None if it can.
        self.broken: str | None = None
        # Size in bytes of the largest part that each rank may send to this rank; initially the size
        # of a handshake.
        self._most = [8 * _BLOCK] * self.world_size
        # True if parts must have exactly the expected size; a part of another size then causes a
        # timeout instead of an error message.
        self.exact = self.transport.exact or device.type != "cpu"
        # Carries errors between ranks; made when the first error occurs.
        self._teller: TorchTransport | None = None
        # Number of collectives, for tests and benchmarks.
        self.collectives = 0
        self.bytes_sent = 0
        # The purpose, as given to `exchange_of`.
        self.purpose = "layers"

    def agree(self, what: str, proposal: Proposal | Exception | None) -> Agreement:
        """Exchange the ranks' proposals, and check that they agree.

        Args:
            what: description of what this rank is about to do, used if its proposal has none.
            proposal: a proposal; None if nothing follows; or an error to raise on all ranks.

        Raises:
            An error from any rank is raised on all ranks.
            RuntimeError: ranks disagree about what to do, or the exchange has broken down earlier.
        """
        error = proposal if isinstance(proposal, Exception) else None
        offer = proposal if isinstance(proposal, Proposal) else None
        plan = what if offer is None else offer.what
        self._check_open(plan)
        code, ranks = _code(plan), self.world_size
        facts = (0, 0, 0) if offer is None else offer.facts
        block = torch.zeros(ranks, _BLOCK, dtype=torch.int64, device=self.device)
        sizes = [block.nbytes // ranks] * ranks
        sent = block.view(-1).view(torch.uint8)
        write_heads(sent, _begins(sizes), [code, int(error is not None), *facts])
        tables = 0 if offer is None else offer.counts.shape[1]
        here = slice(_FACTS, min(_FACTS + tables, _BLOCK))
        if offer is not None:
            block[:, here] = offer.counts[:, : here.stop - _FACTS]
        room = self._room(sizes)
        begun = self._begin(sent, sizes, room)
        with self._answered(plan):
            received = begun()
        # Read everything in one go, since each read from a device waits for the device.
        parts = [received[begin : begin + sizes[0]] for begin in _begins(room)]
        both = torch.cat([*parts, sent]).view(torch.int64).cpu().numpy().reshape(2 * ranks, _BLOCK)
        came = both[:ranks]
        if (came[:, 0] != code).any() or came[:, 1].any():
            self._raise_together(plan, error)
        counts = both[:, here]
        if offer is not None and tables > counts.shape[1]:
            rest = self._rest(plan, offer.counts[:, counts.shape[1] :])
            counts = np.concatenate([counts, rest], axis=1)
        return Agreement(came[:, 2:_FACTS].tolist(), counts[:ranks], counts[ranks:])

    def _rest(self, plan: str, counts: torch.Tensor) -> np.ndarray:
        """Exchange the counts that do not fit in the handshake block."""
        ranks, tables = counts.shape
        size = part_bytes(8 * tables)

        def write(parts: Parts) -> None:
            for rank, words in enumerate(counts):
                parts.payload(rank, 8 * tables).view(torch.int64)[:] = words

        come = self.send(f"counts: {plan}", write, [size] * ranks, [size] * ranks)()
        received = [come.payload(rank, 8 * tables).view(torch.int64) for rank in range(ranks)]
        return torch.cat([torch.stack(received), counts]).cpu().numpy()

    def expect(self, sizes: Sequence[int]) -> None:
        """Enlarge later receive buffers to hold parts of these sizes, heads included."""
        each = zip(self._most, sizes, strict=True)
        self._most = [max(most, size + -size % ALIGNMENT) for most, size in each]

    def _room(self, sizes: Sequence[int]) -> list[int]:
        """Return the buffer size in bytes for each rank's part, given the expected sizes."""
        if self.exact:
            return list(sizes)
        room = self._most.copy()
        room[self.rank] = sizes[self.rank]  # this rank's own part always has the expected size
        return room

    def send(
        self,
        what: str,
        write: Callable[[Parts], None],
        splits: Sequence[int],
        sizes: Sequence[int],
        words: int = 0,
        late: bool = False,
    ) -> Callable[[], Parts]:
        """Start sending a part to each rank; sender and receiver both know its size.

        Args:
            what: description of the data, which must be the same on all ranks.
            write: writes the payload of each rank's part.
            splits: number of bytes to send to each rank, a multiple of 8, or of the item size if
                that is larger.
            sizes: number of bytes to receive from each rank, multiples of the same number.
            words: number of int64 words to read after the head of each part; the result's `words`
                holds those from the other ranks.
            late: on a device whose errors are deferred, whether a later lookup may report a
                disagreement, so that this one need not wait. An error in write then ends the
                exchange.

        Returns:
            A function that waits for the parts from the other ranks, and returns the parts from all
            ranks. They are in the buffer that was passed to write.

        Raises:
            RuntimeError: the exchange has broken down earlier. The returned function raises errors
                from write on any rank, and RuntimeError if ranks disagree about the data.
        """
        self._check_open(what)
        code = _code(what)
        with self._awaited():
            self.expect(sizes)
            room, to_others = self._room(sizes), list(splits)
            room[self.rank] = to_others[self.rank] = 0
            # The buffer holds incoming parts, then outgoing parts, and then this rank's own part.
            first, last = sum(room), sum(room) + sum(to_others)
            size = last + splits[self.rank]
            data = torch.empty(size, dtype=torch.uint8, device=self.device)
            incoming, outgoing = _begins(room), _begins(to_others, first)
            incoming[self.rank] = outgoing[self.rank] = last
        reports = reports_of(self.device) if late else None
        error: Exception | None = None
        try:
            write(Parts(data, outgoing))
        except Exception as raised:
            if reports is not None:  # other ranks carry on, and wait for the next messages
                self.abandon(raised)
                raise
            error = raised
        with self._awaited():
            write_heads(data, self._of_others(outgoing), [code, int(error is not None)])
        begun = self._begin(data[first:last], to_others, room, data[:first])

        def finish() -> Parts:
            with self._answered(what):
                begun()
            heads = heads_of(data, self._of_others(incoming), words)
            if reports is not None:
                reports.send(
                    heads,
                    functools.partial(check_late, weakref.WeakMethod(self.abandon), what, code),
                )
                return Parts(data, incoming)
            of_host = heads.cpu().numpy()
            if error is not None or (of_host[:, :2] != (code, 0)).any():
                self._raise_together(what, error)
            return Parts(data, incoming, of_host[:, 2:])

        return finish

    def _of_others(self, of_ranks: Sequence[int]) -> list[int]:
        return [value for rank, value in enumerate(of_ranks) if rank != self.rank]

    def _begin(
        self,
        send: torch.Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        received: torch.Tensor | None = None,
    ) -> Callable[[], torch.Tensor]:
        self.collectives += 1
        self.bytes_sent += send.nbytes
        if self.watch is None:
            return self._launch(send, send_splits, receive_splits, received)
        others = send.nbytes - send_splits[self.rank] * send.element_size()
        with self._watched(others):
            begun = self._launch(send, send_splits, receive_splits, received)

        def finish() -> torch.Tensor:
            with self._watched(0):
                return begun()

        return finish

    def _launch(
        self,
        send: torch.Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        received: torch.Tensor | None,
    ) -> Callable[[], torch.Tensor]:
        with self._awaited():
            begin = self.transport.begin_all_to_all
            return self.stream.begin(begin, send, send_splits, receive_splits, received)

    def _watched(self, sent: int) -> contextlib.AbstractContextManager[Any]:
        return Exchange.watch(self, sent) if Exchange.watch else contextlib.nullcontext()

    @contextlib.contextmanager
    def _awaited(self) -> Iterator[None]:
        """Abandon the exchange if the body fails, since other ranks are waiting for this rank."""
        try:
            yield
        except BaseException as error:  # for example out of memory, or Ctrl-C
            self.abandon(error)
            raise

    def _check_open(self, plan: str) -> None:
        if self.broken is not None:
            raise RuntimeError(
                f"sparsekit: {brief(plan)}: the exchange broke down before: {self.broken}. Start "
                f"all ranks again, from the last checkpoint"
            )

    @contextlib.contextmanager
    def _answered(self, plan: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # Mark the exchange as broken, so that a late message is not mistaken for part of a
            # later collective.
            self.broken = self.broken or str(error)
            raise RuntimeError(
                f"sparsekit: {brief(plan)}: no answer from all other ranks. One may have died or "
                f"been interrupted, or a layer, or its backward, may have been called on some "
                f"ranks only: {error}"
            ) from error

    def abandon(self, error: BaseException) -> None:
        """Mark the exchange as broken, and close it: this rank cannot send what it announced."""
        self.broken = f"{type(error).__name__}: {error}"
        self.close()

    def close(self) -> None:
        """Destroy the process group and its connections, so that no rank waits for this one."""
        group = vars(self).pop("group", None)
        if group is None:
            return
        self.transport.close()
        with contextlib.suppress(ValueError):  # raised if all groups have been destroyed already
            dist.destroy_process_group(group)
        # Drop the other references to the group: its threads and connections end once the last
        # reference is dropped.
        self._teller = None
        del self.transport

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Record an error that only this rank raises in the body; the next handshake reports it."""
        raised_together = self._raised_together
        try:
            yield
        except BaseException:
            if self._raised_together == raised_together:
                self.lookups += 1
            raise

    def _raise_together(self, plan: str, error: Exception | None) -> None:
        """Exchange the ranks' errors, and raise an error on every rank."""
        self._raised_together += 1
        self.at_once.clear()  # a rank may have missed plans that the others have agreed on
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
        except Exception:  # the error may contain an object that cannot be pickled
            packed = pickle.dumps(RemoteError(f"{type(error).__name__}: {error}"))
        # Exchange errors over the CPU, whatever transport carries the other messages.
        self._teller = self._teller or TorchTransport(self.group)
        report = pickle.dumps((plan, packed, self.lookups))
        reports = [pickle.loads(other) for other in self._teller.all_gather(report)]
        counts = [count for *_, count in reports]
        self.lookups = max(counts)
        if error is not None:
            raise error
        for rank, (_, packed, _) in enumerate(reports):
            remote = pickle.loads(packed)
            if remote is not None:
                raise of_rank(rank, remote)
        shown = where_they_differ([other for other, *_ in reports])
        plans = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(shown))
        raise RuntimeError(
            f"sparsekit: ranks are about to do different things. {plans}"
            f"{INTERRUPTED if len(set(counts)) > 1 else ''}"
        )


def _code(plan: str) -> int:
    """Hash a plan. Unlike `hash`, this gives the same number on all ranks."""
    return zlib.crc32(plan.encode())


def _begins(sizes: Sequence[int], first: int = 0) -> list[int]:
    """Return the offsets of consecutive parts with these sizes."""
    return list(itertools.accumulate(sizes[:-1], initial=first))
