"""Averages gradients of dense parameters over ranks that share memory.

gloo's all-reduce wakes several threads, which can take longer than a small model's computation.
"""

import torch
import torch.distributed as dist

from .exchange import Exchange
from .shared_memory import SharedMemoryTransport
from .wire import Parts, part_bytes
from .world import exchange_of


class Averaging:
    """Averages gradients over ranks, with the communication hook `average`.

    Each rank adds up one piece of each gradient bucket, in rank order, so results are bitwise equal
    on all ranks. A rank waits for others only at the end of its backward pass. Averaging has its
    own exchange, since the order of buckets and layers in a backward pass may differ from rank to
    rank.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._begun: list[_Bucket] = []

    def average(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Start averaging a bucket; see DistributedDataParallel's ``register_comm_hook``."""
        if not self._begun:
            # Queue this callback first, since DistributedDataParallel's own callback needs all
            # buckets to be averaged.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        begun = _Bucket(self._exchange, bucket.index(), bucket.buffer())
        self._begun.append(begun)
        return begun.average

    def _finish(self) -> None:
        begun, self._begun = self._begun, []
        try:
            for bucket in begun:
                bucket.add_up()
            for bucket in begun:
                bucket.finish()
        except BaseException as error:
            self._exchange.abandon(error)  # other ranks would wait for the remaining buckets
            raise


def averaging_of(device: torch.device) -> Averaging | None:
    """Return an `Averaging` for the default group, or None without shared memory.

    A collective call.
    """
    exchange = exchange_of(None, device, "dense part")
    if exchange is None or not isinstance(exchange.transport, SharedMemoryTransport):
        return None
    return Averaging(exchange)


class _Bucket:
    """A flat tensor of gradients, divided into one piece for each rank.

    All pieces have the same length, except that the last pieces may be shorter or empty.
    """

    def __init__(self, exchange: Exchange, index: int, buffer: torch.Tensor) -> None:
        self.average: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._exchange = exchange
        self._what = f"bucket {index} of dense gradients: {len(buffer)} of {buffer.dtype}"
        self._buffer = buffer
        ranks = exchange.world_size
        longest = -(-len(buffer) // ranks)
        self._pieces = [buffer[r * longest : (r + 1) * longest] for r in range(ranks)]
        self._own = self._pieces[exchange.rank]
        # Size in bytes of the message part that contains each piece.
        self._sizes = [part_bytes(piece.nbytes) for piece in self._pieces]
        self._received = self._exchange.send(
            self._what, self._write_pieces, self._sizes, self._sizes_of_own
        )

    @property
    def _sizes_of_own(self) -> list[int]:
        return [self._sizes[self._exchange.rank]] * self._exchange.world_size

    def _write_pieces(self, to: Parts) -> None:
        for rank, piece in enumerate(self._pieces):
            _elements(to, rank, piece).copy_(piece)

    def add_up(self) -> None:
        """Average this rank's piece, and start sending it to all ranks."""
        come = self._received()
        of_ranks = [_elements(come, r, self._own) for r in range(self._exchange.world_size)]
        average = torch.stack(of_ranks).sum(0).div_(self._exchange.world_size)

        def write(to: Parts) -> None:
            for rank in range(self._exchange.world_size):
                _elements(to, rank, average).copy_(average)

        self._received = self._exchange.send(
            f"average of {self._what}", write, self._sizes_of_own, self._sizes
        )

    def finish(self) -> None:
        """Wait for the pieces from the other ranks."""
        come = self._received()
        for rank, piece in enumerate(self._pieces):
            piece.copy_(_elements(come, rank, piece))
        self.average.set_result(self._buffer)


def _elements(parts: Parts, rank: int, like: torch.Tensor) -> torch.Tensor:
    """View the payload of a rank's part as a tensor with the dtype and size of `like`."""
    return parts.payload(rank, like.nbytes).view(like.dtype)
