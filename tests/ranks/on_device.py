"""Makes the ranks of a pool work on a device, although their tests are written for the CPU.

With SPARSEKIT_RANKS_DEVICE=cuda, all ranks share one GPU. Tensors that tests make without `device`
are on the GPU. Results return to the CPU, where a single rank has computed the same. Ranks
exchange through host memory and gloo, since NCCL refuses two ranks on one GPU; the rest is as on
several GPUs. With "simt" the host runner stands in for the GPU, as a rehearsal.
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


# Random numbers come from the CPU's generators, so that they equal the numbers of the single rank.
_RANDOM = (torch.rand, torch.randn, torch.randint, torch.randperm)
_FILLED_AT_RANDOM = (
    torch.Tensor.uniform_,
    torch.Tensor.normal_,
    # torch.nn.init gives modes these functions, and not the methods that they call.
    torch.nn.init.uniform_,
    torch.nn.init.normal_,
    torch.nn.init.kaiming_uniform_,
)


class _MadeOnDevice(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FILLED_AT_RANDOM:
            filled = kwargs.pop("tensor") if "tensor" in kwargs else args[0]
            with torch.no_grad():
                return filled.copy_(func(filled.detach().cpu(), *args[1:], **kwargs))
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        kwargs["device"] = "cpu" if func in _RANDOM else self.device
        return func(*args, **kwargs).to(self.device)


def begin() -> None:
    """Set up a rank's device. Call this right after the process group is created."""
    if NAME == "cpu":
        return
    simt.load()
    world.make_transport = lambda backend, group, device, timeout: _OverHost(group)


@contextlib.contextmanager
def where() -> Any:
    """Return a context manager in which a rank's functions create tensors on the device."""
    if NAME == "cpu":
        yield
        return
    device = torch.device("cpu" if NAME == "simt" else NAME)
    mode = simt.SimtMode() if NAME == "simt" else contextlib.nullcontext()
    # Layers use the default device; tensors made by torch's functions are redirected below.
    torch.set_default_device(device)
    # Some tests compare bits, but not all of torch's own ops can be deterministic.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with mode, _MadeOnDevice(device):
            yield
    finally:
        torch.set_default_device("cpu")


def on_cpu(results: Any) -> Any:
    """Copy results to the CPU, so that another process can receive and compare them."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), results)
