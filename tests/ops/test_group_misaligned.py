"""The ops on many tables accept tensors at any address, and vectors of odd sizes.

A GPU faults on a wide access to an address that is no multiple of its size; on the host
UndefinedBehaviorSanitizer reports it (tests/sanitize.sh).
"""

import random

import pytest
import torch
from conftest import ROW_DTYPES, misaligned
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekit.ops._checks import accumulate_dtype

from . import test_group_bucketize, test_group_find, test_group_update
from .group_bags import check_all
from .groups import Group, Source, random_bags

DIMS = (1, 3, 5, 7, 33, 8)  # the last dim makes an aligned table beside the others
COMBINERS = ("sum", "mean", "sqrtn", "sum")


class Misaligned(TorchDispatchMode):
    """Mode in which every tensor of a sparsekit op begins one element past an aligned address.

    Buckets of hash tables stay in place: ops refuse buckets that are not aligned.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call the op with copies of its tensors, and copy back the tensors that it writes."""
        if func.namespace not in ("sparsekit", "sparsekit_simt"):
            return func(*args, **(kwargs or {}))
        written = []

        def moved(argument, value):
            if isinstance(value, (list, tuple)):
                return [moved(argument, item) for item in value]
            if not isinstance(value, torch.Tensor) or value.numel() == 0:
                return value
            if argument.name == "buckets":
                return value
            copy = misaligned(value)
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append((value, copy))
            return copy

        schema = {argument.name: argument for argument in func._schema.arguments}
        named = zip(func._schema.arguments, args, strict=False)
        result = func(
            *(moved(argument, value) for argument, value in named),
            **{name: moved(schema[name], value) for name, value in (kwargs or {}).items()},
        )
        for value, copy in written:
            value.copy_(copy)
        return result


def odd_group(dtype, device, order=1):
    """Return tables of all dims with int32 or int64 keys; some have weights or long bags."""
    dims = DIMS[::order]
    group = Group(
        dtype, dims, [90] * len(dims), [t != 1 for t in range(len(dims))], [1] * 6, device
    )
    for t in range(len(dims)):
        n = 301 if t == 4 else 41
        keys = (torch.arange(n) * 7 % 31).to(torch.int32 if t % 2 else torch.int64)
        bags = 2 if t == 4 else 9
        offsets = random_bags(random.Random(t), n, bags, keys.dtype)
        weights = torch.rand(n if t % 3 == 0 else 0, dtype=accumulate_dtype(dtype)) + 0.5
        group.sources.append(Source(keys, offsets, weights))
        # Vectors begin at odd elements, and in some tables a gap follows each vector.
        group.ask(t, t, 0, bags, COMBINERS[t % 4], dims[t] + t % 3)
    return group


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_pooling_and_its_gradients(device, dtype, order):
    with Misaligned():
        check_all(odd_group(dtype, device, order))


@pytest.mark.parametrize("case", ["lazy adam", "row-wise adagrad", "lamb"])
@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_updates(device, dtype, case):
    with Misaligned():
        test_group_update.check(odd_group(dtype, device), case, 3)


def test_keys(device):
    with Misaligned():
        test_group_find.check(odd_group(torch.float32, device))
        for distinct in (True, False):
            test_group_bucketize.check_all(odd_group(torch.float32, device), 3, distinct, 0)
