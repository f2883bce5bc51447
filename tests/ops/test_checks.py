"""Ops check their tensors themselves: the Python checks run only after an op has failed."""

import pytest
import torch

from sparsekit import HashTable, ops

KEYS = torch.tensor([1, 2])
TABLE = HashTable(5)

# For each op: its public function, the tensors that come first in both, and the other arguments.
CASES = {
    "unique": (ops.unique, {"keys": KEYS}, ()),
    "bucketize": (ops.bucketize, {"keys": KEYS}, (3,)),
    "gather_rows": (ops.gather_rows, {"table": torch.ones(3, 2), "rows": KEYS}, ()),
    "unsorted_segment_sum": (
        ops.unsorted_segment_sum,
        {"data": torch.ones(2, 2), "segment_ids": KEYS},
        (3,),
    ),
    "embedding_bag": (
        lambda weight, rows, offsets, _: ops.embedding_bag(weight, rows, offsets),
        {"weight": torch.ones(3, 2), "rows": KEYS, "offsets": torch.tensor([0, 2])},
        (0,),
    ),
    "hash_table_find": (
        ops.hash_table_find,
        {"buckets": TABLE.buckets, "hash_seed": TABLE.hash_seed, "keys": KEYS},
        (),
    ),
    "hash_table_find_or_insert_": (
        ops.hash_table_find_or_insert_,
        {
            "buckets": TABLE.buckets,
            "hash_seed": TABLE.hash_seed,
            "size": TABLE.size,
            "keys": KEYS,
        },
        (5,),
    ),
}


def assert_refused(name, place):
    public, tensors, rest = CASES[name]
    op = getattr(torch.ops.sparsekit, name).default
    for argument, tensor in tensors.items():
        for wrong, error in ((tensor.half(), TypeError), (tensor[None], ValueError)):
            arguments = [t.to(place) for t in {**tensors, argument: wrong}.values()]
            with pytest.raises((TypeError, ValueError), match=name):
                op(*arguments, *rest)
            message = f"^{name}: {argument} must .*, got (torch|shape)"
            with pytest.raises(error, match=message) as info:
                public(*arguments, *rest)
            assert info.value.__suppress_context__  # a single error, without a cause


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused(name, engine):
    assert_refused(name, "cpu")


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="init_rows_: status must be a tensor, got list"):
        ops.init_rows_(torch.ones(2, 2), KEYS, status=[0, 0])
    with pytest.raises(TypeError, match="embedding_bag: weight must be a tensor, got list"):
        ops.embedding_bag([[1.0]], KEYS, KEYS, sample_weights=torch.ones(2))
    with pytest.raises(TypeError, match="catch_up_rows_: row_step must be a tensor, got NoneType"):
        ops.catch_up_rows_(
            torch.ones(2, 2), [torch.ones(2, 2)], None, None, torch.ones(1, 2), 1, "sgd", [0.1]
        )


@pytest.mark.parametrize("name", CASES)
def test_what_the_fake_refuses(name):
    assert_refused(name, "meta")


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_under_compile(name):
    public, tensors, rest = CASES[name]
    first, *others = tensors.values()
    compiled = torch.compile(public, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"{name}: {next(iter(tensors))} must be .*, got"):
        compiled(first.half(), *others, *rest)


@pytest.mark.parametrize("name", ["gather_rows", "unsorted_segment_sum", "embedding_bag"])
def test_int32_is_as_int64(name, engine):
    public, tensors, rest = CASES[name]
    rows, *others = tensors.values()
    result = public(rows, *(t.int() for t in others), *rest)
    assert torch.equal(result, public(rows, *others, *rest))
    weight = rows.clone().requires_grad_()
    public(weight, *(t.int() for t in others), *rest).sum().backward()
    assert weight.grad is not None
