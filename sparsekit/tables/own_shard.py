"""The entry in a state that tells which rank's part of a table was saved."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..distributed import Exchange


class OwnShard(torch.Tensor):
    """A saved ``shard``: a plain tensor, except that torch.distributed.checkpoint cannot save it.

    torch.distributed.checkpoint mistakes tensors with the same name on several ranks for copies of
    one tensor, and would save only one of them.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    layer: str
    exchange: Callable[[], Exchange | None]  # a weak reference

    @staticmethod
    def of(shard: torch.Tensor, layer: str, exchange: Callable[[], Exchange | None]) -> OwnShard:
        """Return the ``shard`` of a layer as an `OwnShard`."""
        marked = shard.as_subclass(OwnShard)
        marked.layer, marked.exchange = layer, exchange
        return marked

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        """Raise an error when torch.distributed.checkpoint calls this method to plan a save."""
        rank, world_size = self.tolist()
        raise RuntimeError(
            f"{self.layer}: torch.distributed.checkpoint would keep one rank's part of the table, "
            f"here that of rank {rank} of {world_size}; give it sparsekit.checkpoint.DcpState("
            f"model, optimizer) in place of model.state_dict()"
        )

    def new_empty(self, *args: Any, **kwargs: Any) -> OwnShard:
        """Return an `OwnShard` for the copy that async_save makes."""
        return super().new_empty(*args, **kwargs).as_subclass(OwnShard)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnShard:
        return OwnShard.of(self.clone(), self.layer, self.exchange)

    def __reduce_ex__(self, protocol: Any) -> Any:
        exchange = self.exchange()
        if exchange is not None:
            exchange.parts_saved += 1
        # Save a plain tensor, so that torch.load does not need this class.
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def nothing() -> None:
    """Stand in for a weak reference where there is no exchange."""


def exchange_ref(exchange: Exchange | None) -> Callable[[], Exchange | None]:
    """Return a weak reference to the exchange, for an `OwnShard`."""
    return nothing if exchange is None else weakref.ref(exchange)


def warn_of_parts_not_saved(saved: Sequence[int]) -> None:
    """Warn if some ranks have saved states since the last lookup and others have not.

    Trainers and many scripts save on rank 0 only, and the loss of the other ranks' rows would go
    unnoticed until the state is loaded.

    Args:
        saved: number of table parts that each rank has saved.
    """
    if len(set(saved)) == 1:
        return
    most = max(saved)
    own = [rank for rank, count in enumerate(saved) if count == most]
    lost = [rank for rank, count in enumerate(saved) if count < most]
    warnings.warn(
        f"sparsekit: a state with tables has been saved on ranks {own} and not on ranks {lost}, "
        f"whose rows are then in no file: each rank has a part of every table, so have each save "
        f"its own, torch.save(model.state_dict(), f'model-{{rank}}.pt'). See docs/trainers.md",
        stacklevel=2,
    )
