"""Each slot of a DistributedEmbedding may have its own key limit and combiner."""

import pytest
import torch

from sparsekit import DistributedEmbedding, EmbeddingGroup, Feature
from tests.nn.keyed import Keyed

from .bags import (
    BAGS,
    FORMS,
    PADDING,
    SLOTS,
    check_coalesced,
    make_layer,
    oracle,
    random_weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")

T = torch.tensor


def truncated(bags, most):
    """Return the bags cut to their key limits, and the original positions of the kept keys."""
    cut = [bag[: most[b % SLOTS]] for b, bag in enumerate(bags)]
    begins = [sum(map(len, bags[:b])) for b in range(len(bags))]
    places = [begins[b] + i for b, bag in enumerate(cut) for i in range(len(bag))]
    return cut, T(places)


# The uncoalesced form is left out, because it reorders keys.
@pytest.mark.parametrize("limit", [[2, 1, None], 1])
@pytest.mark.parametrize("form", sorted(FORMS.keys() - {"uncoalesced_coo"}))
def test_what_is_truncated_was_never_there(form, limit):
    most = limit if isinstance(limit, list) else [limit] * SLOTS
    layer = make_layer("mean", max_nnz=limit, truncate=True, padding_key=PADDING)
    bags = [[key % 1000 for key in bag] for bag in BAGS[::-1]]
    weights = random_weights(sum(map(len, bags)))
    cut, places = truncated(bags, most)
    assert cut != bags
    out = layer(*FORMS[form](bags, weights))
    expected, weight, expected_weights = oracle(layer, cut, weights[places])
    torch.testing.assert_close(out, expected)
    upstream = torch.randn(out.shape, dtype=out.dtype)
    out.backward(upstream)
    expected.backward(upstream)
    check_coalesced(layer.weight.grad)
    torch.testing.assert_close(layer.weight.grad.to_dense(), weight.grad)
    torch.testing.assert_close(weights.grad[places], expected_weights.grad)
    assert weights.grad.abs().sum() == weights.grad[places].abs().sum()
    assert set(layer.table.keys().tolist()) == {key for bag in cut for key in bag}


def test_bags_of_any_length():
    keys = torch.arange(90)
    for most in (None, [None], 90, [90]):
        layer = DistributedEmbedding("sum", 100, 4, 1, most, name="any")
        out = layer((keys, T([0, 90])))
        assert torch.equal(
            out, DistributedEmbedding("sum", 100, 4, 1, name="any")((keys, T([0, 90])))
        )
        assert layer.max_nnz == (90 if most in (90, [90]) else None)


def test_padding_is_not_counted_by_slot():
    layer = make_layer(slot_num=2, max_nnz=[1, 2], padding_key=PADDING)
    keys = T([[[PADDING, 5, PADDING], [PADDING, 3, 4]]])
    assert torch.equal(layer(keys)[0, 0], layer((T([5]), T([0, 1, 1])))[0, 0])
    with pytest.raises(ValueError, match=r"^layer: bag 3 has 3 keys, more than max_nnz\[1\]=2"):
        layer((torch.arange(5), T([0, 0, 1, 2, 5])))
    slotwise = Keyed(["x", "y"], torch.arange(4), T([0, 0, 2, 3, 4]))
    with pytest.raises(ValueError, match=r"^layer: bag 1 has 2 keys, more than max_nnz\[0\]=1"):
        layer(slotwise)
    assert sorted(layer.table.keys().tolist()) == [3, 4, 5]


REFUSED = {
    r"max_nnz must be one for all slots or a list of slot_num=3, got \[4\]": {"max_nnz": [4]},
    r"max_nnz must be .* slot_num=3, got \[4, 4, 4, 4\]": {"max_nnz": [4] * 4},
    r"max_nnz\[2\] must be in \[1, .*\], got 0": {"max_nnz": [4, None, 0]},
    r"max_nnz\[0\] must be an int, got 'a'": {"max_nnz": ["a", 1, 1]},
    r"max_nnz must be an int, got 2.5": {"max_nnz": 2.5},
    r"truncate=True needs a max_nnz, got None": {"max_nnz": None, "truncate": True},
    r"truncate must be True or False, got 3": {"truncate": 3},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises((TypeError, ValueError), match=f"^layer: {message}"):
        make_layer(**REFUSED[message])


@pytest.mark.parametrize("combiner", ["sum", None])
def test_features_are_truncated(combiner):
    layer = DistributedEmbedding("sum", 100, 4, 1, 2, truncate=True, name="shared")
    features = {
        "a": Feature("t", combiner),
        "b": Feature("t", combiner, max_nnz=1),
        "c": Feature("t", combiner, max_nnz=9, truncate=False),
    }
    group = EmbeddingGroup({"t": layer}, features)
    values, offsets = torch.arange(10), T([0, 3, 4, 7, 7, 10, 10])
    out = group(Keyed(["a", "b", "c"], values, offsets))
    assert sorted(layer.table.keys().tolist()) == [0, 1, 3, 4, 7, 8, 9]
    for name, keys, ends in [
        ("a", [0, 1, 3], [0, 2, 3]),
        ("b", [4], [0, 1, 1]),
        ("c", [7, 8, 9], [0, 3, 3]),
    ]:
        bags = T(keys), T(ends)
        if combiner is None:
            vectors = layer((bags[0], torch.arange(len(keys) + 1))).squeeze(1)
            assert torch.equal(out[name].values(), vectors)
            assert out[name].offsets().tolist() == ends
        else:
            plain = EmbeddingGroup({"t": layer}, {"x": Feature("t", combiner, 9, False)})
            assert torch.equal(out[name], plain({"x": bags})["x"])
    with pytest.raises(ValueError, match=r"^shared: feature 'c': bag 0 has 10 keys, .* max_nnz=9"):
        group(Keyed(["c", "a", "b"], values, T([0, 10, 10, 10])))


def test_features_of_a_layer_with_several_limits():
    slots = DistributedEmbedding("sum", 9, 4, 2, [1, 2], name="slots")
    with pytest.raises(ValueError, match=r"features\['a'\] needs a max_nnz, .* 'x' .* \[1, 2\]"):
        EmbeddingGroup({"x": slots}, {"a": "x"})
    any_length = DistributedEmbedding("sum", 9, 4, 1, name="any_length")
    with pytest.raises(ValueError, match=r"features\['a'\]: truncate=True needs a max_nnz"):
        EmbeddingGroup({"x": any_length}, {"a": Feature("x", truncate=True)})
    out = EmbeddingGroup({"x": slots})({"x": (T([1, 2, 3]), T([0, 1, 3]))})["x"]
    assert out.shape == (1, 2, 4)


MIXED = ["mean", "max", "sqrtn"]


def by_itself(layer, combiner, inputs):
    """Return a copy of the layer with one combiner for all slots, and the copy's output."""
    twin = make_layer(combiner, padding_key=PADDING)
    twin.load_state_dict(layer.state_dict())
    twin(*inputs)
    return twin, twin(*inputs)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["values_offsets", "csr", "keyed_jagged", "dense"])
def test_each_slot_has_a_combiner(form, weighted):
    combiners = ["mean", "sum", "sqrtn"] if weighted else MIXED
    layer = make_layer(combiners, padding_key=PADDING)
    weights = random_weights(sum(map(len, BAGS))) if weighted else None
    out = layer(*FORMS[form](BAGS, weights))
    upstream = torch.randn(out.shape, dtype=out.dtype)
    out.backward(upstream)
    of_weights, gradient = None, torch.zeros_like(layer.weight)
    if weighted:
        of_weights, weights.grad = weights.grad, None
    for slot, combiner in enumerate(combiners):
        twin, expected = by_itself(layer, combiner, FORMS[form](BAGS, weights))
        torch.testing.assert_close(out[:, slot], expected[:, slot])
        expected[:, slot].backward(upstream[:, slot])
        gradient += twin.weight.grad.to_dense()
    torch.testing.assert_close(layer.weight.grad.to_dense(), gradient)
    if weighted:
        torch.testing.assert_close(of_weights, weights.grad)
        with torch.no_grad():  # without gradients the ops pool the slots
            torch.testing.assert_close(layer(*FORMS[form](BAGS, weights)), out)


@pytest.mark.parametrize("samples", [0, 2])
def test_no_keys_and_no_samples(samples):
    layer = make_layer(MIXED)
    bags = T([], dtype=torch.int64), torch.zeros(3 * samples + 1, dtype=torch.int64)
    assert torch.equal(layer(bags), torch.zeros(samples, 3, 5, dtype=torch.float64))


def test_combiners_in_a_group():
    layers = {"x": make_layer(MIXED, name="x"), "y": make_layer("max", slot_num=1, name="y")}
    group = EmbeddingGroup(layers)
    inputs = {"x": FORMS["values_offsets"](BAGS, None)[0], "y": (torch.arange(5), T([0, 5]))}
    out = group(inputs)
    for name, layer in layers.items():
        assert torch.equal(out[name], layer(inputs[name]))
    with pytest.raises(
        ValueError, match=r"features\['a'\] needs a combiner, since layer 'x' .*'max'"
    ):
        EmbeddingGroup(layers, {"a": "x", "y": "y"})
    features = {"a": Feature("x", "max"), "b": "y", "c": Feature("y", "mean")}
    group = EmbeddingGroup(layers, features, "concatenated")
    out = group(Keyed(["c", "b", "a"], torch.arange(6), T([0, 2, 3, 6])))
    vectors = layers["x"].eval()((torch.arange(3, 6), T([0, 1, 2, 3])))[0]
    assert torch.equal(out[0, :5], vectors.amax(0))
    assert out.shape == (1, 15)


def test_combiners_are_kept_short():
    assert make_layer(["sum"] * 3).combiner == "sum"
    assert make_layer(MIXED).combiner == tuple(MIXED)
    with pytest.raises(
        ValueError, match=r"layer: sample_weights must be None, as combiner is .'mean"
    ):
        make_layer(MIXED)((torch.arange(3), torch.arange(4)), torch.ones(3))
    with pytest.raises(ValueError, match=r"^layer: combiner\[1\] must be one of .*; got 'min'"):
        make_layer(["sum", "min", "sum"])
    with pytest.raises(ValueError, match=r"^layer: combiner must be .* slot_num=3, got \['sum'\]"):
        make_layer(["sum"])
    with pytest.raises(ValueError, match="layer: strategy='reduce_scatter' adds up"):
        make_layer(MIXED, strategy="reduce_scatter")


def test_a_tuple_has_a_setting_for_each_slot_too():
    layer = make_layer(tuple(MIXED), max_nnz=(2, 1, None))
    assert layer.combiner == tuple(MIXED)
    assert layer.max_nnz == (2, 1, None)


@pytest.mark.parametrize("truncate", [False, True])
def test_limits_of_slots_without_samples(truncate):
    layer = make_layer("sum", max_nnz=[2, 1, 3], truncate=truncate)
    assert layer((T([], dtype=torch.int64), T([0]))).shape == (0, 3, 5)


def test_a_bag_beyond_its_slots_limit_is_named_in_either_order():
    layer = make_layer("sum", max_nnz=[3, 1, 2])
    keys = torch.arange(8)
    with pytest.raises(ValueError, match=r"^layer: bag 4 has 3 keys, more than max_nnz\[1\]=1$"):
        layer((keys, T([0, 1, 2, 3, 4, 7, 8])))
    with pytest.raises(ValueError, match=r"^layer: bag 5 has 3 keys, more than max_nnz\[2\]=2$"):
        layer(Keyed(["a", "b", "c"], keys, T([0, 1, 2, 3, 4, 5, 8])))


def test_padding_is_not_found_among_keys_that_wrap_around_to_it():
    layer = make_layer("sum", slot_num=1, padding_key=2**32)
    keys = T([0, 1], dtype=torch.int32)
    assert torch.equal(layer((keys, T([0, 1, 2])))[:, 0], layer.vectors(keys))
    assert layer.table.keys().tolist() == [0, 1]
