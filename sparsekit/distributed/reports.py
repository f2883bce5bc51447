"""Error messages that involve several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakMethod

import torch

from ..errors import TableFullError

# Maximum number of characters of a plan to show in an error message.
_SHOWN = 800

INTERRUPTED = (
    ". A step was interrupted on one of them, by Ctrl-C for instance, or a layer was called on "
    "some ranks only, so that rank may lack what the others have learned from it. Load the last "
    "checkpoint on all ranks, or go on with the next batch on all of them: they count alike again"
)


class RemoteError(RuntimeError):
    """An error from another rank that cannot be raised here with its own type."""


def of_rank(rank: int, error: Exception) -> Exception:
    """Return another rank's error, with the rank added to its message."""
    if isinstance(error, TableFullError):
        return error  # its message already names the rank
    message = f"on rank {rank}: {error}"
    if type(error) in (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError):
        return type(error)(message)
    return RemoteError(f"on rank {rank}: {type(error).__name__}: {error}")


def brief(plan: str) -> str:
    """Shorten a plan, which may name hundreds of tables, to its beginning and end."""
    half = _SHOWN // 2
    return plan if len(plan) <= _SHOWN else f"{plan[:half]} ... {plan[-half:]}"


def where_they_differ(plans: Sequence[str]) -> list[str]:
    """Return the beginning of each plan, and the text around the first difference."""
    each = enumerate(zip(*plans, strict=False))
    at = next((i for i, letters in each if len(set(letters)) > 1), min(map(len, plans)))
    first = slice(0, _SHOWN // 4)
    around = slice(max(first.stop, at - _SHOWN // 4), at + _SHOWN // 2)
    return [
        plan if len(plan) <= _SHOWN else f"{plan[first]} ... {plan[around]} ..." for plan in plans
    ]


def check_late(
    abandon: WeakMethod[Callable[[BaseException], None]],
    what: str,
    code: int,
    heads: torch.Tensor,
) -> None:
    """Check the heads of a message received during an earlier lookup.

    Args:
        abandon: weak reference to `Exchange.abandon`.
        what: description of the message.
        code: the expected first word of each head.
        heads: int64 ``[parts, 2]``.

    Raises:
        RuntimeError: another rank sent something else; the exchange has been abandoned.
    """
    if (heads.numpy() == (code, 0)).all():
        return
    error = RuntimeError(
        f"sparsekit: {brief(what)}: another rank sent something else. A layer, or its backward, "
        f"may have been called on some ranks only. Outputs and weights may be wrong since then. "
        f"Start all ranks again, from the last checkpoint"
    )
    if (of_exchange := abandon()) is not None:
        of_exchange(error)
    raise error
