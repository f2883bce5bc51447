"""Chooses the transport for an exchange, jointly on all ranks."""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from . import nccl, shared_memory
from .transport import OutOfResources, TorchTransport, Transport, Unavailable

BACKENDS = ("auto", "torch", "nccl", "shared_memory")
# Device type of the tensors that each backend supports.
_DEVICES = {"nccl": "cuda", "shared_memory": "cpu"}


def check_backend(backend: str) -> None:
    """Raise ValueError or RuntimeError if this process cannot use the backend given to `init`."""
    if backend not in BACKENDS:
        raise ValueError(
            f"sparsekit.init: backend must be one of {', '.join(BACKENDS)}; got {backend!r}"
        )
    reason = nccl.missing() if backend == "nccl" else ""
    if reason:
        raise RuntimeError(f"sparsekit.init: backend='nccl': {reason}")


def make_transport(
    backend: str, group: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> Transport:
    """Choose a group's transport for tensors on a device (a collective call).

    Raises:
        RuntimeError: the backend is not available, or ranks have chosen different backends.
    """
    teller = TorchTransport(group)
    backends = [other.decode() for other in teller.all_gather(backend.encode())]
    if len(set(backends)) > 1:
        wanted = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(backends))
        raise RuntimeError(f"sparsekit: ranks have different backends. {wanted}")
    needed = _DEVICES.get(backend, device.type)
    if device.type != needed:
        raise RuntimeError(
            f"sparsekit: backend={backend!r} needs {needed.upper()} tensors, these are {device}"
        )
    try:
        if backend == "torch":
            return teller
        if device.type == "cuda":
            return nccl.connect(teller, device, timeout)
        if device.type == "cpu":
            return shared_memory.connect(teller, timeout)
    except Unavailable as error:
        if backend == "auto":
            return teller
        if not isinstance(error, OutOfResources):
            raise RuntimeError(f"sparsekit: backend={backend!r}: {error}") from error
        if teller.rank == 0:
            message = f"sparsekit: backend={backend!r} cannot be had; gloo takes its place: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    return teller
