"""EmbeddingGroup checks its arguments, passes settings from layers to features, and prefetches."""

import copy
import pickle

import pytest
import torch

import sparsekit
from sparsekit import DistributedEmbedding, Embedding, EmbeddingBag, EmbeddingGroup, Feature
from sparsekit.lookup.slots import NO_LIMIT

from .keyed import Keyed

T = torch.tensor
BAGS = T([1, 2, 3, 4]), T([0, 1, 4])


def layer(name="a", combiner="sum", slots=1, **settings):
    return DistributedEmbedding(combiner, 9, 4, slots, name=name, **settings)


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ({}, ValueError, "layers must not be empty"),
        (
            {"a": layer(), "b": torch.nn.Embedding(3, 2)},
            TypeError,
            r"layers\['b'\] .*got Embedding",
        ),
        ({"a": layer("x"), "b": layer("x")}, ValueError, "two layers with name='x'"),
        ({"": layer()}, ValueError, "layers has a name that is none"),
    ],
)
def test_layers_that_are_refused(layers, error, message):
    with pytest.raises(error, match=f"^EmbeddingGroup: .*{message}"):
        EmbeddingGroup(layers)


def test_one_layer_may_have_two_names():
    shared = layer()
    group = EmbeddingGroup({"a": shared, "b": shared})
    out = group({"a": BAGS, "b": BAGS})
    assert torch.equal(out["a"], out["b"])


@pytest.mark.parametrize("features", [None, {"f": "a", "g": "a"}])
def test_names_of_inputs_and_weights(features):
    group = EmbeddingGroup(
        {"a": layer(), **({"b": layer("b")} if features is None else {})}, features
    )
    first, second = group.features
    what = "layers" if features is None else "features"
    for inputs, weights, error, message in [
        ({first: BAGS}, None, ValueError, f"inputs must have the {what} "),
        ({first: BAGS, second: BAGS, "x": BAGS}, None, ValueError, f"inputs must have the {what} "),
        (
            {first: BAGS, second: BAGS},
            {"x": 1},
            ValueError,
            f"sample_weights must be of the {what}",
        ),
        ([BAGS], None, TypeError, f"inputs must be a mapping with the names of {what}, got list"),
        (
            {first: BAGS, second: BAGS},
            [1],
            TypeError,
            "sample_weights must be a mapping .* got list",
        ),
    ]:
        with pytest.raises(error, match=f"^EmbeddingGroup: {message}"):
            group(inputs, weights)
    weights = T([2.0, 1.0, 1.0, 1.0])
    out = group({first: BAGS, second: BAGS}, {second: weights})
    vectors = group.layers[group.features[second].layer].vectors(T([1]))
    assert torch.equal(out[second].view(2, 4)[0], 2 * vectors[0])


def test_weights_of_one_input_go_to_no_layer_without_weights():
    group = EmbeddingGroup({"a": layer(), "b": Embedding(9, 4, name="b")})
    out = group({"a": BAGS, "b": T([5])}, {"a": torch.ones(4)})
    assert torch.equal(out["b"], group.layers["b"].vectors(T([5])))


def test_what_features_take_from_their_layer():
    made = layer(combiner="mean", max_nnz=3, truncate=True)
    group = EmbeddingGroup({"a": made}, {"a": "a", "b": Feature("a", "max", 1, False)})
    assert group.features == {
        "a": Feature("a", "mean", 3, True),
        "b": Feature("a", "max", 1, False),
    }
    group = EmbeddingGroup({"a": Embedding(9, 4)}, {"a": "a"})
    assert group.features == {"a": Feature("a", None, NO_LIMIT, False)}
    slots = layer(slots=2, combiner=["sum", "mean"], max_nnz=[1, 2], truncate=True)
    assert EmbeddingGroup({"a": slots}).features == {"a": Feature("a", "sum", NO_LIMIT, False)}
    with pytest.raises(ValueError, match=r"features\['f'\] needs a max_nnz, since layer 'a' has"):
        EmbeddingGroup({"a": slots}, {"f": Feature("a", "sum")})


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (Feature("a", "min"), r"features\['f'\]: combiner must be one of .* got 'min'"),
        (Feature("a", max_nnz=0), r"features\['f'\]: max_nnz must be in .* got 0"),
        (Feature("a", truncate=True), r"features\['f'\]: truncate=True needs a max_nnz"),
        (Feature("a", truncate=1), r"features\['f'\]: truncate must be True or False, got 1"),
    ],
)
def test_features_that_are_refused(feature, message):
    with pytest.raises((TypeError, ValueError), match=f"^EmbeddingGroup: {message}"):
        EmbeddingGroup({"a": layer()}, {"f": feature})


@pytest.mark.parametrize("padding", [None, 4])
def test_limits_of_features(padding):
    made = layer(max_nnz=2, padding_key=padding)
    short = EmbeddingGroup({"a": made}, {"f": Feature("a", truncate=True)})
    vectors = made.vectors(T([1, 2, 3]))
    assert torch.equal(short({"f": BAGS})["f"], torch.stack([vectors[0], vectors[1] + vectors[2]]))
    plain = EmbeddingGroup({"a": made}, {"f": "a"})
    for inputs in ({"f": BAGS}, Keyed(["f"], *BAGS)):
        with pytest.raises(ValueError, match=r"^a: feature 'f': bag 1 has 3 keys, more than max_n"):
            plain(inputs)
    jagged = EmbeddingGroup({"a": made}, {"f": Feature("a", None, 3)})({"f": BAGS})["f"]
    assert [len(bag) for bag in jagged.unbind()] == [1, 3]


def test_a_prefetched_batch_is_used_once():
    group = EmbeddingGroup({"a": layer()})
    inputs, other = {"a": BAGS}, {"a": (T([5, 6]), T([0, 1, 2]))}
    expected = group(inputs)["a"]
    group.prefetch(inputs)
    with pytest.raises(RuntimeError, match=r"^EmbeddingGroup: prefetch was called twice"):
        group.prefetch(inputs)
    for copied in (copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        copied(other)  # a copy has no batch
    with pytest.raises(
        ValueError, match=r"^EmbeddingGroup: inputs is not what prefetch was called"
    ):
        group(other)
    group.prefetch(inputs)
    assert torch.equal(group(inputs)["a"], expected)
    assert group(other)["a"].shape == (2, 1, 4)


def test_the_function_refuses_arguments_that_do_not_fit():
    call, one = sparsekit.group_embedding_lookup_sparse, layer()
    name = "group_embedding_lookup_sparse"
    for arguments, message in [
        (([], [], []), r"at least 1; got \[0, 0, 0, 0\]"),
        (([one], [BAGS, BAGS], ["sum"]), r"got \[1, 2, 1, 1\]"),
        (([one], [BAGS], []), r"got \[1, 1, 0, 1\]"),
        (([one], [BAGS], ["sum"], []), r"got \[1, 1, 1, 0\]"),
        (([one], [BAGS], ["min"]), r"combiners must be some of .*'max'\]; got 'min'"),
    ]:
        with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
            call(*arguments)
    assert len(one.table) == 0
    weights = T([2.0, 1.0, 1.0, 1.0])
    plain, weighted = (call([one], [BAGS], ["sum"], w)[0] for w in (None, [weights]))
    torch.testing.assert_close(weighted[0], 2 * plain[0])
    assert torch.equal(call([one], [BAGS], ["sum"], [None])[0], plain)
    assert plain.shape == (2, 4)


def test_a_single_feature_is_flat_in_one_output():
    group = EmbeddingGroup({"a": EmbeddingBag(9, 4, name="a")}, output="concatenated")
    assert group({"a": T([[1, 2], [3, 4]])}).shape == (2, 4)
    for combiner in ("sum", "max"):
        group = EmbeddingGroup({"a": layer(combiner=combiner)}, output="concatenated")
        assert group({"a": BAGS}).shape == (2, 4)


def test_maxima_of_a_keyed_tensor():
    made = layer()
    group = EmbeddingGroup({"a": made}, {"f": Feature("a", "max"), "g": Feature("a", "mean")})
    out = group(Keyed(["g", "f"], T([1, 2, 3, 4]), T([0, 2, 4])))
    vectors = made.vectors(T([1, 2, 3, 4]))
    assert torch.equal(out["f"][0], vectors[2:].amax(0))
    torch.testing.assert_close(out["g"][0], vectors[:2].mean(0))


@pytest.mark.parametrize("output", ["dict", "concatenated"])
def test_keyed_tensors_of_several_forms_take_turns(output):
    layers = {name: layer(name, key_dtype=torch.int32) for name in "ab"}
    group = EmbeddingGroup(layers, {"a": "a", "b": "b"}, output)
    keys = T([1, 2, 3, 4], dtype=torch.int32)
    for names, offsets in (("ab", [0, 2, 4]), ("ba", [0, 2, 4]), ("ab", [0, 1, 2, 3, 4])) * 2:
        keyed = Keyed(list(names), keys, T(offsets))
        out = group(keyed)
        if output == "concatenated":
            out = dict(zip("ab", out.split(4, 1), strict=True))
        for name in names:
            (values, own_offsets), _ = keyed.of(name)
            assert torch.equal(out[name], layers[name]((values, own_offsets))[:, 0])
    with pytest.raises(TypeError, match=r"^a: keys must be torch.int32, got torch.int64"):
        group(Keyed(["a", "b"], keys.long(), T([0, 2, 4])))
    with pytest.raises(ValueError, match=r"bags for each of its 2 features, got 3 bags"):
        group(Keyed(["a", "b"], keys, T([0, 2, 3, 4])))
    with pytest.raises(ValueError, match=r"bags for each of its 2 features, got 0 bags"):
        group(Keyed(["a", "b"], keys[:0], T([], dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"must have the feature .*; it has none$"):
        group(Keyed([], keys[:0], T([0])))


@pytest.mark.parametrize("output", ["dict", "concatenated"])
def test_errors_of_one_feature_in_a_dict(output):
    layers = {"a": layer("a"), "b": layer("b", key_dtype=torch.int32)}
    group = EmbeddingGroup(layers, {"a": "a", "b": "b"}, output)
    none = T([], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^b: feature 'b': offsets must start at 0, .* missing"):
        group({"a": BAGS, "b": (none, none)})
    with pytest.raises(TypeError, match=r"^b: keys must be torch.int32, got torch.int64"):
        group({"a": BAGS, "b": BAGS})
    assert len(layers["a"].table) == 0


def test_a_keyed_tensor_of_one_feature_without_offsets():
    group = EmbeddingGroup({"a": layer()}, {"f": "a"})
    with pytest.raises(ValueError, match=r"bags for each of its 1 features, got 0 bags"):
        group(Keyed(["f"], *[T([], dtype=torch.int64)] * 2))
