"""Collectives that all ranks agree on before they begin.

A rank that is about to exchange something first sends every other a header of fixed size: what it
is about to do, whether something has gone wrong here, and how much follows. So ranks that
disagree find out at once, with headers that fit one another, and an error on one rank becomes an
error on all instead of a wait.
"""

import contextlib
import math
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from .. import hashing
from ..errors import TableFullError
from .transport import TorchTransport, Transport

# Words of a header: the hash of what follows, 1 for an error, the size of what follows, and three
# numbers for whoever exchanges.
_WORDS = 6

_INTERRUPTED = (
    ". A step was interrupted on one of them, by Ctrl-C for instance, or a layer was called on "
    "some ranks only, so that rank may lack what the others have learned from it. Load the last "
    "checkpoint on all ranks, or go on with the next batch on all of them: they count alike again"
)


class RemoteError(RuntimeError):
    """Something went wrong on another rank, which cannot be raised here as it was there."""


@dataclass
class Agreed:
    """What each rank has said before it began."""

    sizes: list[int]  # how much it will send to this rank
    facts: list[tuple[int, ...]]


@dataclass
class Parcel:
    """What a rank is about to send, and what it says of it to all ranks."""

    data: torch.Tensor  # 1-D, the part for rank 0 first
    splits: Sequence[int]  # elements for each rank
    facts: tuple[int, int, int] = (0, 0, 0)
    plan: str | None = None  # in full, if it was not known before


Made = TypeVar("Made", bound=Parcel | None)


class Exchange:
    """The collectives of one process group, over torch.distributed or another transport."""

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
        # One lookup at a time, whatever the number of threads.
        self.lock = threading.RLock()
        # Lookups so far, counted as they begin and whether or not they succeed: a number that names
        # one on all ranks, and that differs where a rank has left one early.
        self.lookups = 0
        # Why this exchange cannot be used any more.
        self.broken: str | None = None
        # What other ranks may be waiting for: set before a header, None once all of it has begun.
        self._announced: str | None = None
        # Carries errors.
        self._teller: TorchTransport | None = None
        # How many collectives there have been, for tests and benchmarks.
        self.collectives = 0
        self.bytes_sent = 0

    def run(self, plan: str, make: Callable[[], Parcel]) -> torch.Tensor:
        """`agree_to_send` parcels, and exchange them.

        Returns:
            What the ranks have sent here, rank 0's part first.

        Raises:
            As `agree_to_send`.
        """
        with self.lock:
            parcel, agreed = self.agree_to_send(plan, make)
            return self.all_to_all(parcel.data, parcel.splits, agreed.sizes)

    def agree_to_send(self, plan: str, make: Callable[[], Made]) -> tuple[Made, Agreed]:
        """Make a parcel for the other ranks, and `agree` that all exchange theirs next.

        Args:
            plan: what this rank is about to do, unless the parcel has it in full.
            make: makes the parcel; None means that nothing is exchanged.

        Raises:
            What make raises on any rank, on all of them; and what `agree` does.
        """
        try:
            parcel = make()
        except Exception as error:
            self.agree(plan, None, error)
            raise
        if parcel is None:
            return parcel, self.agree(plan, None)
        return parcel, self.agree(parcel.plan or plan, parcel.splits, facts=parcel.facts)

    def all_to_all(
        self, send: torch.Tensor, send_splits: Sequence[int], receive_splits: Sequence[int]
    ) -> torch.Tensor:
        """As `Transport.all_to_all`; sizes must have been agreed on."""
        return self.begin_all_to_all(send, send_splits, receive_splits)()

    def begin_all_to_all(
        self, send: torch.Tensor, send_splits: Sequence[int], receive_splits: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """Begin an `all_to_all`; what is returned waits for it and gives its result."""
        plan = self._announced
        begun = self._begin(send, send_splits, receive_splits)
        self._announced = None

        def finish() -> torch.Tensor:
            with self._answered(plan):
                return begun()

        return finish

    def _begin(
        self, send: torch.Tensor, send_splits: Sequence[int], receive_splits: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        self.collectives += 1
        self.bytes_sent += send.nbytes
        with self.awaited():
            return self.transport.begin_all_to_all(send, send_splits, receive_splits)

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """The others are waiting for what is made or sent in here; if it fails, give up."""
        try:
            yield
        except BaseException as error:  # no memory, or Ctrl-C
            self.abandon(error)
            raise

    def agree(
        self,
        plan: str,
        sizes: Sequence[int] | None,
        error: Exception | None = None,
        facts: tuple[int, int, int] = (0, 0, 0),
    ) -> Agreed:
        """Begin something together.

        Args:
            plan: what this rank is about to do; it must be the same on all ranks.
            sizes: how much this rank will send to each rank, in the all-to-all that must come next;
                None where none does.
            error: why this rank cannot go on.
            facts: three numbers for all ranks to know.

        Raises:
            The error itself, on the rank that has it and, with that rank's number, on the others.
            RuntimeError: ranks disagree about the plan, or what was agreed on before did not come.
        """
        if self._announced is not None and self.broken is None:
            self.abandon(InterruptedError(self._announced))
        if self.broken is not None:
            raise RuntimeError(
                f"sparsekit: {plan}: the exchange broke down before: {self.broken}. Start all "
                f"ranks again, from the last checkpoint"
            )
        code = int(hashing.xxh64([plan]))
        failed = int(error is not None)
        announced = [0] * self.world_size if sizes is None else sizes
        words = [word for size in announced for word in (code, failed, size, *facts)]
        header = torch.tensor(words, device=self.device)
        splits = [_WORDS] * self.world_size
        self._announced = plan
        with self._answered(plan):
            received = self._begin(header, splits, splits)().view(self.world_size, -1).tolist()
        if any(word[0] != code or word[1] for word in received):
            self._raise_together(plan, error)
        if sizes is None:
            self._announced = None
        return Agreed([word[2] for word in received], [tuple(word[3:]) for word in received])

    @contextlib.contextmanager
    def _answered(self, plan: str | None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # A late answer must not be taken for one to a later question.
            self.broken = self.broken or str(error)
            raise RuntimeError(
                f"sparsekit: {plan}: no answer from all other ranks. One may have died or been "
                f"interrupted, or a layer, or its backward, may have been called on some ranks "
                f"only: {error}"
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
        with contextlib.suppress(ValueError):  # all groups have been destroyed already
            dist.destroy_process_group(group)
        # All ends with the last reference.
        self._teller = None
        del self.transport

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """What fails in here fails on this rank only; the next header tells the others."""
        self.lookups += 1
        yield
        self.lookups -= 1

    def _raise_together(self, plan: str, error: Exception | None) -> None:
        """Tell each other what is wrong, and raise it on every rank."""
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
        except Exception:  # an error may hold anything
            packed = pickle.dumps(RemoteError(f"{type(error).__name__}: {error}"))
        # On the CPU, whatever carries the rest.
        self._teller = self._teller or TorchTransport(self.group)
        report = pickle.dumps((plan, packed, self.lookups))
        reports = [pickle.loads(other) for other in self._teller.all_gather(report)]
        self._announced = None
        counts = [count for *_, count in reports]
        self.lookups = max(counts)
        if error is not None:
            raise error
        for rank, (_, packed, _) in enumerate(reports):
            remote = pickle.loads(packed)
            if remote is not None:
                raise _of_rank(rank, remote)
        plans = "; ".join(f"rank {rank}: {other}" for rank, (other, *_) in enumerate(reports))
        raise RuntimeError(
            f"sparsekit: ranks are about to do different things. {plans}"
            f"{_INTERRUPTED if len(set(counts)) > 1 else ''}"
        )


def _of_rank(rank: int, error: Exception) -> Exception:
    """The error of another rank, which says where it comes from."""
    if isinstance(error, TableFullError):
        return error  # names the rank of the full table by itself
    message = f"on rank {rank}: {error}"
    if type(error) in (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError):
        return type(error)(message)
    return RemoteError(f"on rank {rank}: {type(error).__name__}: {error}")


def pack(
    parts: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[int]]:
    """Bytes to send to each rank, from several arrays of rows.

    Args:
        parts: ``[n_t, dim_t]`` or ``[n_t]`` of any dtypes, contiguous; the rows for rank 0 first.
        counts: for each part, its rows for each rank.

    Returns:
        uint8 ``[total]``, rank by rank and for each rank part by part, and the bytes of each rank.
    """
    raw = [part.reshape(-1).view(torch.uint8) for part in parts]
    sizes = [_part_bytes(part, count) for part, count in zip(parts, counts, strict=True)]
    splits = [sum(map(padded, of_rank)) for of_rank in zip(*sizes, strict=True)]
    if len(parts) == 1 and splits == sizes[0]:
        return raw[0], splits
    pieces = [part.split(size) for part, size in zip(raw, sizes, strict=True)]
    flat = []
    for rank, of_rank in enumerate(zip(*sizes, strict=True)):
        for part, size in enumerate(of_rank):
            flat.append(pieces[part][rank])
            flat.append(raw[part].new_zeros(padded(size) - size))
    return torch.cat(flat), splits


def unpack(
    received: torch.Tensor,
    like: Sequence[torch.Tensor],
    counts: Sequence[Sequence[int]],
) -> list[torch.Tensor]:
    """Undo `pack` at the receiver: arrays of rows, rank 0's first.

    Args:
        received: uint8.
        like: for each part, a tensor of its dtype and row shape.
        counts: for each part, its rows from each rank.
    """
    if len(like) == 1:
        shape = (-1, *like[0].shape[1:])
        whole = sum(_part_bytes(like[0], counts[0]))
        if whole == received.numel():
            return [received.view(like[0].dtype).view(shape if whole else (0, *shape[1:]))]
    sizes = [_part_bytes(part, count) for part, count in zip(like, counts, strict=True)]
    expected = sum(padded(size) for of_part in sizes for size in of_part)
    if received.numel() != expected:
        raise RuntimeError(
            f"sparsekit: {received.numel()} bytes have come from other ranks, not {expected}: do "
            f"all ranks run the backward of the same calls, in the same order?"
        )
    pieces: list[list[torch.Tensor]] = [[] for _ in like]
    begin = 0
    for of_rank in zip(*sizes, strict=True):
        for part, size in enumerate(of_rank):
            pieces[part].append(received[begin : begin + size])
            begin += padded(size)
    return [
        torch.cat(piece).view(part.dtype).view(sum(count), *part.shape[1:])
        for piece, part, count in zip(pieces, like, counts, strict=True)
    ]


def _part_bytes(part: torch.Tensor, counts: Sequence[int]) -> list[int]:
    row = part.element_size() * math.prod(part.shape[1:])
    return [count * row for count in counts]


def padded(size: int) -> int:
    """Every part begins at a multiple of 16 bytes, so that it can be viewed as any dtype."""
    return (size + 15) // 16 * 16
