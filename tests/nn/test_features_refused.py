"""An EmbeddingGroup with features raises an error for invalid input and gives the reason."""

import sys
import types

import pytest
import torch

from sparsekit import DistributedEmbedding, EmbeddingGroup, Feature
from tests.nn.alike import assert_same
from tests.nn.keyed import FEATURES, KEYS, Keyed, layers, random_keyed


def bad(position, value):
    """Return a batch with one value changed, in the offsets or in the keys."""
    keyed = random_keyed(("a", "own", "rows", "shared_a", "shared_b"), 3, 1)
    where, at = position
    (keyed.offsets() if where == "offsets" else keyed.values())[at] = value
    return keyed


def long_bag(feature, most):
    keys = ("own", "rows", "shared_a", "shared_b")
    lengths = torch.ones(12, dtype=torch.int64)
    lengths[keys.index(feature) * 3 + 1] = most + 1
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Keyed(list(keys), torch.arange(offsets[-1]) % 40, offsets)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: bad(("offsets", 0), 1), r"EmbeddingGroup: offsets must start at 0, but .* is 1"),
        (lambda: bad(("offsets", 7), 0), r"EmbeddingGroup: offsets must not decrease, but off"),
        (lambda: bad(("offsets", 15), 999), r"EmbeddingGroup: offsets must end at len\(values\)"),
        (lambda: long_bag("own", 5), "own: feature 'own': bag 1 has 6 keys, more than max_nnz=5"),
        (
            lambda: long_bag("shared_b", 9),
            "shared: feature 'shared_b': bag 1 has 10 keys, more than max_nnz=9",
        ),
        (
            lambda: long_bag("shared_a", 5),
            "shared: feature 'shared_a': bag 1 has 6 keys, more than max_nnz=5",
        ),
        (
            lambda: bad(("values", 16), 60),
            "rows: feature 'rows': key 60 at position 16 is outside",
        ),
    ],
)
def test_a_bad_input_changes_nothing(make, error, mixed, device):
    group = EmbeddingGroup(layers(device), FEATURES)
    if mixed:
        group.layers["own"].double()
    before = {k: v.clone() for k, v in group.state_dict().items()}
    keyed = make()
    keyed = Keyed(keyed.keys(), keyed.values().to(device), keyed.offsets().to(device))
    with pytest.raises((ValueError, IndexError), match=error):
        group(keyed)
    assert_same(before, group.state_dict())


class Strided(Keyed):
    """Stand-in for a KeyedJaggedTensor whose features have different numbers of samples."""

    def variable_stride_per_key(self):
        return True

    def stride_per_key(self):
        return [2, 1]


def refused():
    made = layers("cpu")
    keyed = random_keyed(KEYS, 3, 0)
    group = EmbeddingGroup(made, FEATURES)
    some = random_keyed(KEYS[:4], 3, 0)
    fewer = random_keyed(("own", "rows", "shared_b"), 3, 0)
    twice = Keyed(["own", *KEYS], *random_keyed(("x", *KEYS), 3, 0).of("x")[0])
    uneven = Keyed(list(KEYS), keyed.values(), keyed.offsets()[:-1])
    strided = Strided(["own", "rows"], keyed.values(), keyed.offsets())
    make = EmbeddingGroup
    mixed = {**layers("cpu"), "rows": layers("cpu", dtype=torch.float64)["rows"]}
    two = {name: keyed.of(name)[0] for name in FEATURES}
    short = {**two, "rows": (torch.arange(1), torch.tensor([0, 1]))}
    slots = {**two, "rows": Keyed(["a", "b", "c"], *keyed.of("rows")[0])}
    narrow = DistributedEmbedding("sum", 9, 2, 1, 5, key_dtype=torch.int32, name="narrow")
    return {
        r"features must be a mapping, got list": lambda: make(made, ["own"]),
        r"no feature asks the layer\(s\) \['own', 'rows', 'shared'\]": lambda: make(made, {}),
        r"no feature asks the layer\(s\) \['rows'\]": lambda: make(
            made, {"a": "own", "b": "shared"}
        ),
        r"features\['a'\] must be a layer's name or a Feature, got int": lambda: make(
            made, {"a": 3}
        ),
        r"features\['a'\] asks the layer 'x'; there are \['rows', 'sh": lambda: make(
            made, {"a": "x"}
        ),
        r"features\['a'\]: combiner must be one of .* got 'min'": lambda: make(
            made, {"a": Feature("own", "min")}
        ),
        r"features\['a'\]: max_nnz must be .* got 0": lambda: make(
            made, {"a": Feature("own", max_nnz=0)}
        ),
        r"output must be one of dict, concatenated, keyed; got 'list'": lambda: make(
            made, FEATURES, "list"
        ),
        r"'concatenated' needs a combiner, but feature 'x' of layer 'own' has none": lambda: make(
            made, {**FEATURES, "x": Feature("own", None)}, "concatenated"
        ),
        r"'concatenated' needs one dtype, but feature 'rows' of layer 'rows' has torch.float64": (
            lambda: make(mixed, FEATURES, "concatenated")
        ),
        r"output='concatenated' needs features, since layer 'own' has slot_num=2": lambda: make(
            made, output="concatenated"
        ),
        r"a KeyedJaggedTensor needs features, since layer 'own' has slot_num=2": lambda: make(made)(
            keyed
        ),
        r"must have the feature 'shared_a', which asks shared and 'rows', which asks rows; it has "
        r"\['unused', .*no feature asks for \['unused', 'middle'\]": lambda: group(some),
        r"asks shared; it has \['own', 'rows', 'shared_b'\]$": lambda: group(fewer),
        r"must not have a feature twice, got \['own'\] again in \['own', 'unused'": lambda: group(
            twice
        ),
        r"as many bags for each of its 7 features, got 20 bags": lambda: group(uneven),
        r"EmbeddingGroup: inputs has a stride of its own for each key": lambda: group(strided),
        r"EmbeddingGroup: sample_weights must be a 1-D tensor or None; got dict": lambda: group(
            keyed, {"own": 1}
        ),
        r"must have the features \['shared_a', 'own', 'rows', 'shared_b'\], got \['own'\]": (
            lambda: group({"own": 1})
        ),
        r"rows: feature 'rows': inputs must be .* got int": lambda: group({**two, "rows": 1}),
        r"rows: feature 'rows': inputs has 3 slots, but a feature has one": lambda: group(slots),
        r"rows: feature 'rows': inputs has 1 samples, but shared: feature 'shared_a' has 3": (
            lambda: make(made, FEATURES, "concatenated")(short)
        ),
        r"rows: feature 'rows': offsets must start at 0, but offsets\[0\] is missing": (
            lambda: group({**two, "rows": (torch.arange(0), torch.arange(0))})
        ),
        r"narrow: keys must be torch.int32, got torch.int64": lambda: make(
            {"n": narrow}, {"own": "n"}
        )(keyed),
    }


@pytest.mark.parametrize("message", refused())
def test_what_is_refused(message):
    with pytest.raises((TypeError, ValueError), match=message):
        refused()[message]()


@pytest.mark.parametrize("found", [None, types.ModuleType("torchrec.sparse.jagged_tensor")])
def test_keyed_tensors_need_torchrec(monkeypatch, found):
    for name in ("torchrec", "torchrec.sparse"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    # None makes the import fail; an empty module lacks the class, as another version may.
    monkeypatch.setitem(sys.modules, "torchrec.sparse.jagged_tensor", found)
    with pytest.raises(ImportError, match="output='keyed' makes a KeyedTensor of torchrec"):
        EmbeddingGroup(layers("cpu"), FEATURES, "keyed")
