"""A fuzz case: draws random inputs, calls ops, and compares results with the reference."""

import contextlib
import random
import traceback

import torch
from conftest import KEY_DTYPES, ROW_DTYPES, TOLERANCE, same_bits

# Errors that a call with bad arguments may raise. TableFullError is a RuntimeError.
DOCUMENTED = (ValueError, TypeError, IndexError, RuntimeError)
SHOWN = 64  # largest number of elements of a tensor that a report prints in full


class Mismatch(AssertionError):
    """Result that differs from the reference's."""


class Case:
    """Source of random draws that depend only on the seed and the case's number."""

    def __init__(self, seed: int, number: int, backend: str) -> None:
        self.random = random.Random(f"{seed} {number}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(60))
        self.backend = backend
        self.threads = self.any_of(1, 1, 1, 1, 1, 1, 2, 3, 4)
        self.notes: dict[str, object] = {}

    # Draws

    def maybe(self, probability: float) -> bool:
        return self.random.random() < probability

    def any_of(self, *choices):
        return self.random.choice(choices)

    def size(self, most: int) -> int:
        """Draw a size up to `most`, often 0, 1 or a few."""
        few = self.any_of(0, 1, 2, 3, 7, 31, 32, 33, 64, 65)
        some = self.random.randrange(300)
        many = self.random.randrange(most + 1)
        return min(most, self.any_of(few, some, some, many))

    def most(self, cpu: int, simt: int) -> int:
        """Return the limit for the device: the CPU's may be larger, since its kernels are fast."""
        return cpu if self.backend == "cpu" else simt

    def dim(self, n: int = 1) -> int:
        """Draw the dim of n rows; for many rows it is small."""
        least_wide = self.any_of(0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 32, 33, 64, 100, 128, 132, 256)
        dim = self.any_of(least_wide, self.random.randrange(301))
        return dim if n * dim <= 200_000 else self.any_of(1, 2, 3, 4, 8, 9, 16)

    def row_dtype(self) -> torch.dtype:
        return self.any_of(*ROW_DTYPES)

    def integers(self, low: int, high: int, n: int, dtype=torch.int64) -> torch.Tensor:
        """Draw integers in [low, high]."""
        return torch.randint(low, high + 1, (n,), generator=self.generator).to(dtype)

    def key_dtype(self) -> torch.dtype:
        return self.any_of(*KEY_DTYPES)

    def keys(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Draw keys of one kind: equal, distinct, few, skewed, extreme, or with similar bits."""
        limits = torch.iinfo(dtype)
        kind = self.any_of("equal", "distinct", "few", "zipf", "extreme", "random", "stride")
        if kind == "equal":
            return torch.full((n,), self.random.randint(limits.min, limits.max), dtype=dtype)
        if kind == "distinct":
            start = self.any_of(0, -n // 2, limits.min, limits.max - n)
            return torch.randperm(n, generator=self.generator).to(dtype) + start
        if kind == "few":
            return self.integers(-5, self.any_of(0, 5, 100), n, dtype)
        if kind == "zipf":
            uniform = torch.rand(n, generator=self.generator, dtype=torch.float64)
            return (2 ** (uniform * self.any_of(5, 12, 20))).to(dtype)
        if kind == "stride":
            step = 1 << self.random.randrange(20 if dtype == torch.int32 else 40)
            return (torch.arange(n) % 1500).to(dtype) * step
        anything = torch.randint(limits.min, limits.max, (n,), generator=self.generator)
        if kind == "extreme":
            near = torch.tensor([0, -1, 1, limits.min, limits.max, limits.min + 1, limits.max - 1])
            anything = torch.where(anything % 3 != 0, near[anything % len(near)], anything)
        return anything.to(dtype)

    def floats(self, *shape: int, dtype: torch.dtype, kind: str = "any") -> torch.Tensor:
        """Draw normally distributed numbers, or whole numbers if sums must be exact."""
        if kind == "whole":
            draws = torch.randint(-8, 9, shape, generator=self.generator)
        else:
            draws = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return draws.to(dtype)

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same values, possibly with another memory layout."""
        kind = self.any_of("plain", "plain", "plain", "offset", "step", "turned", "wide")
        if kind == "offset":
            ahead = self.any_of(1, 2, 3, 5)
            return torch.cat([tensor.new_zeros(ahead), tensor.reshape(-1)])[ahead:].view(
                tensor.shape
            )
        if kind == "step" and tensor.dim():
            return torch.stack([tensor, torch.zeros_like(tensor)], 1)[:, 0]
        if kind == "turned" and tensor.dim() == 2:
            return tensor.t().contiguous().t()
        if kind == "wide" and tensor.dim() == 2:
            side = tensor.new_zeros(len(tensor), self.any_of(1, 3, 4))
            return torch.cat([side, tensor, side], 1)[:, side.shape[1] : -side.shape[1]]
        return tensor

    def note(self, **values: object) -> None:
        """Record values for the report of this case."""
        self.notes.update(values)

    # Calls

    def call(self, function, *args, changes=(), **keywords):
        """Record and make a call; arguments that are not in `changes` must keep their bits."""
        self.note(**{described(function): [args, keywords]})
        changed = {id(tensor) for tensor in _tensors(changes)}
        kept = [t for t in _tensors([args, keywords]) if id(t) not in changed]
        before = [t.detach().clone() for t in kept]
        with self._threads():
            result = function(*args, **keywords)
        self._unchanged(kept, before, "an argument that is not to be changed")
        return result

    def refused(self, errors, function, *args, changes=(), **keywords) -> None:
        """Call with invalid arguments: one of the errors must be raised, and nothing may change.

        `changes` are arguments that the call may change nevertheless.
        """
        self.note(**{described(function): [args, keywords]})
        partly = {id(tensor) for tensor in _tensors(changes)}
        kept = [t for t in _tensors([args, keywords]) if id(t) not in partly]
        before = [t.detach().clone() for t in kept]
        try:
            with self._threads():
                function(*args, **keywords)
        except errors as error:
            self.note(raised=repr(error))
        except Exception as error:
            raise Mismatch(
                f"expected {errors}, got:\n{''.join(traceback.format_exception(error))}"
            ) from None
        else:
            raise Mismatch(f"expected {errors}; nothing was raised")
        self._unchanged(kept, before, "an argument of a refused call")

    @contextlib.contextmanager
    def _threads(self):
        """Run with the case's number of threads; the reference runs with one thread."""
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(1)

    def _unchanged(self, kept, before, what) -> None:
        for now, then in zip(kept, before, strict=True):
            if now.device.type != "meta" and not same_bits(now, then):
                raise Mismatch(f"{what} has changed from\n{then}\nto\n{now}")

    # Comparisons

    def same(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Check that two tensors have equal bits."""
        if not same_bits(actual, expected):
            raise Mismatch(_difference(name, actual, expected))

    def close(
        self,
        name: str,
        actual: torch.Tensor,
        expected: torch.Tensor,
        magnitude: torch.Tensor | float,
        terms: int = 1,
    ) -> None:
        """Check that two tensors are equal up to rounding.

        `expected` is in float64. `magnitude` is the sum of the absolute values of an element's
        terms, and `terms` is the number of terms: a sequential sum may be off by as many roundings.
        """
        wide = torch.float32 if actual.dtype == torch.bfloat16 else actual.dtype
        per_term = torch.finfo(wide).eps / 2
        bound = max(TOLERANCE[wide], terms * per_term) * torch.as_tensor(magnitude)
        if actual.dtype == torch.bfloat16:
            bound = bound + TOLERANCE[torch.bfloat16] * expected.abs()
        bound = bound + torch.finfo(wide).tiny
        if actual.shape != expected.shape:
            raise Mismatch(f"{name}: shape {actual.shape}, expected {expected.shape}")
        value = actual.detach().double()
        good = ((value - expected).abs() <= bound) | (value == expected)
        good |= value.isnan() & expected.isnan()
        if not good.all():
            raise Mismatch(_difference(name, actual, expected, ~good))

    def equal(self, name: str, actual: object, expected: object) -> None:
        if actual != expected:
            raise Mismatch(f"{name}: got {actual}, expected {expected}")

    def report(self) -> str:
        """Return a description of all draws and calls."""
        return "\n".join(f"  {name}: {described(value)}" for name, value in self.notes.items())


def _tensors(values):
    if isinstance(values, torch.Tensor):
        if values.layout == torch.strided and not values.is_nested:
            yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def _difference(name, actual, expected, where=None) -> str:
    if actual.shape != expected.shape or (where is None and actual.dtype != expected.dtype):
        return f"{name}: got {described(actual)}, expected {described(expected)}"
    if where is None:
        where = ~(actual == expected) & ~(actual.isnan() & expected.isnan())
    places = where.nonzero()[:5].tolist()
    values = [(p, actual[tuple(p)].item(), expected[tuple(p)].item()) for p in places]
    lines = "".join(f"\n    at {p}: got {a!r}, expected {e!r}" for p, a, e in values)
    return f"{name}: {int(where.sum())} of {where.numel()} elements differ" + (
        lines or " in the sign of a zero or the bits of a NaN"
    )


def described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested:
            return f"{value}"
        text = f"tensor {tuple(value.shape)} {value.dtype} strides {value.stride()}"
        text += f" offset {value.storage_offset()}" if value.storage_offset() else ""
        if value.numel() <= SHOWN and value.device.type != "meta":
            text += f" {value.tolist()}"
        return text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {described(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(described, value)) + "]"
    return getattr(value, "__name__", None) or repr(value)
