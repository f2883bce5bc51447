"""How bytes get from rank to rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


class Unavailable(Exception):
    """A transport that cannot be had, for the same reason on all ranks."""


class OutOfResources(Unavailable):
    """Some process has too little memory, or too few files, or may not have them."""


class Transport(ABC):
    """The one collective that an exchange needs, over all ranks of a group.

    Ranks begin the same collectives in the same order, and each may wait for them in any order.
    """

    rank: int
    world_size: int
    # Whether a part must have the size that its receiver has room for; else it may be shorter.
    exact = False

    @abstractmethod
    def begin_all_to_all(
        self,
        send: torch.Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        received: torch.Tensor | None = None,
    ) -> Callable[[], torch.Tensor]:
        """Begin to send a part of ``send`` to each rank; what is returned waits for the others.

        A rank may send another one, not itself, less than that has room for; the rest is undefined.
        It must not send more: gloo then ends the process that receives it; shared memory raises.
        nccl allows neither less nor more.

        Args:
            send: 1-D, contiguous; the part for rank 0 first. Not to be written to before the wait.
            send_splits: elements for each rank.
            receive_splits: elements from each rank, at most.
            received: ``[sum(receive_splits)]`` in the dtype of send, contiguous, to be written to;
                new memory by default.

        Returns:
            What gives that, rank 0's part first.
        """

    def all_to_all(
        self, send: torch.Tensor, send_splits: Sequence[int], receive_splits: Sequence[int]
    ) -> torch.Tensor:
        """`begin_all_to_all`, and wait for it."""
        return self.begin_all_to_all(send, send_splits, receive_splits)()

    def close(self) -> None:  # noqa: B027
        """End it, so that other ranks that wait for this one raise."""


def room_for(
    send: torch.Tensor, receive_splits: Sequence[int], received: torch.Tensor | None
) -> torch.Tensor:
    """Buffer for `Transport.begin_all_to_all`.

    Raises:
        ValueError: it is not what it should be.
    """
    elements = sum(receive_splits)
    if received is None:
        return send.new_empty(elements)
    alike = received.dtype == send.dtype and received.device == send.device
    if not (alike and received.shape == (elements,) and received.is_contiguous()):
        raise ValueError(
            f"sparsekit: received must be contiguous, with the {elements} elements of "
            f"receive_splits, {send.dtype} on {send.device}; it is {list(received.shape)} with "
            f"strides {list(received.stride())}, {received.dtype} on {received.device}"
        )
    return received


class TorchTransport(Transport):
    """Over torch.distributed: gloo for tensors on the CPU, nccl, which is exact, for CUDA."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def begin_all_to_all(
        self,
        send: torch.Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        received: torch.Tensor | None = None,
    ) -> Callable[[], torch.Tensor]:
        """See `Transport`."""
        received = room_for(send, receive_splits, received)
        work = dist.all_to_all_single(
            received,
            send,
            list(receive_splits),
            list(send_splits),
            group=self.group,
            async_op=True,
        )

        def wait() -> torch.Tensor:
            work.wait()
            return received

        return wait

    def all_gather(self, data: bytes) -> list[bytes]:
        """Collects one object from each rank, this one included."""
        ranks = self.world_size
        sizes = self.all_to_all(
            torch.tensor([len(data)] * ranks, device="cpu"), [1] * ranks, [1] * ranks
        )
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).repeat(ranks)
        received = self.all_to_all(own, [len(data)] * ranks, sizes.tolist())
        return [bytes(part.tolist()) for part in received.split(sizes.tolist())]
