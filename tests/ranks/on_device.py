"""Has the ranks of a pool work on a device although their tests know of the CPU only.

SPARSEKIT_RANKS_DEVICE=cuda: all ranks share one GPU. What the tests make without naming a device is
made there, and what they return goes back to the CPU, where one rank has computed the same. Ranks
reach each other through host memory and gloo, since NCCL refuses two ranks on one GPU; all else is
as on several. With "simt" the same runs over the host runner, which rehearses it.
"""

import contextlib
import os
from typing import Any

import simt
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

from sparsekit.distributed import transport, world

NAME = os.environ.get("SPARSEKIT_RANKS_DEVICE", "cpu")


class _OverHost(transport.TorchTransport):
    def begin_all_to_all(
        self, send: torch.Tensor, send_splits: Any, receive_splits: Any, received: Any = None
    ) -> Any:
        wait = super().begin_all_to_all(send.cpu(), send_splits, receive_splits)

        def finish() -> torch.Tensor:
            came = wait().to(send.device)
            return came if received is None else received.copy_(came)

        return finish


# Random numbers come from the CPU's generators, so that all is as where one rank has computed it.
_RANDOM = (torch.rand, torch.randn, torch.randint, torch.randperm)
_FILLED_AT_RANDOM = (torch.Tensor.uniform_, torch.Tensor.normal_)


class _MadeOnDevice(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FILLED_AT_RANDOM:
            return args[0].copy_(func(args[0].cpu(), *args[1:], **kwargs))
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        kwargs["device"] = "cpu" if func in _RANDOM else self.device
        return func(*args, **kwargs).to(self.device)


def begin() -> None:
    """Called by a rank before anything else, with its process group made."""
    if NAME == "cpu":
        return
    simt.load()
    world.make_transport = lambda backend, group, device, timeout: _OverHost(group)


@contextlib.contextmanager
def where() -> Any:
    """What a rank runs a function in."""
    if NAME == "cpu":
        yield
        return
    device = torch.device("cpu" if NAME == "simt" else NAME)
    mode = simt.SimtMode() if NAME == "simt" else contextlib.nullcontext()
    # A layer made without a device asks for the default one, all else is made by a function.
    torch.set_default_device(device)
    # Some tests compare bits. Of torch's own ops not all can.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with mode, _MadeOnDevice(device):
            yield
    finally:
        torch.set_default_device("cpu")


def on_cpu(results: Any) -> Any:
    """Results as they can be sent to, and compared in, another process."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), results)
