"""Transports, which carry bytes from rank to rank."""

import errno
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Errors raised when a process lacks resources or permissions.
_LACKING = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EFBIG),
    *(errno.EPERM, errno.EACCES, errno.ENOSYS),
}


class Unavailable(Exception):
    """Raised on all ranks, with the same reason, if a transport is not available."""


class OutOfResources(Unavailable):
    """Raised in a process that lacks memory, files or permissions for a transport."""


class Transport(ABC):
    """Carries out an exchange's all-to-all collective, over all ranks in a group.

    Ranks start the same collectives in the same order; each rank may wait for them in any order.
    """

    rank: int
    world_size: int
    # True if each part must be exactly as long as the receiver's buffer; otherwise parts may be
    # shorter.
    exact = False

    @abstractmethod
    def begin_all_to_all(
        self,
        send: torch.Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        received: torch.Tensor | None = None,
    ) -> Callable[[], torch.Tensor]:
        """Start an all-to-all exchange of the parts in ``send``; return a function that waits.

        A part for another rank may be shorter than the receiver's buffer; the rest of the buffer is
        then undefined. The part for the sender itself must have the exact size. A part must not be
        longer: gloo would end the receiving process, and shared memory raises an error. With nccl
        every part must have the exact size.

        Args:
            send: 1-D, contiguous; the part for rank 0 first. Do not write to it until the wait is
                over.
            send_splits: number of elements to send to each rank.
            receive_splits: largest number of elements to receive from each rank.
            received: the buffer to write to, ``[sum(receive_splits)]`` in the dtype of send,
                contiguous. A new buffer by default.

        Returns:
            A function that waits for all parts and returns `received`, with the part from rank 0
            first.
        """

    def all_to_all(
        self, send: torch.Tensor, send_splits: Sequence[int], receive_splits: Sequence[int]
    ) -> torch.Tensor:
        """Run `begin_all_to_all`, and wait for its result."""
        return self.begin_all_to_all(send, send_splits, receive_splits)()

    def close(self) -> None:  # noqa: B027
        """Close the transport, so that ranks waiting for this rank raise an error."""


def room_for(
    send: torch.Tensor, receive_splits: Sequence[int], received: torch.Tensor | None
) -> torch.Tensor:
    """Check or allocate the receive buffer of `Transport.begin_all_to_all`, and return it.

    Raises:
        ValueError: received has the wrong shape, dtype, device or layout.
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
    """A transport over torch.distributed: gloo on the CPU, nccl on CUDA (exact sizes only)."""

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
        """Start sending a part of ``send`` to each rank; see `Transport`."""
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
        """Return the data from each rank, including this one."""
        ranks = self.world_size
        sizes = self.all_to_all(
            torch.tensor([len(data)] * ranks, device="cpu"), [1] * ranks, [1] * ranks
        )
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).repeat(ranks)
        received = self.all_to_all(own, [len(data)] * ranks, sizes.tolist())
        return [bytes(part.tolist()) for part in received.split(sizes.tolist())]

    def results(self, step: Callable[[], Any]) -> list[Any]:
        """Call `step`; return all ranks' results, or raise `Unavailable` if any rank fails."""
        result, reason, lacking = None, "", False
        try:
            result = step()
        except Exception as error:
            reason = f"on rank {self.rank}: {error}"
            lacking = isinstance(error, OSError) and error.errno in _LACKING
        said = pickle.dumps((result, reason, lacking))
        results, reasons, lackings = zip(*map(pickle.loads, self.all_gather(said)), strict=True)
        # Report a lack of resources first: it makes other ranks fail with less specific reasons.
        for of_rank, rank_lacks in zip(reasons, lackings, strict=True):
            if rank_lacks:
                raise OutOfResources(of_rank)
        if any(reasons):
            raise Unavailable(next(filter(None, reasons)))
        return list(results)
