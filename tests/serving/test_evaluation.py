"""A snapshot of float rows gives a layer's evaluation bit for bit, in every form of input."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import sparsekit
from sparsekit.nn import Constant, Normal, Uniform
from sparsekit.serving import Snapshot, UnknownKeyError, export_module

from . import numpy_reader

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
DIM = 21
POLICIES = {
    "initial, uniform": {"embedding_initializer": Uniform(-1, 2)},
    "initial, normal": {"embedding_initializer": Normal(0.1, 2.0)},
    "initial, constant": {"embedding_initializer": Constant(0.3)},
    "zeros": {"admission": sparsekit.MinCount(2), "before_admission": "zero"},
    "fallback": {"admission": sparsekit.MinCount(2), "before_admission": sparsekit.Fallback(5)},
}


class Jagged:
    """Stands in for torchrec's JaggedTensor and KeyedJaggedTensor."""

    def __init__(self, values, offsets, keys=None):
        self.values, self.offsets = lambda: values, lambda: offsets
        if keys is not None:
            self.keys = lambda: keys


def trained(policy, dtype=torch.float32, combiner="sum", **options):
    """Return a layer in which 300 of 400 keys have rows, which are not as they began."""
    options = {"seed": -3, "padding_key": -1, **POLICIES.get(policy, {}), **options}
    layer = sparsekit.DistributedEmbedding(
        combiner, 1000, DIM, slot_num=1, dtype=dtype, name="layer", **options
    )
    if layer.table is None:
        keys = torch.arange(1000)
    else:
        keys = all_keys()[:300]
        for _ in range(2):  # the second time they are admitted
            layer((keys, torch.tensor([0, 300])))
    layer.assign(keys, torch.randn(len(keys), DIM))
    return layer.eval()


def all_keys():
    """Return 400 keys: small ones, 0 among them, and large ones of both signs."""
    large = torch.randint(-(2**62), 2**62, (200,), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.arange(200), large])[torch.randperm(400, generator=generator(1))]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def forms(keys, offsets):
    """Return all forms of some bags of one slot; -1 is padding."""
    lengths = offsets.diff()
    width = int(lengths.max()) + 2
    padded = torch.full((len(lengths), 1, width), -1)
    place = [torch.randperm(width)[: int(n)].sort()[0] for n in lengths]
    for bag, at in enumerate(place):
        padded[bag, 0, at] = keys[offsets[bag] : offsets[bag + 1]]
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    column = torch.arange(len(keys)) - offsets[row]
    size = (len(lengths), width)
    return {
        "padded": padded,
        "values and offsets": (keys, offsets),
        "int32 offsets": (keys, offsets.int()),
        "COO": torch.sparse_coo_tensor(torch.stack([row, column]), keys, size),
        "CSR": torch.sparse_csr_tensor(offsets, column, keys, size),
        "nested": torch.nested.nested_tensor_from_jagged(keys, offsets),
        "JaggedTensor": Jagged(keys, offsets),
        "KeyedJaggedTensor": Jagged(keys, offsets, ["one"]),
    }


def bags_of(seed, most=30, long=True):
    """Return keys with and without rows, padding among them, and offsets; some bags are empty."""
    lengths = torch.randint(0, most, (40,), generator=generator(seed))
    lengths[[3, 39]] = 0
    if long:
        lengths[5], lengths[6] = 700, 256
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    return all_keys()[torch.randint(0, 400, (total,), generator=generator(seed + 1))], offsets


def equal(found, expected, dtype=torch.float32):
    found = torch.as_tensor(found).to(dtype)
    expected = expected.detach().reshape(found.shape)
    assert found.isfinite().all()
    return torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_form_combiner_and_miss_policy(tmp_path, policy, combiner, dtype):
    torch.manual_seed(0)
    layer = trained(policy, dtype, combiner)
    export_module(layer, tmp_path / "a.sks")
    keys, offsets = bags_of(3)
    weights = None if combiner == "max" else torch.rand(len(keys)) - 0.2
    with Snapshot(tmp_path / "a.sks") as snapshot:
        table = snapshot.tables["table"]
        assert (table.row_format, table.combiner) == (str(dtype)[6:], combiner)
        assert table.miss == policy.partition(",")[0]
        for name, form in forms(keys, offsets).items():
            assert equal(snapshot.lookup("table", form, combiner=combiner), layer(form), dtype), (
                name
            )
            if weights is not None and name != "padded":
                expected = layer(form, weights)
                found = snapshot.lookup("table", form, weights=weights)
                assert equal(found, expected, dtype), name
        assert equal(
            snapshot.lookup("table", keys.numpy(), offsets.numpy()), layer((keys, offsets)), dtype
        )
        vectors, found = snapshot.lookup("table", keys, found=True)
        if policy == "fallback":
            rows = layer.table.find(keys)
            shared = layer.table.find(layer.fallback.key_of(keys))
            expected = layer.weight[torch.where(rows < 0, shared, rows)]
        else:
            expected = layer.vectors(keys)
        assert equal(vectors, expected, dtype)
        assert torch.equal(torch.as_tensor(found), layer.table.find(keys) >= 0)
        assert 0 < found.sum() < len(found)


def test_feature_matrices(tmp_path):
    torch.manual_seed(0)
    layer = trained("initial, uniform", padding_key=None)
    export_module(layer, tmp_path / "a.sks")
    keys, offsets = bags_of(5)
    keys = keys.remainder(5000)
    bag = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
    matrix = torch.sparse_coo_tensor(torch.stack([bag, keys]), torch.rand(len(keys)), (40, 5000))
    matrix = matrix.coalesce().to_sparse_csr()
    with Snapshot(tmp_path / "a.sks") as snapshot:
        assert equal(snapshot.lookup("table", matrix), layer(matrix))
        scipy = pytest.importorskip("scipy.sparse")
        same = scipy.csr_array(
            (matrix.values().numpy(), matrix.col_indices().numpy(), matrix.crow_indices().numpy()),
            shape=(40, 5000),
        )
        assert equal(snapshot.lookup("table", same), layer(matrix))


def test_keyed_jagged_tensors_of_several_slots(tmp_path):
    torch.manual_seed(0)
    layer = sparsekit.DistributedEmbedding("mean", 1000, DIM, slot_num=4, name="slots", seed=2)
    keys, offsets = bags_of(7)  # 40 bags: 10 samples of 4 slots, slot by slot
    form = Jagged(keys, offsets, ["a", "b", "c", "d"])
    layer(form)
    layer.eval()
    export_module(layer, tmp_path / "a.sks")
    with Snapshot(tmp_path / "a.sks") as snapshot:
        assert snapshot.lookup("table", form).shape == layer(form).shape == (10, 4, DIM)
        assert equal(snapshot.lookup("table", form), layer(form))


def test_a_fixed_vocabulary_refuses_other_keys(tmp_path):
    torch.manual_seed(0)
    layer = trained("error", use_hashtable=False, padding_key=3)
    export_module(layer, tmp_path / "a.sks")
    keys = torch.randint(0, 1000, (500,))
    offsets = torch.tensor([0, 0, 7, 500])
    with Snapshot(tmp_path / "a.sks") as snapshot:
        assert snapshot.tables["table"].miss == "error"
        assert snapshot.tables["table"].rows == 1000
        for form in forms(keys, offsets).values():
            if not isinstance(form, torch.Tensor) or form.layout != torch.strided:
                assert equal(snapshot.lookup("table", form), layer(form))
        for key in (1000, -2):
            with pytest.raises(UnknownKeyError, match=f"has no key {key}"):
                snapshot.lookup("table", torch.tensor([5, key]))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_numpy_reader_gives_the_same_bits(tmp_path, policy, combiner):
    """The reader is made from docs/serving_format.md alone, so the page is right."""
    torch.manual_seed(0)
    keys, offsets = bags_of(9)
    keys, offsets = keys[: int(offsets[8])], offsets[:9].tolist()  # with the bags of 700 and 256
    for dtype in (torch.float32, torch.bfloat16):
        layer = trained(policy, dtype, combiner)
        export_module(layer, tmp_path / "a.sks")
        table = numpy_reader.Snapshot(tmp_path / "a.sks").tables["table"]
        for weights in (None,) if combiner == "max" else (None, torch.rand(len(keys))):
            parts = [slice(begin, end) for begin, end in pairwise(offsets)]
            found = np.stack(
                [
                    table.pooled(
                        keys[part].tolist(), combiner, None if weights is None else weights[part]
                    )
                    for part in parts
                ]
            )
            assert equal(found, layer((keys, torch.tensor(offsets)), weights), dtype)


@pytest.mark.parametrize("kind", ["bag", "one", "group"])
def test_other_layers(tmp_path, kind):
    torch.manual_seed(0)
    keys = all_keys()
    if kind == "bag":
        layer = sparsekit.EmbeddingBag(1000, DIM, mode="mean", name="bag")
        ask = {"input": keys.reshape(40, 10)}
    elif kind == "one":
        layer = sparsekit.Embedding(1000, DIM, name="one")
        ask = {"input": keys.reshape(40, 10)}
    else:
        layer = sparsekit.EmbeddingGroup(
            {"items": sparsekit.DistributedEmbedding("sum", 1000, DIM, 1, name="items")},
            features={"seen": "items", "bought": sparsekit.Feature("items", "max")},
        )
        bags = (keys, torch.arange(0, 401, 10))
        ask = {"inputs": {"seen": bags, "bought": bags}}
    layer(**ask)
    layer.eval()
    keys[::3] += 12345
    expected = layer(**ask)
    export_module(layer, tmp_path / "a.sks")
    with Snapshot(tmp_path / "a.sks") as snapshot:
        (name,) = snapshot.tables
        if kind == "group":
            for feature, combiner in (("seen", "sum"), ("bought", "max")):
                found = snapshot.lookup(name, *bags, combiner=combiner)
                assert equal(found, expected[feature])
        else:
            assert snapshot.tables[name].combiner == {"bag": "mean", "one": "none"}[kind]
            assert equal(snapshot.lookup(name, ask["input"]), expected)
