"""Gradients of bags may have any strides; gradients of rows may go to the caller's memory."""

import contextlib
import random

import pytest
import simt
import torch
from conftest import randn, same_bits
from simt_counts import counted

from sparsekit import ops

from .group_bags import backward, check_pool, pool, small, sums_of
from .groups import Group, Source


def strided(grad, kind):
    """Return the same gradient [bags, dim] with other strides."""
    if kind == "columns":
        wide = torch.full((len(grad), grad.shape[1] + 7), torch.nan, dtype=grad.dtype)
        wide[:, 3:-4] = grad.cpu()
        return wide.to(grad.device)[:, 3:-4]
    if kind == "every other":
        return torch.stack([grad, torch.full_like(grad, torch.nan)], 1)[:, 0]
    if kind == "slots":  # [batch, 2, dim]: each sample has its own row
        wide = torch.full((len(grad) // 2, 2 * grad.shape[1] + 5), torch.nan, dtype=grad.dtype)
        wide = wide.to(grad.device)
        wide[:, : 2 * grad.shape[1]] = grad.reshape(len(grad) // 2, -1)
        return wide[:, : 2 * grad.shape[1]].unflatten(1, (2, -1))
    if kind == "transposed":
        return grad.T.contiguous().T
    assert kind == "one number"
    return grad[:1, :1].expand_as(grad)


@pytest.mark.parametrize("kind", ["columns", "every other", "slots", "transposed", "one number"])
@pytest.mark.parametrize("dim", [16, 3])
def test_gradients_of_any_strides(device, kind, dim):
    group = Group(torch.float32, [dim, 4], [50] * 2, [True] * 2, [1] * 2, device)
    keys, offsets = torch.arange(40) % 7, torch.arange(21) * 2
    for t in range(2):
        group.sources.append(Source(keys, offsets, torch.empty(0)))
        group.ask(t, t, 0, 20, "sum")
    found = group.find_or_insert()
    one, other = (randn(20, width).to(device) for width in (dim, 4))
    view = strided(one, kind)
    assert not view.is_contiguous()
    results = [
        backward(group, grads, found) for grads in ([view.contiguous(), other], [view, other])
    ]
    for expected, result in zip(
        *(sums_of(group, found[2], sums) for _, sums in results), strict=True
    ):
        assert same_bits(result, expected)


def at(group, found, out, row_strides=(4,), **changed):
    """Write the gradients to `out`; all upstream gradients are ones."""
    rows, inverse, counts, bags, key_starts = found
    arguments = {
        "out": out,
        "row_strides": list(row_strides),
        "grads": [torch.ones_like(vectors) for vectors in group.outs()],
        "dims": group.dims,
        "index": inverse,
        "rows": rows,
        "counts": counts,
        "bags": bags,
        "features": group.asked[2],
        "key_starts": key_starts,
    }
    ops.group_embedding_bag_backward_at_(**arguments | changed)


def test_places_of_gradients(device):
    group, found = small(device)
    found[0][:2] = torch.tensor([3, 0])
    out = torch.full((10,), 9.0, device=device)
    at(group, found, out, [2])
    assert out.tolist() == [1] * 4 + [9] * 2 + [2] * 4
    found[0][:2] = torch.tensor([2**31 - 1, 0])
    found[1][:] = torch.tensor([1, 1, -1])  # a row without entries gets zeros
    found[0][0] = 4
    out = torch.full((8,), 9.0, device=device)
    at(group, found, out, [1])
    assert out.tolist() == [2] * 4 + [0] * 4


@pytest.mark.parametrize(
    ("bad", "unit", "elements"),
    [(-1, 4, 8), (2, 4, 8), (5, 1, 8), (2, 3, 9), (1, 2**44, 8), (2**31 - 1, 2**44, 8), (0, 1, 3)],
)
def test_places_of_gradients_that_are_refused(device, bad, unit, elements):
    group, found = small(device)
    found[0][:2] = torch.tensor([0, bad]) if elements > 3 else torch.tensor([bad, bad])
    space = torch.full((elements + 40,), 9.0, device=device)
    out = space[20 : 20 + elements]
    position = int(elements > 3)
    with pytest.raises(
        IndexError, match=rf"backward_at_: rows\[{position}\] is {bad}, which is no"
    ):
        at(group, found, out, [unit])
    assert (space[:20] == 9).all()
    assert (space[20 + elements :] == 9).all()


@pytest.mark.parametrize("bad", [2, 2**31 - 1])
def test_numbers_of_gradients_that_are_refused(device, bad):
    group, found = small(device)
    found[1][1] = bad
    with pytest.raises(IndexError, match=r"backward_at_: index\[1\] is"):
        at(group, found, torch.empty(8, device=device))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"row_strides": []}, "row_strides must have 1 element"),
        ({"row_strides": [0]}, r"row_strides\[0\] must be in \[1, 2\^44\], got 0"),
        ({"row_strides": [-4]}, r"row_strides\[0\] must be in"),
        ({"row_strides": [2**62]}, r"row_strides\[0\] must be in"),
        ({"row_strides": [4, 4]}, "row_strides must have 1 element"),
        ({"grads": []}, "grads must not be empty"),
        ({"dims": [5]}, r"features\[0\] has 2 vectors of 5"),
        ({"rows": torch.zeros(2, dtype=torch.int32)}, "rows must have size 3"),
        ({"out": torch.zeros(8, dtype=torch.float64)}, "out must have dtype Float, got Double"),
    ],
)
def test_arguments_of_gradients_that_are_refused(device, changed, message):
    group, found = small(device)
    arguments = {"out": torch.zeros(8), "row_strides": [4]} | changed
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to(device)
    with pytest.raises(ValueError, match=f"backward_at_: .*{message}"):
        at(group, found, **arguments)
    assert (arguments["out"] == 0).all()


def test_gradients_are_not_written_to_a_strided_tensor(device):
    group, found = small(device)
    with pytest.raises(ValueError, match="backward_at_: out must be contiguous"):
        at(group, found, torch.zeros(16, device=device)[::2])


def test_gradients_are_written_apart_from_other_arguments(device):
    group, found = small(device)
    grad = torch.ones(8, device=device)
    with pytest.raises(ValueError, match=r"grads\[0\] overlaps out in memory"):
        at(group, found, grad, grads=[grad])


@pytest.mark.parametrize("wrong", ["grads", "index", "rows", "counts", "bags", "features"])
def test_dtypes_of_gradients_that_are_refused(device, wrong):
    group, found = small(device)
    rows, inverse, counts, bags, _ = found
    arguments = {"grads": group.outs(), "index": inverse, "rows": rows, "counts": counts}
    arguments |= {"bags": bags, "features": group.asked[2]}
    value = arguments[wrong]
    changed = value.half() if isinstance(value, torch.Tensor) else [value[0].half()]
    with pytest.raises(TypeError, match=rf"backward_at_: {wrong}(\[0\])? must be"):
        at(group, found, torch.zeros(8, device=device), **{wrong: changed})


@pytest.mark.parametrize("seed", range(5))
def test_gradients_stay_within_out_without_checks(seed):
    """On a device, invalid rows, index, counts or bags cause no write outside `out`."""
    draw = random.Random(seed)
    for _ in range(20):
        group, found = small("cpu")
        for tensor in found[:4]:
            limits = torch.iinfo(tensor.dtype)
            edges = (limits.min, -1, 0, 1, 2, 3, limits.max)
            tensor[draw.randrange(len(tensor))] = draw.choice(edges)
        space = torch.full((48,), 9.0)
        with counted():
            at(group, found, space[20:28], [draw.choice([1, 4, 2**44])])
        assert (space[:20] == 9).all()
        assert (space[28:] == 9).all()
        with contextlib.suppress(IndexError), simt.SimtMode():
            ops.unique(torch.zeros(1).long())


def test_a_backward_to_places_without_tables(device):
    group = Group(torch.float32, [], [], [], [], device)
    found = group.find_or_insert()
    # Without a tensor, nothing tells the ops the device.
    out = torch.zeros(3, device=found[1].device)
    at(group, found, out, [], grads=[])
    at(group, found, out, [], grads=[torch.empty_like(out)[:0]])
    assert (out == 0).all()


@pytest.mark.parametrize("wide", [True, False])
def test_weights_whose_rows_overlap(device, wide):
    """The rows of a weight may overlap: they begin at every element, or at every fourth."""
    unit = 4 if wide else 1
    group, (_, inverse, *rest) = small(device)
    space = torch.arange(20.0, device=device)
    group.weights = [space.as_strided((17 // unit, 4), (unit, 1))]
    rows = torch.tensor([16 // unit - 1, 1, 0], dtype=torch.int32, device=device)
    outs = group.outs()
    pool(group, outs, (rows, inverse, *rest))
    one, other = (space[row * unit :][:4] for row in rows[:2].tolist())
    assert torch.equal(outs[0], torch.cat([one, one + other]))
    rows[0] = 17 // unit
    with pytest.raises(IndexError, match="group_embedding_bag_"):
        pool(group, outs, (rows, inverse, *rest))


@pytest.mark.parametrize("strides", [(0, 1), (1, 5), (0, 0)])
def test_weights_that_are_copied(device, strides):
    """The elements of a row may be strided, or all rows may share memory."""
    group, found = small(device)
    space = torch.arange(60.0, device=device)
    group.weights = [space.as_strided((10, 4), strides)]
    check_pool(group, found)
