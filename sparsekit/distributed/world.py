"""Keeps the settings from `init`, the default process group and each group's exchanges."""

from __future__ import annotations

import atexit
import enum
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from ..errors import check_choice, check_int
from .backend import check_backend, make_transport
from .exchange import Exchange

# Each process group's exchanges, keyed by device, by backend and timeout from `init`, and by
# purpose. Weak keys let a group end when its owner destroys it.
_exchanges: WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[torch.device, str, timedelta, str], Exchange]
] = WeakKeyDictionary()
# All existing exchanges, including those of destroyed groups.
_open: WeakSet[Exchange] = WeakSet()


@atexit.register
def _close() -> None:
    # Close all exchanges before Python exits. A gloo thread releases a tensor a moment after its
    # collective is done, and needs Python to do so; without Python, it would abort the process.
    for exchange in _open:
        exchange.close()


class _Settings:
    """The settings from `init`."""

    seed = 0
    process_group: dist.ProcessGroup | None = None
    timeout = timedelta(minutes=5)
    backend = "auto"
    wire_dtype: torch.dtype | None = None


# Dtypes that vectors and gradients can be rounded to when they are sent between ranks.
WIRE_DTYPES = (torch.bfloat16,)

settings = _Settings()


class _Keep(enum.Enum):
    """Marks an argument that was not passed."""

    KEEP = 0

    def __repr__(self) -> str:
        return "<as it is>"


def init(
    global_batch_size: int | None = None,
    seed: int | _Keep = _Keep.KEEP,
    process_group: dist.ProcessGroup | _Keep | None = _Keep.KEEP,
    *,
    timeout: float | timedelta | _Keep = _Keep.KEEP,
    backend: str | _Keep = _Keep.KEEP,
    wire_dtype: torch.dtype | _Keep | None = _Keep.KEEP,
) -> None:
    """Set defaults for layers created after this call; calling it is optional.

    Arguments that are not given keep their earlier values. A new timeout or backend also takes
    effect in existing layers, at their next call, so call `init` on all ranks.

    Args:
        global_batch_size: accepted for compatibility with SOK, and not used.
        seed: changes the initial vectors of all layers that have a name and no seed. Initially 0.
        process_group: the ranks that tables are sharded over; None, the initial setting, means
            torch.distributed's default group, or a single process if there is no such group.
        timeout: seconds, or a timedelta, that a rank waits for another rank before it raises an
            error. Initially 5 minutes.
        backend: transport for exchanges: ``"torch"`` is torch.distributed, ``"nccl"`` is libnccl
            called directly, for CUDA tensors, and ``"shared_memory"`` is for CPU tensors on ranks
            that share a host. ``"auto"`` uses one of the last two if it is available on all ranks,
            otherwise torch.distributed.
        wire_dtype: ``torch.bfloat16`` rounds vectors and gradients that ranks exchange, for layers
            without a wire_dtype of their own; sums are still computed in float32. None, the initial
            setting, means no rounding. See `DistributedEmbedding`.

    Raises:
        TypeError, ValueError: a seed that is not a 64-bit integer, a timeout that is not positive,
            or an unknown backend or wire_dtype.
        RuntimeError: ``backend="nccl"``, but NCCL was not available at build time, or is not
            available now.
    """
    if global_batch_size is not None:
        check_int("sparsekit.init", "global_batch_size", global_batch_size, 1, 2**63 - 1)
    # Check all arguments before setting any of them.
    new: dict[str, Any] = {}
    if seed is not _Keep.KEEP:
        new["seed"] = check_int("sparsekit.init", "seed", seed, -(2**63), 2**64 - 1) % 2**64
    if process_group is not _Keep.KEEP:
        new["process_group"] = process_group
    if timeout is not _Keep.KEEP:
        timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if timeout <= timedelta(0):
            raise ValueError(f"sparsekit.init: timeout must be positive, got {timeout}")
        new["timeout"] = timeout
    if backend is not _Keep.KEEP:
        check_backend(backend)
        new["backend"] = backend
    if wire_dtype is not _Keep.KEEP:
        check_choice("sparsekit.init", "wire_dtype", wire_dtype, (None, *WIRE_DTYPES))
        new["wire_dtype"] = wire_dtype
    vars(settings).update(new)


def group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the given process group, or else the default one; None if there is only one rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = process_group or settings.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def exchange_of(
    group: dist.ProcessGroup | None, device: torch.device, purpose: str = "layers"
) -> Exchange | None:
    """Return a group's exchange for a purpose, or None if there is only one rank.

    The exchange has its own process group, with the timeout from `init`, so that its collectives
    never mix with other collectives, such as those of DistributedDataParallel. The first call for a
    group is therefore a collective.
    """
    group = group_of(group)
    if group is None:
        return None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    exchanges = _exchanges.setdefault(group, {})
    key = (device, settings.backend, settings.timeout, purpose)
    if key not in exchanges:
        own = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=settings.timeout,
            # gloo is needed even with CUDA, since ranks exchange errors over it.
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            use_local_synchronization=True,
        )
        transport = make_transport(settings.backend, own, device, settings.timeout)
        exchanges[key] = Exchange(own, device, transport)
        exchanges[key].purpose = purpose
        _open.add(exchanges[key])
    return exchanges[key]
