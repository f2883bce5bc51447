"""The entry of a state that says which rank's part of a table it is."""

from __future__ import annotations

from typing import Any

import torch


class OwnShard(torch.Tensor):
    """A saved ``shard``: a plain tensor to all but torch.distributed.checkpoint, which it stops.

    That takes tensors of one name on several ranks for copies, and would keep one rank's.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    layer: str

    @staticmethod
    def of(shard: torch.Tensor, layer: str) -> OwnShard:
        """The marked entry of a layer."""
        marked = shard.as_subclass(OwnShard)
        marked.layer = layer
        return marked

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        """Called by torch.distributed.checkpoint as it plans what each rank is to save."""
        rank, world_size = self.tolist()
        raise RuntimeError(
            f"{self.layer}: torch.distributed.checkpoint would keep one rank's part of the table, "
            f"of {world_size}; have each rank save its own, torch.save(model.state_dict(), "
            f"f'model-{{rank}}.pt'), here for rank {rank}, and load the same file on the same rank"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnShard:
        return memo.setdefault(id(self), OwnShard.of(self.clone(), self.layer))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as what it is, so that torch.load needs to know nothing of it.
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)
