"""Swaps tensors between two ranks, and their gradients in backward."""

from __future__ import annotations

from typing import Any

import torch

from .exchange import Exchange
from .wire import Parts, part_bytes


def swap(exchange: Exchange, tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Swap tensors of the same shape with the other rank; backward swaps their gradients.

    Both ranks must call this function, and must reach all swaps in the same order in backward.

    Args:
        exchange: exchange between two ranks.
        tensor: any shape and dtype, on the device of the exchange.
        what: description of the tensor, which must be the same on both ranks.

    Raises:
        ValueError: the number of ranks is not two.
        RuntimeError: ranks disagree about the tensor or its shape.
    """
    if exchange.world_size != 2:
        raise ValueError(f"swap of {what} needs 2 ranks, there are {exchange.world_size}")
    return _Swap.apply(exchange, tensor, what)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, tensor: torch.Tensor, what: str) -> torch.Tensor:
        ctx.exchange, ctx.what = exchange, what
        return _swapped(exchange, tensor, what)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        return None, _swapped(ctx.exchange, gradient, f"gradient of {ctx.what}"), None


def _swapped(exchange: Exchange, tensor: torch.Tensor, what: str) -> torch.Tensor:
    other = 1 - exchange.rank
    size = part_bytes(tensor.nbytes)
    sizes = [size if rank == other else 0 for rank in range(2)]

    def elements(parts: Parts) -> torch.Tensor:
        return parts.payload(other, tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def write(parts: Parts) -> None:
        elements(parts).copy_(tensor)

    titled = f"{what}: {list(tensor.shape)} of {tensor.dtype}"
    # Copy the result, since a view would also keep the memory of the sent parts alive.
    return elements(exchange.send(titled, write, sizes, sizes)()).clone()
