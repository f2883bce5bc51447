"""Argument checks of the public ops: the errors that name op, argument and value."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

KEY_DTYPES = (torch.int64, torch.int32)
ROW_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
FLOATING = (*ROW_DTYPES, torch.float16)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which rows of ``dtype`` are added: float32 for bfloat16, else the same."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def signed_64(seed: int) -> int:
    """The same 64 bits as a signed number, which is what an op takes."""
    return (seed + 2**63) % 2**64 - 2**63


def check_tensor(
    op: str, name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], dim: int
) -> None:
    """Raise TypeError for a wrong type or dtype, ValueError for a wrong number of dimensions."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{op}: {name} must be {expected}, got {tensor.dtype}")
    if tensor.dim() != dim:
        raise ValueError(
            f"{op}: {name} must have {dim} dimension(s), got shape {tuple(tensor.shape)}"
        )


def check_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError when the named tensors are not all on one device."""
    first: torch.device | None = None
    for tensor in tensors.values():
        if tensor is None:
            continue
        if first is None:
            first = tensor.device
        elif tensor.device != first:
            devices = ((n, t.device) for n, t in tensors.items() if t is not None)
            listed = ", ".join(f"{name} on {device}" for name, device in devices)
            raise ValueError(f"{op}: all tensors must be on one device, got {listed}")


def explain(refusal: Exception, check: Callable[..., None], *args: Any) -> NoReturn:
    """Raise what check has to say about arguments that an op has refused, else the refusal."""
    try:
        check(*args)
    except (TypeError, ValueError) as clear:
        raise clear from None
    raise refusal


class CheckedOp:
    """An op with the checks of its tensors, which come after it.

    The op refuses all that they refuse, in fewer words, before it changes anything; to check
    first takes longer than a small op itself. They come first where no kernel runs, which is while
    torch.compile traces, and in the op's fake.

    Args:
        op: of the namespace sparsekit.
        gradient: whether it has one.
        tensors: name, dtypes and number of dimensions of the tensors it begins with.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        gradient: bool = False,
        **tensors: tuple[Sequence[torch.dtype], int],
    ) -> None:
        self._op = op
        # The op itself, without the way through Python.
        self._builtin = getattr(op, "op", op)
        self._gradient = gradient
        self._name = str(op).split(".")[1]
        self._tensors = tensors

    def check(self, *args: Any) -> None:
        """Raise TypeError or ValueError for a tensor that the op does not take."""
        for (name, (dtypes, dim)), tensor in zip(self._tensors.items(), args, strict=False):
            check_tensor(self._name, name, tensor, dtypes, dim)
        check_same_device(self._name, **dict(zip(self._tensors, args, strict=False)))

    def __call__(self, *args: Any) -> Any:
        """Call the op; past autograd where nobody asks for a gradient.

        The way through autograd, which is Python, takes longer than a small op itself.
        """
        if torch.compiler.is_compiling():
            self.check(*args)
            return self._op(*args)
        try:
            if not self._gradient:
                return self._builtin(*args)
            if torch.is_grad_enabled():
                for arg in args:
                    if isinstance(arg, torch.Tensor) and arg.requires_grad:
                        return self._builtin(*args)
            with torch._C._AutoDispatchBelowAutograd():
                return self._builtin(*args)
        except Exception as refusal:
            explain(refusal, self.check, *args)
