"""Declares ops: how to check their arguments, call them, and register their fake kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from ._checks import check_same_device, check_tensor

# Number of dimensions of a stand-in for a list of tensors; tensors in lists have fewer.
STAND_IN_DIM = 4


class Of(NamedTuple):
    """Dtypes and number of dimensions that a tensor, or each tensor in a list, must have."""

    dtypes: Sequence[torch.dtype] | None  # None accepts any dtype
    dim: int | None  # None accepts any number of dimensions
    # True for descriptors, which are always on the CPU.
    on_cpu: bool = False


class Op:
    """An op in the namespace sparsekit that runs before Python checks its arguments.

    Checking first would take longer than a small op itself. The op refuses invalid arguments before
    it changes anything, but with short messages; the checks then raise an error that explains the
    refusal. Where no kernel runs, the checks come first: while torch.compile traces, and in the
    op's fake kernel.

    Args:
        name: name of the op.
        tensors: requirements for arguments, by name; names that the op lacks are ignored. A tensor
            without an entry only has to be on the same device as the others.
        gradient: whether the op has a gradient.
    """

    def __init__(self, name: str, tensors: Mapping[str, Of], *, gradient: bool = False) -> None:
        self.op = getattr(torch.ops.sparsekit, name).default
        # The op itself, without the wrapper that torch.library adds in Python.
        self._builtin = getattr(self.op, "op", self.op)
        self._name, self._gradient = name, gradient
        arguments = self.op._schema.arguments
        self._defaults = {each.name: each.default_value for each in arguments}
        types = {each.name: str(each.type) for each in arguments}
        self._types = {name: kind for name, kind in types.items() if "Tensor" in kind}
        self._tensors = tensors
        # True if the op takes no tensor that could require a gradient.
        self._integers = all(_are_integers(tensors.get(each)) for each in self._types)

    def check(self, *args: Any, **named: Any) -> dict[str, Any]:
        """Raise TypeError or ValueError for an invalid argument; return all arguments by name."""
        named = {**self._defaults, **dict(zip(self._defaults, args, strict=False)), **named}
        placed = {}
        for argument, kind in self._types.items():
            of = self._tensors.get(argument)
            for name, tensor in _listed(argument, kind, named[argument]):
                check_tensor(self._name, name, tensor, of and of.dtypes, of and of.dim)
                if of is None or not of.on_cpu:
                    placed[name] = tensor
                elif tensor.device.type != "cpu":
                    raise ValueError(
                        f"{self._name}: all tensors must be on one device but {name}, which must "
                        f"be on the CPU; it is on {tensor.device}"
                    )
        check_same_device(self._name, **placed)
        return named

    def __call__(self, *args: Any) -> Any:
        """Call the op, bypassing autograd where no gradient is needed.

        Autograd runs in Python here, which takes longer than a small op itself.
        """
        if torch.compiler.is_compiling():
            self.check(*args)
            return self.op(*args)
        try:
            if self._integers:  # autograd passes such a call on at once
                return self._builtin(*args)
            if self._gradient and torch.is_grad_enabled():
                for arg in args:
                    if isinstance(arg, torch.Tensor) and arg.requires_grad:
                        return self._builtin(*args)
            with torch._C._AutoDispatchBelowAutograd():
                return self._builtin(*args)
        except Exception as refusal:
            self._explain(refusal, args)

    def _explain(self, refusal: Exception, args: Sequence[Any]) -> NoReturn:
        """Raise the error from the checks for arguments that the op has refused."""
        try:
            self.check(*args)
        except (TypeError, ValueError) as clear:
            raise clear from None
        raise refusal

    def fake(self, results: Callable[..., Any]) -> None:
        """Register `results` as the fake kernel; its parameters are a subset of the op's.

        torch also calls the fake kernel for real tensors if one argument is on the meta device.
        """
        names = list(inspect.signature(results).parameters)

        def run(*args: Any, **named: Any) -> Any:
            named = self.check(*args, **named)
            return results(*(named[name] for name in names))

        torch.library.register_fake(f"sparsekit::{self._name}", run)


def _are_integers(of: Of | None) -> bool:
    dtypes = None if of is None else of.dtypes
    return dtypes is not None and not any(dtype.is_floating_point for dtype in dtypes)


def _listed(name: str, kind: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each tensor of an argument with its name; `kind` is the type in the op's schema."""
    if kind == "List[Tensor]" and len(value) == 1 and value[0].dim() == STAND_IN_DIM:
        return  # a stand-in for a list that the op has kept; see csrc/torch_ops/kept_list.h
    if kind == "List[Tensor]":
        yield from ((f"{name}[{i}]", tensor) for i, tensor in enumerate(value))
    elif kind == "Tensor" or value is not None:
        yield name, value
