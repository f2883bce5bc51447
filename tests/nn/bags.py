"""Bags of keys in every form of input, and the outputs expected for them.

Bags are a list of lists of keys. A form of input is a function that maps bags and flat weights (or
None) to a layer's arguments `inputs` and `sample_weights`.
"""

import itertools

import pytest
import torch
from hypothesis import strategies as st

from sparsekit import DistributedEmbedding

from .keyed import Keyed

SLOTS = 3
MAX_NNZ = 6
PADDING = -77
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
# 2 samples of 3 slots: empty bags at the start, inside and at the end; duplicates within a bag and
# between bags; keys that other hash tables reserve.
BAGS = [[], [0, -1, 0], [INT64_MIN], [5, INT64_MAX, 5, 0, 5], [-1], []]
KEYS = st.one_of(
    st.sampled_from([0, -1, 1, INT64_MIN, INT64_MAX]),
    st.integers(-4, 4),
    st.integers(INT64_MIN, INT64_MAX),
).filter(lambda key: key != PADDING)


def flat(bags):
    values = torch.tensor([key for bag in bags for key in bag], dtype=torch.int64)
    return values, torch.tensor([0, *map(len, bags)]).cumsum(0)


def make_layer(combiner="sum", **changes):
    arguments = {
        "max_vocabulary_size_per_gpu": 300,
        "embedding_vec_size": 5,
        "slot_num": SLOTS,
        "max_nnz": MAX_NNZ,
        "dtype": torch.float64,
        "name": "layer",
    }
    return DistributedEmbedding(combiner, **{**arguments, **changes})


def vectors(layer, keys):
    """Look up each key in a bag of its own; return the keys' vectors."""
    keys = torch.tensor(keys)
    with torch.no_grad():
        return layer((keys, torch.arange(len(keys) + 1))).view(-1, layer.embedding_vec_size)


def single(**changes):
    return make_layer(**{"slot_num": 1, "max_nnz": 1, **changes})


def random_weights(n, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)
    return (torch.rand(n, generator=generator) + 0.5).to(dtype).requires_grad_()


def as_values_offsets(bags, weights):
    return flat(bags), weights


def as_int32(bags, weights):
    values, offsets = flat(bags)
    if len(values) and (values.min() < -(2**31) or values.max() >= 2**31):
        pytest.skip("keys beyond int32")
    return [values.int(), offsets.int()], weights


def _positions(bags):
    bag = [b for b, keys in enumerate(bags) for _ in keys]
    column = [c for keys in bags for c in range(len(keys))]
    return torch.tensor([bag, column], dtype=torch.int64).view(2, -1), (len(bags), MAX_NNZ)


def as_coo(bags, weights):
    indices, shape = _positions(bags)

    def coo(values):
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=True, check_invariants=True
        )

    return coo(flat(bags)[0]), None if weights is None else coo(weights)


def as_uncoalesced_coo(bags, weights):
    """Return an uncoalesced COO tensor whose entries are in random order and all in column 0."""
    indices, shape = _positions(bags)
    order = torch.randperm(indices.shape[1], generator=torch.Generator().manual_seed(1))
    indices[1] = 0
    keys = torch.sparse_coo_tensor(
        indices[:, order], flat(bags)[0][order], shape, check_invariants=True
    )
    return keys, None if weights is None else weights[order]


def as_csr(bags, weights):
    values, offsets = flat(bags)
    columns, shape = _positions(bags)[0][1], (len(bags), MAX_NNZ)
    keys, sample_weights = (
        None
        if part is None
        else torch.sparse_csr_tensor(offsets, columns, part, shape, check_invariants=True)
        for part in (values, weights)
    )
    return keys, sample_weights


def as_jagged(bags, weights):
    values, offsets = flat(bags)
    keys, sample_weights = (
        None if part is None else torch.nested.nested_tensor_from_jagged(part, offsets)
        for part in (values, weights)
    )
    return keys, sample_weights


class KeyedJagged(Keyed):
    """Stand-in for a KeyedJaggedTensor of all slots; bags are in the order of slots."""

    def __init__(self, bags, weights):
        samples = len(bags) // SLOTS
        by_slot = [bags[s * SLOTS + k] for k in range(SLOTS) for s in range(samples)]
        if weights is not None:
            parts = weights.split([len(bag) for bag in bags])
            reordered = [parts[s * SLOTS + k] for k in range(SLOTS) for s in range(samples)]
            weights = torch.cat([*reordered, weights[:0]])
        super().__init__([f"slot_{k}" for k in range(SLOTS)], *flat(by_slot), weights)


def as_keyed_jagged(bags, weights):
    return KeyedJagged(bags, weights), None


def as_dense(bags, weights):
    """Return a dense tensor, with PADDING before and after the keys of a bag."""
    values, _ = flat(bags)
    shape = (len(bags) // SLOTS, SLOTS, MAX_NNZ)
    keys = torch.full(shape, PADDING).view(-1, MAX_NNZ)
    bag, column = _positions(bags)[0]
    if all(len(keys) < MAX_NNZ for keys in bags):
        column = column + 1
    keys[bag, column] = values
    if weights is None:
        return keys.view(shape), None
    padded = torch.zeros(keys.shape, dtype=weights.dtype).index_put((bag, column), weights)
    return keys.view(shape), padded.view(shape)


FORMS = {
    form.__name__.removeprefix("as_"): form
    for form in (
        as_values_offsets,
        as_int32,
        as_coo,
        as_uncoalesced_coo,
        as_csr,
        as_jagged,
        as_keyed_jagged,
        as_dense,
    )
}


def oracle(layer, bags, weights):
    """Return the expected output, computed by torch, with the weight and sample weights used."""
    values, offsets = flat(bags)
    rows = values if layer.table is None else layer.table.find(values)
    assert (rows >= 0).all()
    weight = layer.weight.detach().clone().requires_grad_()
    if weights is not None:
        weights = weights.detach().clone().requires_grad_()
    if layer.combiner == "sum" or (layer.combiner == "mean" and weights is None):
        out = torch.nn.functional.embedding_bag(
            rows,
            weight,
            offsets,
            mode=layer.combiner,
            per_sample_weights=weights,
            include_last_offset=True,
        )
    else:
        ones = torch.ones(len(values), dtype=weight.dtype)
        w = ones if weights is None else weights.to(weight.dtype)
        pooled = []
        for begin, end in itertools.pairwise(offsets.tolist()):
            part = w[begin:end]
            divisor = part.sum() if layer.combiner == "mean" else part.square().sum().sqrt()
            total = (part[:, None] * weight[rows[begin:end]]).sum(0)
            pooled.append(total / divisor if end > begin else total)
        out = torch.stack(pooled) if pooled else w[:, None] * weight[rows]
    return out.view(-1, layer.slot_num, weight.shape[1]), weight, weights


def check_coalesced(grad):
    assert grad.is_sparse
    assert grad.is_coalesced()
    rows = grad.indices()[0]
    assert (rows[1:] > rows[:-1]).all()
