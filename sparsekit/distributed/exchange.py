"""Collectives that all ranks agree on.

A lookup begins with a handshake: each rank sends every other a block of fixed size, which says what
it is about to do, whether something has gone wrong here, and how much of each table will follow. So
ranks that disagree find out at once, and an error on one rank becomes an error on all instead of a
wait. What follows has sizes that all know; in front of each part is again what it is, and whether
something has gone wrong, and a rank that gets another part than it waits for has room for it.
A rank's own part is read where it has been written.
"""

import contextlib
import itertools
import pickle
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from .reports import INTERRUPTED, RemoteError, brief, of_rank, where_they_differ
from .streams import own_stream
from .transport import TorchTransport, Transport
from .wire import ALIGNMENT, Parts, part_bytes, read_heads, write_heads

# Words of the block that begins a lookup, and those of them in front of the counts of tables: the
# hash of what it is, 1 for an error, and three numbers for whoever exchanges. Counts for which
# there is no room follow by themselves.
_BLOCK, _FACTS = 512, 5


@dataclass
class Proposal:
    """A rank's word to the others before it begins."""

    what: str  # it is about to do, the same on all ranks
    counts: torch.Tensor  # int64 [world_size, tables], rows of each table that a rank will be sent
    facts: tuple[int, int, int] = (0, 0, 0)


@dataclass
class Agreement:
    """The proposals of all ranks, which fit one another."""

    facts: list[list[int]]
    counts: np.ndarray  # int64 [world_size, tables], what this rank will be sent
    own: np.ndarray  # and what it will send


Made = TypeVar("Made")


def attempt(make: Callable[[], Made]) -> Made | Exception:
    """The result of a function, or the error that it raises, for `Exchange.agree`."""
    try:
        return make()
    except Exception as error:
        return error


class Exchange:
    """The collectives of one process group, over torch.distributed or another transport."""

    # Called with the exchange and the bytes for other ranks as a collective begins, and with 0 as
    # it is waited for: what is entered meanwhile. `sparsekit.train.profile` sets it.
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
        # Where collectives run.
        self.stream = own_stream(device)
        # One lookup at a time, whatever the number of threads.
        self.lock = threading.RLock()
        # Lookups so far, counted as they begin and whether or not they succeed: a number that names
        # one on all ranks, and that differs where a rank has left one early.
        self.lookups = 0
        # How often all ranks have raised an error together.
        self._raised_together = 0
        # Tables, by their plan, whose keys all ranks have agreed to send without a handshake.
        self.at_once: set[str] = set()
        # Parts of tables that this rank has saved since the last lookup.
        self.parts_saved = 0
        # Why this exchange cannot be used any more.
        self.broken: str | None = None
        # Most bytes that each rank may send here in one part: that of a handshake at first.
        self._most = [8 * _BLOCK] * self.world_size
        # Whether parts must have the size that is waited for, so that one of another size is
        # noticed by nobody but the clock.
        self.exact = self.transport.exact or device.type != "cpu"
        # Carries errors.
        self._teller: TorchTransport | None = None
        # How many collectives there have been, for tests and benchmarks.
        self.collectives = 0
        self.bytes_sent = 0
        # Purpose, as given to `exchange_of`.
        self.purpose = "layers"

    def agree(self, what: str, proposal: Proposal | Exception | None) -> Agreement:
        """Agree with the other ranks that all do what their proposals say.

        Args:
            what: this rank is about to do, unless its proposal says it.
            proposal: None if nothing follows; or an error, which is raised on all ranks.

        Raises:
            The error of any rank, on all of them.
            RuntimeError: ranks disagree about what they do, or the exchange broke down before.
        """
        error = proposal if isinstance(proposal, Exception) else None
        offer = proposal if isinstance(proposal, Proposal) else None
        plan = what if offer is None else offer.what
        self._check_open(plan)
        code, ranks = _code(plan), self.world_size
        facts = (0, 0, 0) if offer is None else offer.facts
        words = np.zeros((ranks, _BLOCK), dtype=np.int64)
        words[:, :_FACTS] = code, error is not None, *facts
        block = torch.from_numpy(words).to(self.device)
        tables = 0 if offer is None else offer.counts.shape[1]
        here = slice(_FACTS, min(_FACTS + tables, _BLOCK))
        if offer is not None:
            block[:, here] = offer.counts[:, : here.stop - _FACTS]
        sizes = [words.nbytes // ranks] * ranks
        room = self._room(sizes)
        begun = self._begin(sent := block.view(-1).view(torch.uint8), sizes, room)
        with self._answered(plan):
            received = begun()
        # In one piece, since on a device each reading waits for it.
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
        """Exchange the counts that the block has no room for, of as many tables on all ranks."""
        ranks, tables = counts.shape
        size = part_bytes(8 * tables)

        def write(parts: Parts) -> None:
            for rank, words in enumerate(counts):
                parts.payload(rank, 8 * tables).view(torch.int64)[:] = words

        come = self.send(f"counts: {plan}", write, [size] * ranks, [size] * ranks)()
        received = [come.payload(rank, 8 * tables).view(torch.int64) for rank in range(ranks)]
        return torch.cat([torch.stack(received), counts]).cpu().numpy()

    def expect(self, sizes: Sequence[int]) -> None:
        """Note how much each rank may send here from now on, in one part, head and all."""
        each = zip(self._most, sizes, strict=True)
        self._most = [max(most, size + -size % ALIGNMENT) for most, size in each]

    def _room(self, sizes: Sequence[int]) -> list[int]:
        """Bytes to keep for what comes from each rank, which should be of these sizes."""
        if self.exact:
            return list(sizes)
        room = self._most.copy()
        room[self.rank] = sizes[self.rank]  # which nobody else has a say in
        return room

    def send(
        self,
        what: str,
        write: Callable[[Parts], None],
        splits: Sequence[int],
        sizes: Sequence[int],
        words: int = 0,
    ) -> Callable[[], Parts]:
        """Begin to send a part to each rank, of a size that both know.

        Args:
            what: this is, the same on all ranks.
            write: writes the payloads of the parts for the ranks.
            splits: bytes for each rank, multiples of 8, or of what data is wider than that.
            sizes: bytes from each rank, the same.
            words: int64 with which each part begins behind its head, to be read with it; those of
                the other ranks are the `words` of what comes.

        Returns:
            What waits for the parts of the others, and returns those and this rank's own. They are
            in the memory that write was given.

        Raises:
            RuntimeError: the exchange broke down before. What is returned raises what write raises
            on any rank, and RuntimeError where ranks disagree about what is sent.
        """
        self._check_open(what)
        code = _code(what)
        with self._awaited():
            self.expect(sizes)
            room, to_others = self._room(sizes), list(splits)
            room[self.rank] = to_others[self.rank] = 0
            # What comes, what goes, and this rank's own part, which does neither.
            first, last = sum(room), sum(room) + sum(to_others)
            size = last + splits[self.rank]
            data = torch.empty(size, dtype=torch.uint8, device=self.device)
            incoming, outgoing = _begins(room), _begins(to_others, first)
            incoming[self.rank] = outgoing[self.rank] = last
        error: Exception | None = None
        try:
            write(Parts(data, outgoing))
        except Exception as raised:
            error = raised
        with self._awaited():
            write_heads(data, self._of_others(outgoing), [code, int(error is not None)])
        begun = self._begin(data[first:last], to_others, room, data[:first])

        def finish() -> Parts:
            with self._answered(what):
                begun()
            heads = read_heads(data, self._of_others(incoming), words)
            if error is not None or (heads[:, :2] != (code, 0)).any():
                self._raise_together(what, error)
            return Parts(data, incoming, heads[:, 2:])

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
        watch = Exchange.watch
        return contextlib.nullcontext() if watch is None else watch(self, sent)

    @contextlib.contextmanager
    def _awaited(self) -> Iterator[None]:
        """The others are waiting for what is made or sent in here; if it fails, give up."""
        try:
            yield
        except BaseException as error:  # no memory, or Ctrl-C
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
            # A late answer must not be taken for one to a later question.
            self.broken = self.broken or str(error)
            raise RuntimeError(
                f"sparsekit: {brief(plan)}: no answer from all other ranks. One may have died or "
                f"been interrupted, or a layer, or its backward, may have been called on some "
                f"ranks only: {error}"
            ) from error

    def abandon(self, error: BaseException) -> None:
        """Give up: what this rank has announced will not come."""
        self.broken = f"{type(error).__name__}: {error}"
        self.close()

    def close(self) -> None:
        """End the process group: its threads, and its connections, so that no other rank waits."""
        group = vars(self).pop("group", None)
        if group is None:
            return
        self.transport.close()
        with contextlib.suppress(ValueError):  # all groups have been destroyed already
            dist.destroy_process_group(group)
        # All ends with the last reference.
        self._teller = None
        del self.transport

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """What fails in here on this rank only, the next handshake tells the others."""
        raised_together = self._raised_together
        try:
            yield
        except BaseException:
            if self._raised_together == raised_together:
                self.lookups += 1
            raise

    def _raise_together(self, plan: str, error: Exception | None) -> None:
        """Tell each other what is wrong, and raise it on every rank."""
        self._raised_together += 1
        self.at_once.clear()  # one of them may have missed what the others have agreed on
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
        except Exception:  # an error may hold anything
            packed = pickle.dumps(RemoteError(f"{type(error).__name__}: {error}"))
        # On the CPU, whatever carries the rest.
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
    """The same on all ranks, which `hash` is not, and quick for a plan of many tables."""
    return zlib.crc32(plan.encode())


def _begins(sizes: Sequence[int], first: int = 0) -> list[int]:
    """Where parts of these sizes begin, one behind the other."""
    return list(itertools.accumulate(sizes[:-1], initial=first))
