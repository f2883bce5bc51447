"""DistributedEmbedding equals nn.EmbeddingBag with the same rows, for every form of input."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsekit

from .bags import (
    BAGS,
    FORMS,
    KEYS,
    MAX_NNZ,
    PADDING,
    SLOTS,
    check_coalesced,
    flat,
    make_layer,
    oracle,
    random_weights,
)

pytestmark = [
    pytest.mark.usefixtures("engine"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state"),
]

COMBINERS = ["sum", "mean", "sqrtn"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}


def check_equal(layer, form, bags, weights=None):
    """Compare forward and backward on bags in this form with the oracle."""
    inputs, sample_weights = FORMS[form](bags, weights)
    out = layer(inputs, sample_weights)
    expected, weight, expected_weights = oracle(layer, bags, weights)
    assert out.shape == (len(bags) // layer.slot_num, layer.slot_num, layer.embedding_vec_size)
    assert out.dtype == layer.weight.dtype
    assert out.is_contiguous()
    close = {"rtol": 0, "atol": TOLERANCE[layer.weight.dtype]}
    torch.testing.assert_close(out, expected, **close)

    generator = torch.Generator().manual_seed(0)
    upstream = torch.rand(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    leaves = [layer.weight] if weights is None else [layer.weight, weights]
    for leaf in leaves:
        leaf.grad = None
    out.backward(upstream)
    expected.backward(upstream)
    check_coalesced(layer.weight.grad)
    torch.testing.assert_close(layer.weight.grad.to_dense(), weight.grad, **close)
    if weights is not None:
        torch.testing.assert_close(weights.grad, expected_weights.grad, **close)


@pytest.mark.pairs
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_embedding_bag(dtype, combiner, weighted, form):
    layer = make_layer(combiner, dtype=dtype, padding_key=PADDING if form == "dense" else None)
    bags = BAGS if form != "int32" else [[key % 1000 for key in bag] for bag in BAGS]
    weights = random_weights(sum(map(len, bags)), dtype) if weighted else None
    check_equal(layer, form, bags, weights)
    assert len(layer.table) == len({key for bag in bags for key in bag})


@given(
    bags=st.lists(st.lists(KEYS, max_size=MAX_NNZ), max_size=18).map(
        lambda bags: bags[: len(bags) // SLOTS * SLOTS]
    ),
    combiner=st.sampled_from(COMBINERS),
    weighted=st.booleans(),
    form=st.sampled_from(sorted(FORMS.keys() - {"int32"})),
    dim=st.sampled_from([1, 2, 5, 16, 33]),
)
def test_any_bags_equal_embedding_bag(bags, combiner, weighted, form, dim):
    layer = make_layer(combiner, embedding_vec_size=dim, padding_key=PADDING)
    weights = random_weights(sum(map(len, bags))) if weighted else None
    # Check new keys first, then the same keys in a different order.
    for each in (bags, [bag[::-1] for bag in bags[::-1]]):
        check_equal(layer, form, each, weights)
    assert set(layer.table.keys().tolist()) == {key for bag in bags for key in bag}


@pytest.mark.pairs
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("bags", [[], [[]] * SLOTS], ids=["batch_0", "no_keys"])
def test_no_keys(bags, combiner, weighted, form):
    layer = make_layer(combiner, padding_key=PADDING)
    check_equal(layer, form, bags, random_weights(0) if weighted else None)
    assert len(layer.table) == 0
    assert layer.weight.grad._nnz() == 0


@pytest.mark.parametrize("training", [True, False])
def test_dense_without_padding_key_or_with_none_padded(training):
    keys = torch.tensor([[[4, 4], [0, PADDING]], [[1, 2], [3, 4]]])
    layers = [make_layer("mean", slot_num=2, padding_key=key).train(training) for key in (None, 9)]
    expected = make_layer("mean", slot_num=2).train(training)(
        (keys.view(-1), torch.arange(0, 9, 2))
    )
    for layer in layers:
        assert torch.equal(layer(keys), expected)
        assert len(layer.table) == (6 if training else 0)


def test_padding_is_left_out_of_every_form():
    bags = [[PADDING, 3], [PADDING], [], [1, PADDING, 1], [PADDING, PADDING, 2], [7]]
    without = [[key for key in bag if key != PADDING] for bag in bags]
    weights = random_weights(sum(map(len, bags)))
    kept = weights.detach()[flat(bags)[0] != PADDING]
    for form in FORMS.values():
        layer = make_layer("mean", padding_key=PADDING)
        out = layer(*form(bags, weights))
        expected, _, _ = oracle(layer, without, kept)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        assert layer.table.find(torch.tensor([PADDING])) == -1


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_bfloat16_rounds_once(combiner, weighted):
    layer = make_layer(combiner, dtype=torch.bfloat16, embedding_vec_size=32)
    wide = make_layer(combiner, embedding_vec_size=32)
    weights = random_weights(sum(map(len, BAGS))) if weighted else None
    out = layer(flat(BAGS), weights)
    assert out.dtype == torch.bfloat16
    wide(flat(BAGS))
    wide.weight.data.copy_(layer.weight.data)
    exact, _, exact_weights = oracle(wide, BAGS, weights)
    # bfloat16 has 8 bits of significand: one rounding changes a value by at most 2^-8 of it. Sums
    # in bfloat16 would be further off.
    torch.testing.assert_close(out.double(), exact, rtol=2**-8 * 1.001, atol=1e-7)
    out.sum().backward()
    exact.sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16
    if weighted:
        torch.testing.assert_close(weights.grad, exact_weights.grad, rtol=0.02, atol=1e-3)


def test_without_hash_table_keys_are_rows():
    layer = make_layer("mean", use_hashtable=False, max_vocabulary_size_per_gpu=8)
    assert layer.table is None
    check_equal(layer, "values_offsets", [[0, 7], [3, 3, 3], []])
    hashed = make_layer("sum", slot_num=1, max_nnz=1)
    assert torch.equal(hashed((torch.arange(8), torch.arange(9))).squeeze(1), layer.weight)


OPTIMIZERS = {
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


# torch warns that Adagrad creates sparse tensors without setting check_invariants.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers_train_it_as_they_train_embedding_bag(name):
    layer = make_layer()
    layer(flat(BAGS))
    bag = torch.nn.EmbeddingBag(300, 5, mode="sum", include_last_offset=True, sparse=True)
    bag = bag.double()
    bag.weight.data.copy_(layer.weight.data)
    start = layer.weight.detach().clone()
    optimizers = [OPTIMIZERS[name](list(module.parameters())) for module in (layer, bag)]
    for step in range(5):
        part = flat(BAGS[step % 2 * 3 :][:3])
        layer(part).square().sum().backward()
        bag(layer.table.find(part[0]), part[1]).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(layer.weight, bag.weight, rtol=0, atol=1e-12)
    assert ((layer.weight - start)[: len(layer.table)] != 0).all()


def test_two_calls_and_a_step_before_backward():
    """Backward uses the rows that forward read, despite later insertions and updates."""
    layer = make_layer("mean")
    weights, more_weights = random_weights(5), random_weights(4)
    bags, more = [[1, 2], [1], [3, 3]], [[9, 1], [], [10, 11]]
    out = layer(flat(bags), weights)
    expected, weight, expected_weights = oracle(layer, bags, weights)
    layer(flat(more), more_weights).sum().backward()
    sparsekit.optim.LazyAdam(layer.parameters(), lr=0.5).step()
    layer.weight.grad = None
    (out * torch.arange(5)).sum().backward()
    (expected * torch.arange(5)).sum().backward()
    torch.testing.assert_close(layer.weight.grad.to_dense(), weight.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.grad, expected_weights.grad, rtol=0, atol=1e-12)


def test_sample_weights_in_other_shapes():
    values, offsets = flat(BAGS)
    weights = random_weights(len(values)).detach()
    expected = make_layer()((values, offsets), weights)
    keys, _ = FORMS["uncoalesced_coo"](BAGS, None)
    coo = torch.sparse_coo_tensor(
        keys._indices(),
        FORMS["uncoalesced_coo"](BAGS, weights)[1],
        keys.shape,
        check_invariants=True,
    )
    torch.testing.assert_close(make_layer()(keys, coo), expected, rtol=0, atol=1e-12)
    dense, padded = FORMS["dense"](BAGS, weights)
    assert torch.equal(make_layer(padding_key=PADDING)(dense, padded.view(-1)), expected)
    jagged = FORMS["keyed_jagged"](BAGS, weights)[0]
    flat_weights, jagged._weights = jagged._weights, None
    assert torch.equal(make_layer()(jagged, flat_weights), expected)
