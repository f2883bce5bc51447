"""Lets functions, such as those in torch.nn.init, serve as initializers.

The initial vector of a key in a hash table depends only on (seed, key, column), not on when or on
which rank the key first occurs. A function that fills a tensor does not see keys. It is therefore
called on a tensor without memory, with the shape of the whole table, to find the distribution that
it draws from. Initial vectors are then drawn from that distribution.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .initializers import Constant, Initializer, Normal, Uniform

_aten = torch.ops.aten
# Maximum distance of a normal draw from the mean, in standard deviations. The draw is at most
# sqrt(-2 log(u)), where u >= 2^-32.
_FARTHEST = math.sqrt(64 * math.log(2))


@dataclass(frozen=True)
class Filled(Initializer):
    """Initializer for a layer without a hash table: a function that fills the rows of all ranks."""

    function: Callable[[torch.Tensor], Any]

    @property
    def _distribution(self) -> tuple[str, float, float]:
        return "constant", 0.0, 0.0  # not used: only a hash table has absent keys

    def __repr__(self) -> str:
        # Omit the function's address: ranks compare this text, and addresses differ.
        return f"Filled({function_name(self.function)})"

    def fill_(self, weight: torch.Tensor, rank: int, world_size: int, *, seed: int) -> None:
        """Let the function fill the rows of all ranks, and copy this rank's rows."""
        shape = len(weight) * world_size, weight.shape[1]
        rows = torch.zeros(shape, dtype=weight.dtype, device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            _call(self.function, rows)
        weight.copy_(rows[rank::world_size])


class _Record(TorchDispatchMode):
    """Records the torch ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if op is not _aten.detach.default:  # `t.data` calls detach
            self.calls.append((op, args, kwargs or {}))
        return op(*args, **(kwargs or {}))


def resolve(
    layer: str,
    initializer: Initializer | Callable[[torch.Tensor], Any] | None,
    shape: tuple[int, int],
    use_hashtable: bool,
) -> Initializer:
    """Return the initializer for a layer.

    Args:
        layer: name of the layer, for error messages.
        initializer: the layer's argument; None means the default.
        shape: shape of the table over all ranks.
        use_hashtable: whether there is a hash table; without one, any function that fills a tensor
            will do.

    Raises:
        TypeError: initializer is neither an initializer nor a function; or, with a hash table, it
            is a function that does not fill a tensor from one known distribution.
        ValueError: a parameter of the distribution is invalid.
    """
    if initializer is None:
        return Uniform()
    if isinstance(initializer, Initializer):
        return initializer
    if not callable(initializer) or isinstance(initializer, type):
        raise TypeError(
            f"{layer}: embedding_initializer must be a sparsekit.nn.Uniform, Normal or Constant, "
            f"or a function that fills a tensor, such as torch.nn.init.normal_, got {initializer!r}"
        )
    try:
        drawn = _drawn(initializer, shape)
    except Exception as error:
        if not use_hashtable:
            return Filled(initializer)
        raise TypeError(
            f"{layer}: embedding_initializer {function_name(initializer)} does not tell what the "
            f"vectors of a hash table start from: {error}. There a function is to do just one of "
            f"uniform_, normal_, fill_ and zero_ to the whole tensor, as torch.nn.init's uniform_, "
            f"normal_, constant_, ones_, zeros_, xavier_* and kaiming_* do; with "
            f"use_hashtable=False any function will do"
        ) from error
    return drawn


def _drawn(function: Callable[[torch.Tensor], Any], shape: tuple[int, int]) -> Initializer:
    """Return the distribution that a function draws from; raise unless there is exactly one."""
    if getattr(function, "func", function) is torch.nn.init.trunc_normal_:
        return _truncated(function)
    tensor = torch.empty(shape, device="meta")
    with _Record() as record:
        _call(function, tensor)
    names = [op.overloadpacket.__name__ for op, *_ in record.calls]
    if len(record.calls) != 1:
        raise ValueError(f"it calls {', '.join(names) or 'no op that can be seen'}")
    ((op, args, keywords),) = record.calls
    made = _MADE_BY.get(op)
    if made is None or not _shares_memory(args[0], tensor):
        raise ValueError(f"it calls {names[0]}")
    if keywords.get("generator") is not None:
        raise ValueError("it has a generator, and vectors depend on the layer's seed alone")
    return made(*args[1:])


_MADE_BY: dict[Any, Callable[..., Initializer]] = {
    _aten.uniform_.default: lambda low=0.0, high=1.0: Uniform(low, high),
    _aten.normal_.default: lambda mean=0.0, std=1.0: Normal(mean, std),
    _aten.fill_.Scalar: Constant,
    _aten.zero_.default: Constant,
}


def _truncated(function: Callable[[torch.Tensor], Any]) -> Initializer:
    """Return trunc_normal_'s distribution from its arguments, since it draws nothing on meta."""
    signature = inspect.signature(torch.nn.init.trunc_normal_)
    # Read the keywords of a functools.partial; trunc_normal_ itself has none.
    given = signature.bind(None, **getattr(function, "keywords", {}))
    given.apply_defaults()
    mean, std, a, b = (given.arguments[word] for word in ("mean", "std", "a", "b"))
    if given.arguments["generator"] is not None:
        raise ValueError("it has a generator, and vectors depend on the layer's seed alone")
    if not a <= mean - _FARTHEST * std <= mean + _FARTHEST * std <= b:
        raise ValueError(
            f"normal draws with mean={mean} and std={std} are not cut off at {a} and {b}, and do "
            f"go beyond"
        )
    return Normal(mean, std)


@torch.no_grad()
def _call(function: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> None:
    returned = function(tensor)
    if isinstance(returned, torch.Tensor) and not _shares_memory(returned, tensor):
        raise TypeError(
            f"{function_name(function)} returns another tensor than the one that it is to fill in "
            f"place"
        )


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def function_name(function: Any) -> str:
    """Return the name of a function, without its address, which differs from rank to rank."""
    function = getattr(function, "func", function)
    return getattr(function, "__qualname__", type(function).__qualname__)
