"""What both layers share: the table, its rows and the lookup of distinct keys."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import _pybind, hashing, ops
from .._compiling import uncompiled
from ..distributed import Exchange, exchange_of
from ..distributed.world import settings
from ..errors import check_int
from ..memory import prefer_huge_pages
from ..ops._checks import KEY_DTYPES, ROW_DTYPES
from ..table import HashTable
from .init import Initializer, resolve
from .inputs import is_padding
from .load import entries_of, load, own_entries, own_vectors, refuse_lost_values
from .own_shard import OwnShard
from .weight import EmbeddingWeight, update_of

_names = itertools.count()


@dataclass
class Bags:
    """How keys are pooled, and what becomes of the pooled vectors."""

    offsets: torch.Tensor  # int64 [bags + 1]
    weights: torch.Tensor | None  # [n]
    combiner: str
    shape: Callable[[torch.Tensor], torch.Tensor]  # of [bags, dim], to the layer's output


@dataclass
class Prepared:
    """A layer's checked input: the keys it needs, and what to do with their vectors."""

    keys: torch.Tensor
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    bags: Bags | None = None  # of a layer that pools


class _OfThisProcess:
    """A process group, which a copy of the layer shares and a pickled layer goes without."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "_OfThisProcess":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _OfThisProcess, (None,)


class _GatherSparse(torch.autograd.Function):
    """Rows of the weight, with a coalesced sparse gradient. Rows are distinct and sorted."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        table: "ShardedTable",
        keys: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        vectors, ctx.some_missing = table.read(weight, keys, rows)
        ctx.weight = weight
        return vectors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        (grad,) = grads
        return deliver_gradient(ctx.weight, rows, grad, ctx.some_missing), None, None, None


def deliver_gradient(
    weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, some_missing: bool
) -> torch.Tensor | None:
    """The coalesced sparse gradient of these rows, which rise; None if it is used up at once.

    some_missing: whether there are rows of -1, as `ShardedTable.read` says.
    """
    if some_missing:
        # Sorted, so rows of unseen keys, -1, come first; they have no gradient.
        missing = int(torch.searchsorted(rows, 0))
        rows, grad = rows[missing:], grad[missing:]
    update = update_of(weight)
    if update is not None:
        update(weight, rows, grad)
        return None
    # Not torch.sparse_coo_tensor: under torch 2.11 it warns of checks that are off, although they
    # are turned off by its argument.
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1,
        1,
        weight.shape,
        rows.unsqueeze(0),
        grad,
        dtype=grad.dtype,
        layout=torch.sparse_coo,
        device=grad.device,
        is_coalesced=True,
    )


def _mark_coalesced(weight: torch.Tensor) -> None:
    """Restore the coalesced flag, which autograd drops when it takes a gradient over uncopied."""
    grad = weight.grad
    if grad is not None and grad.is_sparse and not grad.is_coalesced():
        rows = grad._indices()[0]
        if bool((rows[1:] > rows[:-1]).all()):
            grad._coalesced_(True)
        else:
            weight.grad = grad.coalesce()


class ShardedTable(torch.nn.Module):
    """One process's share of an embedding table; base class of the layers.

    Its parameters are those of `DistributedEmbedding`. State: ``weight`` [capacity, dim],
    ``table`` (a `HashTable`, absent without the hash table), ``seed`` int64 [1] and ``shard`` int64
    [2], rank and world size.
    """

    weight: EmbeddingWeight
    seed: torch.Tensor
    shard: torch.Tensor

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        use_hashtable: bool,
        *,
        key_dtype: torch.dtype,
        embedding_initializer: Initializer | None,
        padding_key: int | None,
        on_full: str,
        gradient_reduction: str,
        seed: int | None,
        name: str | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.name = f"{type(self).__name__}_{next(_names)}" if name is None else name
        self.capacity = self._count(
            "max_vocabulary_size_per_gpu", max_vocabulary_size_per_gpu, 2**31 - 1
        )
        self.embedding_vec_size = self._count("embedding_vec_size", embedding_vec_size)
        # While keys are being inserted: the table's size before. What is interrupted in between is
        # finished by whoever reads or writes the table next, in a copy too.
        self._unfinished: torch.Tensor | None = None
        # Modes (training or not) in which the weight has been looked at before the first key.
        self._looked_at: set[bool] = set()
        self._check_choice("key_dtype", key_dtype, KEY_DTYPES)
        self._check_choice("dtype", dtype, ROW_DTYPES)
        self._check_choice("on_full", on_full, ("error",))
        self._check_choice("gradient_reduction", gradient_reduction, ("mean", "sum"))
        device = torch.device(device or torch.get_default_device())
        if device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"{self.name}: device must be cpu or cuda, got {device}")
        if device.type == "cuda" and not _pybind.build_info()["cuda"]:
            raise NotImplementedError(
                f"{self.name}: device is {device}, but this build of sparsekit has no CUDA "
                f"kernels; install it where there is an nvcc"
            )

        self._process_group = _OfThisProcess(process_group or settings.process_group)
        exchange = exchange_of(self.process_group, device)
        self.rank = exchange.rank if exchange else 0
        self.world_size = exchange.world_size if exchange else 1
        # Whether a rank sends each of its keys once. Off, it sends them as they come, which is for
        # measurements.
        self.dedupe = True
        # How pooled vectors come from other ranks; see DistributedEmbedding.
        self.strategy = "all_to_all"
        self.key_dtype = key_dtype
        self.initializer = resolve(self.name, embedding_initializer)
        if padding_key is not None:
            padding_key = check_int(self.name, "padding_key", padding_key, -(2**63), 2**63 - 1)
        self.padding_key = padding_key
        self.on_full = on_full
        self.gradient_reduction = gradient_reduction
        # Layers must not start from equal vectors for equal keys (user 5 and item 5), so the
        # default seed depends on the name. It is state: a loaded layer goes on as it began.
        if seed is None:
            seed = int(hashing.xxh64([self.name], seed=settings.seed))
        # An unsigned seed may be given, a signed one is kept: the 64 bits are what counts.
        seed = check_int(self.name, "seed", seed, -(2**63), 2**64 - 1)
        signed = (seed + 2**63) % 2**64 - 2**63
        self.register_buffer("seed", torch.tensor([signed], device=device))
        # Which part of the table this is, so that none is loaded in place of another.
        shard = torch.tensor([self.rank, self.world_size], device=device)
        self.register_buffer("shard", shard)
        weight = torch.empty(self.capacity, self.embedding_vec_size, dtype=dtype, device=device)
        self.weight = EmbeddingWeight(prefer_huge_pages(weight).zero_())
        if use_hashtable:
            self.table: HashTable | None = HashTable(self.capacity, device=device, name=self.name)
            self.table.rank = self.rank
        else:
            self.table = None
            keys = torch.arange(self.capacity, device=device) * self.world_size + self.rank
            self.initializer.write_(self.weight.data, keys, seed=int(self.seed))

    def __setattr__(self, name: str, value: Any) -> None:
        # torch's fully_shard, which does not go on if this raises.
        if name == "weight" and hasattr(value, "device_mesh"):
            raise RuntimeError(
                f"{self.name}: fully_shard would take the table apart, which is sharded already; "
                f"pass it ignored_params={{the weights of embedding layers}}"
            )
        super().__setattr__(name, value)

    def _count(self, argument: str, value: int, most: int = 2**63 - 1) -> int:
        return check_int(self.name, argument, value, 1, most)

    def _check_choice(self, argument: str, value: Any, choices: tuple[Any, ...]) -> None:
        if value not in choices:
            listed = ", ".join(map(str, choices))
            raise ValueError(f"{self.name}: {argument} must be one of {listed}; got {value!r}")

    def prepare(self, *inputs: Any) -> Prepared:
        """Check the input of a call. Changes nothing."""
        raise NotImplementedError

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Over whose ranks the table is sharded; None is torch.distributed's default group."""
        return self._process_group.group

    def process_exchange(self) -> Exchange | None:
        """`exchange`, whether the layer fits it or not."""
        return exchange_of(self.process_group, self.weight.device)

    @property
    def exchange(self) -> Exchange | None:
        """The way to the other ranks, or None where there are none.

        Raises:
            RuntimeError: the layer was made for another number of ranks than there are now.
        """
        exchange = self.process_exchange()
        rank, world_size = (exchange.rank, exchange.world_size) if exchange else (0, 1)
        if (rank, world_size) != (self.rank, self.world_size):
            raise RuntimeError(
                f"{self.name}: made on rank {self.rank} of {self.world_size}, whose part of the "
                f"table it holds, but this is rank {rank} of {world_size}"
            )
        return exchange

    def plan(self) -> str:
        """What all ranks must agree on before they look something up.

        Raises:
            RuntimeError: the table has been overwritten by that of another rank.
        """
        # In one piece, since on a device each reading waits for it.
        seed, *shard = torch.cat((self.seed, self.shard)).tolist()
        if shard != [self.rank, self.world_size]:
            raise RuntimeError(
                f"{self.name}: this is rank {self.rank} of {self.world_size}, but holds the table "
                f"of rank {shard[0]} of {shard[1]}: something has copied a model over the others', "
                f"tables included. Wrap models with sparsekit.distributed.wrap_ddp, and load the "
                f"tables again on all ranks"
            )
        return (
            f"{self.name} (dim {self.embedding_vec_size}, {self.weight.dtype}, "
            f"{'training' if self.training else 'evaluation'}, "
            f"{'hash table' if self.table is not None else 'row numbers'}"
            f"{', gradients' if self.weight.requires_grad and torch.is_grad_enabled() else ''}"
            f", {self.strategy}, {self.gradient_reduction}, seed {seed}, "
            f"{self.initializer}, padding_key {self.padding_key}"
            f"{'' if self.table is not None else f', {self.capacity} rows'})"
        )

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_messages: list[str],
    ) -> None:
        rest = strict, missing_keys, unexpected_keys, error_messages
        entries = entries_of(state_dict, prefix)
        if entries:
            try:
                load(self, entries, local_metadata.get("assign_to_params_buffers", False))
            except (TypeError, ValueError) as error:
                error_messages.append(str(error))
            # torch has nothing left to do here, nor in the table.
            state_dict.update({prefix + name: own for name, own in own_entries(self).items()})
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if entries and not isinstance(self.weight, EmbeddingWeight):
            # torch.__future__.set_swap_module_params_on_conversion makes it a plain parameter.
            self.weight = EmbeddingWeight(self.weight.data, self.weight.requires_grad)

    def _catch_up(self, rows: torch.Tensor | None = None) -> None:
        # There may be another kind of tensor in place of the weight, under functional_call for one.
        if isinstance(self.weight, EmbeddingWeight):
            self.weight.catch_up(rows)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self._finish_insertion()
        self._catch_up()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.world_size > 1:
            name = f"{prefix}shard"
            destination[name] = OwnShard.of(destination[name], self.name)

    def _apply(self, *args: Any, **kwargs: Any) -> "ShardedTable":
        # While the optimizer's state is still where the weight is, and of its dtype.
        self._catch_up()
        return super()._apply(*args, **kwargs)

    def _refuse_trace(self) -> None:
        """Raise under torch.jit.trace, which would keep today's branches (was the table full)."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise NotImplementedError(f"{self.name}: torch.jit.trace cannot record a table lookup")

    def _check_keys(self, keys: torch.Tensor, order: torch.Tensor | None = None) -> None:
        """Check the keys of a call, padding included; order has their places in the input."""
        if keys.dtype != self.key_dtype and self.key_dtype == torch.int32:
            raise TypeError(f"{self.name}: keys must be {self.key_dtype}, got {keys.dtype}")
        if self.weight.dtype not in ROW_DTYPES:
            # After half(), for instance. Later it would fail with the keys already inserted.
            raise TypeError(
                f"{self.name}: weight must be float32, float64 or bfloat16, got {self.weight.dtype}"
            )
        shape = (self.capacity, self.embedding_vec_size)
        if self.weight.shape != shape or not self.weight.is_contiguous():
            raise ValueError(
                f"{self.name}: weight must be contiguous and of shape {shape}, got shape "
                f"{tuple(self.weight.shape)} and strides {self.weight.stride()}"
            )
        if self.table is not None or keys.numel() == 0:
            return
        low, high = keys.aminmax()
        end = self.capacity * self.world_size
        if low >= 0 and high < end:
            return
        outside = (keys < 0) | (keys >= end)
        if self.padding_key is not None:
            outside &= ~is_padding(keys, self.padding_key)
        if outside.any():
            first = int(outside.nonzero()[0])
            position = first if order is None else int(order[first])
            raise IndexError(
                f"{self.name}: key {int(keys[first])} at position {position} is outside "
                f"[0, {end}), the range of keys without the hash table"
            )

    def _rows(self, keys: torch.Tensor) -> torch.Tensor:
        """Rows of distinct int64 keys of this rank; new ones are inserted in training, else -1."""
        if self.table is None:
            rows = keys // self.world_size
            self._catch_up(rows)
            return rows
        if self.training:
            return self._insert(self.table, keys)
        self._finish_insertion()
        if False not in self._looked_at:
            refuse_lost_values(self)
            self._looked_at.add(False)
        rows = self.table.find(keys)
        self._catch_up(rows)
        return rows

    def _insert(self, table: HashTable, keys: torch.Tensor) -> torch.Tensor:
        self._finish_insertion()
        if True not in self._looked_at:
            refuse_lost_values(self)
        # A module's own way to set an attribute takes longer than the clone.
        self.__dict__["_unfinished"] = table.size.clone()
        rows, status = table.find_or_insert_with_status(keys)
        # A row may have moved before it had a key; what it has missed is not its new vector's.
        self._catch_up(rows)
        self.initializer.write_(self.weight.data, keys, rows, status, seed=int(self.seed))
        self.__dict__["_unfinished"] = None
        self._looked_at.add(True)
        return rows

    @torch.no_grad()
    def assign_(self, keys: torch.Tensor, vectors: torch.Tensor) -> None:
        """Give keys these vectors, for instance pretrained ones; absent keys are inserted.

        With several ranks, call it with the same keys on all: each keeps those that it owns. States
        of optimizers stay as they are.

        Args:
            keys: int64 or int32 ``[n]``, distinct.
            vectors: floating point ``[n, dim]``.

        Raises:
            TypeError, ValueError: a wrong dtype or shape, repeated keys, or another device.
            IndexError: a key out of range, without the hash table.
            TableFullError: more new keys than free rows; nothing has been changed.
        """
        keys, vectors = own_vectors(self, keys, vectors)
        rows = self._rows(keys) if self.table is None else self._insert(self.table, keys)
        self.weight.index_copy_(0, rows, vectors.to(self.weight.dtype))

    def _finish_insertion(self) -> None:
        """Give keys their initial vectors if the call that inserted them was interrupted."""
        if self._unfinished is None or self.table is None:
            return
        before, size = int(self._unfinished), len(self.table)
        if 0 <= before < size:
            rows = torch.arange(before, size, device=self.weight.device)
            self._catch_up(rows)
            keys = self.table.keys()[before:]
            self.initializer.write_(self.weight.data, keys, rows, seed=int(self.seed))
        self._unfinished = None

    def read(
        self, weight: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, bool]:
        """Vectors of rows, for keys with row -1 their initial ones, and whether there are such."""
        vectors = ops.gather_rows(weight.detach(), rows)
        if self.training or self.table is None:
            return vectors, False
        missing = (rows < 0).nonzero().squeeze(1)
        if len(missing) == 0:
            return vectors, False
        self.initializer.write_(vectors, keys[missing], missing, seed=int(self.seed))
        return vectors, True

    def _watch_gradient(self) -> None:
        """Keep the gradient marked as coalesced."""
        hooks = self.weight._post_accumulate_grad_hooks or {}
        if (
            self.weight.is_leaf
            and self.weight.requires_grad
            and _mark_coalesced not in hooks.values()
        ):
            # Here and not in __init__, since a copied module has a new weight without hooks.
            self.weight.register_post_accumulate_grad_hook(_mark_coalesced)

    def distinct_rows(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of the distinct keys, rising; those keys; and which of them each of keys is.

        A coalesced gradient has its rows sorted. Sorting them here, where the inverse can follow
        cheaply, saves a pass over the gradients.
        """
        unique, inverse, _ = ops.unique(keys)
        unique = unique.to(torch.int64)
        rows, order = self._rows(unique).sort()
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device)
        return rows, unique[order], position[inverse]

    # What is found has a shape that depends on the keys, and some of it happens in the optimizer.
    @uncompiled
    def lookup(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors of the distinct keys ``[u, dim]``, and for each of keys ``[n]`` its vector."""
        self._watch_gradient()
        rows, distinct, inverse = self.distinct_rows(keys)
        return _GatherSparse.apply(self.weight, self, distinct, rows), inverse

    def extra_repr(self) -> str:
        """Name, shape and the settings that matter."""
        rows = f", rows={len(self.table)}" if self.table is not None else ", use_hashtable=False"
        return (
            f"name={self.name!r}, capacity={self.capacity}, dim={self.embedding_vec_size}, "
            f"dtype={self.weight.dtype}{rows}"
        )
