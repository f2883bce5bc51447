"""Sizes that exceed any memory cause no overflow, long loop or huge allocation in an op.

A tensor without elements may be huge in another dimension, and a number of rows is only an
integer, so the tests need no memory for these sizes.
"""

import re

import pytest
import simt
import torch

from sparsekit import HashTable

OPS = torch.ops.sparsekit
HUGE = (2**40, 2**45, 2**61, 2**62, 2**63 - 1)


def none(*shape, dtype=torch.float32):
    """Return a tensor without elements, or one element expanded to the shape."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.zeros((1,) * len(shape), dtype=dtype).expand(shape)


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


def long(*shape):
    return none(*shape, dtype=torch.int64)


def update(h, rows):
    table = [none(0, h)], [none(0, h), none(0, h)], [], [] if rows is None else [rows]
    return *table, [none(0, h)], [ints(1)], "adam", [0.0] * 6


def catch_up(h):
    steps, numbers = none(0, dtype=torch.int32), none(0, 2, dtype=torch.float64)
    return none(0, h), [none(0, h), none(0, h)], steps, None, numbers, 1, "adam", [0.0] * 6


# Op and arguments, as a function of the huge size.
CASES = {
    "segment sum, wide": (OPS.unsorted_segment_sum, lambda h: (none(0, h), ints(), 0)),
    "segment sum, wide rows": (OPS.unsorted_segment_sum, lambda h: (none(0, h), ints(), 3)),
    "segment sum, many segments": (OPS.unsorted_segment_sum, lambda h: (none(0, 1), ints(), h)),
    "segment sum, no columns": (OPS.unsorted_segment_sum, lambda h: (none(0, 0), ints(), h)),
    "segment sum, both": (OPS.unsorted_segment_sum, lambda h: (none(1, 4), ints(0), h // 4)),
    "segment sum, many rows": (OPS.unsorted_segment_sum, lambda h: (none(h, 0), long(h), 1)),
    "gather, wide": (OPS.gather_rows, lambda h: (none(0, h), ints())),
    "gather, no such row": (OPS.gather_rows, lambda h: (none(0, h), ints(-1, -1))),
    "gather, many": (OPS.gather_rows, lambda h: (none(3, 0), long(h))),
    "hash integers": (OPS.hash_integers, lambda h: (long(h), False, 0)),
    "bag, wide": (OPS.embedding_bag, lambda h: (none(0, h), ints(), ints(0), 0)),
    "bag, wide empty bags": (OPS.embedding_bag, lambda h: (none(0, h), ints(), ints(0, 0, 0), 1)),
    "bag, no rows": (OPS.embedding_bag, lambda h: (none(0, h), ints(-1, -1), ints(0, 2), 2)),
    "bag, many": (OPS.embedding_bag, lambda h: (none(3, 0), long(h), ints(0, 0), 0)),
    "bag, many bags": (OPS.embedding_bag, lambda h: (none(3, 0), ints(), long(h), 0)),
    "backward, wide": (
        OPS.embedding_bag_backward,
        lambda h: (none(0, h), ints(), ints(0), 0, None, 0),
    ),
    "backward, many rows": (
        OPS.embedding_bag_backward,
        lambda h: (none(0, 1), ints(), ints(0), 0, None, h),
    ),
    "backward, no columns": (
        OPS.embedding_bag_backward,
        lambda h: (none(1, 0), ints(0), ints(0, 1), 1, None, h),
    ),
    "backward of weights": (
        OPS.embedding_bag_backward_sample_weights,
        lambda h: (none(0, h), none(0, h), ints(), ints(0), 0, none(0)),
    ),
    "init, wide": (OPS.init_rows_, lambda h: (none(0, h), ints(), None, None, 0, 1, 0.0, 1.0)),
    "init, many": (OPS.init_rows_, lambda h: (none(0, 0), long(h), None, None, 0, 1, 0.0, 1.0)),
    "update, wide": (OPS.update_rows_, lambda h: update(h, ints())),
    "update, all rows": (OPS.update_rows_, lambda h: update(h, None)),
    "catch up, wide": (OPS.catch_up_rows_, catch_up),
    "unique": (OPS.unique, lambda h: (long(h),)),
    "unique_padded": (OPS.unique_padded, lambda h: (long(h), ints(0))),
    "bucketize": (OPS.bucketize, lambda h: (long(h), 2)),
    "bucketize, owners": (
        OPS.bucketize,
        lambda h: (ints(), 2, torch.zeros(1, dtype=torch.int16).expand(h)),
    ),
    "find": (OPS.hash_table_find, lambda h: (HashTable(5).buckets, ints(3), long(h), ints(0))),
    "insert": (
        OPS.hash_table_find_or_insert_,
        lambda h: (HashTable(5).buckets, ints(3), ints(0), long(h), 5, ints(0)),
    ),
    "insert, capacity": (
        OPS.hash_table_find_or_insert_,
        lambda h: (HashTable(5).buckets, ints(3), ints(0), ints(1), h),
    ),
    "find, no buckets": (OPS.hash_table_find, lambda h: (long(0, h), ints(3), ints(1))),
    "keys": (OPS.hash_table_keys, lambda h: (HashTable(5).buckets, ints(3), ints(h))),
    "copy": (
        OPS.hash_table_copy_,
        lambda h: (HashTable(5).buckets, HashTable(5).buckets, ints(3), h),
    ),
    "renumber": (
        OPS.hash_table_renumber_,
        lambda h: (HashTable(5).buckets, ints(3), none(h, dtype=torch.int32)),
    ),
    "compact, many rows": (OPS.compact_rows, lambda h: (ints(), h)),
    "compact, many gone": (OPS.compact_rows, lambda h: (long(h), h)),
    "lowest, many scores": (
        OPS.lowest_rows,
        lambda h: (long(h), HashTable(5).buckets, 3, 1, 0, 0, ints(), 2),
    ),
    "lowest, many rows": (
        OPS.lowest_rows,
        lambda h: (ints(3), HashTable(5).buckets, h, 1, 0, 0, ints(), 2),
    ),
    "lowest, many pinned": (
        OPS.lowest_rows,
        lambda h: (ints(), HashTable(5).buckets, 0, 1, 0, 0, long(h), 2),
    ),
    "move, wide": (OPS.move_rows_, lambda h: ([none(0, h)], ints().int(), 0, [none()])),
    "move, many": (
        OPS.move_rows_,
        lambda h: ([none(h, 0)], none(h, dtype=torch.int32), 0, [none()]),
    ),
    "clear": (OPS.hash_table_clear_, lambda h: (long(h, 0),)),
}


@pytest.mark.parametrize("huge", HUGE)
@pytest.mark.parametrize("case", CASES)
def test_huge_sizes(engine, case, huge):
    """An op returns an empty result, or raises an error that names the op and the size."""
    op, arguments = CASES[case]
    try:
        arguments = arguments(huge)
    except RuntimeError:
        return  # torch itself cannot make the tensor
    name = op._qualified_op_name.split("::")[1]
    outcome, result = outcome_of(op, arguments)
    if outcome is None:
        tensors = [result] if isinstance(result, torch.Tensor) else result or ()
        assert all(tensor.numel() == 0 for tensor in tensors)
        assert huge <= 2**44
    elif outcome.startswith("RuntimeError"):
        assert huge < 2**44  # larger sizes are refused before the allocation
        assert " bytes" in outcome
    else:
        assert re.match(rf"ValueError: {name}: .*\d", outcome)


def outcome_of(op, arguments):
    """Return the type and message of a call's error, if any, and the call's result."""
    try:
        return None, op(*arguments)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", None


@pytest.mark.parametrize("sizes", [(2**22, 2**23), (2**31, 2**31), (2**62, 2), (2**32, 2**32)])
def test_results_whose_bytes_overflow(engine, sizes):
    """Each size alone is valid for its argument, but the product of the sizes overflows."""
    segments, dim = sizes
    with pytest.raises(ValueError, match=r"unsorted_segment_sum: .* (shape \[|at most|must be in)"):
        OPS.unsorted_segment_sum(none(0, dim), ints(), segments)
    with pytest.raises(ValueError, match=r"embedding_bag_backward: .*( shape \[|at most|must be)"):
        OPS.embedding_bag_backward(none(0, dim), ints(), ints(0), 0, None, segments)


def pooling(bags):
    """Yield each op on bags of many tables, with arguments for one table and two features."""
    half = bags // 2
    features = [[0, 0, 0, half, 0, 1, 0, 0, 1], [0, 0, half, bags - half, 0, 1, 0, half, 1]]
    index, grad, weight = none(0, dtype=torch.int32), none(0), none(1, 1)
    given = none(bags + 1, dtype=torch.int32), torch.tensor(features), [], None
    yield OPS.group_embedding_bag_, ([grad], [weight], index, None, None, *given, [], [], None)
    yield OPS.group_embedding_bag_backward, ([grad], [1], index, None, ints(0), *given)
    yield (
        OPS.group_embedding_bag_backward_at_,
        (none(0), [1], [grad], [1], index, index, ints(0), *given),
    )
    yield (
        OPS.group_touch_,
        ([ints(0)], index, index, ints(0), *given[:2], torch.tensor([[1, 0]]), [ints(1)]),
    )
    tables = [weight.clone()], [], [], [ints(1)], "sgd", [0.0] * 6
    yield OPS.group_embedding_bag_update_, ([grad], index, index, ints(0), *given, *tables)


def test_more_bags_of_many_tables_than_32_bits_number(engine):
    for op, arguments in pooling(2**31):
        name = op._qualified_op_name.split("::")[1]
        with pytest.raises(ValueError, match=name) as info:
            op(*arguments)
        message = f"features have {2**31} bags; at most 2^31 - 1 are supported"
        assert str(info.value) == f"{name}: {message}"


def test_a_bag_of_more_entries_than_32_bits_number():
    with simt.SimtMode(), pytest.raises(ValueError, match="embedding_bag") as info:
        OPS.embedding_bag(none(3, 0), long(2**31), ints(0, 2**31), 0)
    supported = "at most 2^31 - 1 rows and as many offsets are supported"
    assert str(info.value) == f"embedding_bag: {2**31} rows in 1 bags; {supported}"


def test_the_message(engine):
    most = "at most 2^44 elements are supported, and a size of 0 counts as 1"
    with pytest.raises(ValueError, match="unsorted_segment_sum") as info:
        OPS.unsorted_segment_sum(none(0, 2**61), ints(), 0)
    assert str(info.value) == (
        f"unsorted_segment_sum: data of shape [0, {2**61}] cannot be: {most}"
    )
    if engine == "cpu":
        with pytest.raises(ValueError, match="unsorted_segment_sum") as info:
            OPS.unsorted_segment_sum(none(0, 2**30), ints(), 2**30)
        assert str(info.value) == (
            f"unsorted_segment_sum: a result of shape [{2**30}, {2**30}] cannot be: {most}"
        )
