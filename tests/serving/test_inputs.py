"""A snapshot in float rows gives the bits of the layer's evaluation, for every form of input."""

import numpy as np
import pytest
import torch
from conftest import same_bits

import sparsekit
from sparsekit.tables.initializers import Normal

from . import made

PADDING = -1
SLOTS = 2
FORMS = ("values and offsets", "int32", "padded", "COO", "CSR", "nested", "jagged", "keyed")
LENGTHS = torch.tensor([2, 1, 0, 3, 0, 0, 5, 4, 1, 1, 0, 2])
OFFSETS = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
N = int(OFFSETS[-1])


class Jagged:
    """A JaggedTensor, or with names of keys a KeyedJaggedTensor."""

    def __init__(self, values, offsets, keys=None, weights=None):
        self.values, self.offsets = lambda: values, lambda: offsets
        self.weights_or_none = lambda: weights
        if keys is not None:
            self.keys = lambda: keys


def trained(combiner="sum", dtype=torch.float32, dim=12, **options):
    layer = sparsekit.DistributedEmbedding(
        combiner, 1000, dim, SLOTS, name="films", dtype=dtype, padding_key=PADDING, **options
    )
    layer((torch.arange(0, 80, 2), torch.arange(0, 42, 2)))
    with torch.no_grad():
        layer.weight[:40].normal_(generator=torch.Generator().manual_seed(3))
    return layer.eval()


def table_of(layer, combiner, **options):
    """Return what a snapshot has of a layer."""
    keys, vectors = map(torch.cat, zip(*((i.keys, i.vectors) for i in layer.items()), strict=True))
    return made.Table(
        keys.numpy(),
        vectors.detach().float().numpy(),
        name="films",
        row_format=str(layer.weight.dtype).removeprefix("torch."),
        padding_key=PADDING,
        combiner=combiner,
        **options,
    )


def keys_of(seed=0):
    keys = torch.randint(0, 100, (N,), generator=torch.Generator().manual_seed(seed))
    keys[3] = PADDING
    return keys


def forms(keys, weights):
    """Return pairs of keys and weights, of the same bags in every form."""
    columns = torch.cat([torch.arange(int(n)) for n in LENGTHS])
    bag = torch.repeat_interleave(torch.arange(len(LENGTHS)), LENGTHS)
    shape = (len(LENGTHS), int(LENGTHS.max()))
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    # Keep the order within each bag, as a bag's keys are added in their order.
    order = order[bag[order].argsort(stable=True)].sort()[0]
    padded = torch.full(shape, PADDING)
    padded[bag, columns] = keys
    padded_weights = torch.zeros(shape)
    padded_weights[bag, columns] = weights
    batch = len(LENGTHS) // SLOTS
    by_slot = torch.cat([torch.arange(len(LENGTHS))[slot::SLOTS] for slot in range(SLOTS)])
    entries = torch.cat([torch.arange(OFFSETS[b], OFFSETS[b + 1]) for b in by_slot])
    slot_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS[by_slot].cumsum(0)])
    coo = torch.sparse_coo_tensor(
        torch.stack([bag, columns])[:, order], keys[order], shape, check_invariants=True
    )
    nested = torch.nested.nested_tensor_from_jagged
    csr = torch.sparse_csr_tensor(OFFSETS, columns, keys, shape, check_invariants=True)
    return {
        "values and offsets": ((keys, OFFSETS), weights),
        "int32": ((keys.int(), OFFSETS.int()), weights.double()),
        "padded": (padded.view(batch, SLOTS, -1), padded_weights.view(batch, SLOTS, -1)),
        "COO": (coo, weights[order]),
        "CSR": (csr, weights),
        "nested": (nested(keys, OFFSETS), nested(weights, OFFSETS)),
        "jagged": (Jagged(keys, OFFSETS, weights=weights), None),
        "keyed": (Jagged(keys[entries], slot_offsets, ["a", "b"], weights[entries]), None),
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_forms(opened, combiner, dtype, form):
    """Keys without a row have initial vectors, which are of a normal distribution here."""
    layer = trained(combiner, dtype, embedding_initializer=Normal(0.1, 2.0), seed=5)
    options = {"distribution": "normal", "a": 0.1, "b": 2.0, "initial_seed": 5}
    snapshot = opened([table_of(layer, combiner, **options)], verify=True)
    weights = torch.rand(N, generator=torch.Generator().manual_seed(2))
    all_forms = forms(keys_of(), weights)
    assert tuple(all_forms) == FORMS
    keys, of_keys = all_forms[form]
    expected = layer(keys, of_keys)
    got = snapshot.lookup("films", keys, weights=of_keys)
    assert isinstance(got, torch.Tensor)
    assert same_bits(got.to(dtype).view(expected.shape), expected)
    if form in ("padded", "keyed"):
        assert got.shape == expected.shape
    else:
        assert got.shape == (len(LENGTHS), 12)
        if form != "jagged":  # it has weights
            assert snapshot.lookup("films", keys, combiner="none").shape == (N, 12)


@pytest.mark.parametrize("kind", ["scipy", "torch"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_feature_matrices(opened, kind):
    sparse = pytest.importorskip("scipy.sparse")
    layer = trained()
    snapshot = opened([table_of(layer, "sum", miss="zeros")])
    matrix = sparse.random_array((6, 80), density=0.2, format="csr", dtype=np.float32, rng=1)
    matrix.indices = (matrix.indices // 2 * 2).astype(matrix.indices.dtype)
    as_tensor = torch.sparse_csr_tensor(
        *(torch.tensor(part) for part in (matrix.indptr, matrix.indices, matrix.data)), (6, 80)
    )
    given = matrix if kind == "scipy" else as_tensor
    expected = layer(as_tensor).view(6, 12)
    got = snapshot.lookup("films", given)
    assert isinstance(got, np.ndarray) == (kind == "scipy")
    assert same_bits(torch.as_tensor(got), expected)
    with pytest.raises(ValueError, match="weights of its own"):
        snapshot.lookup("films", given, weights=np.ones(matrix.nnz, np.float32))


def test_max(opened):
    layer = trained("max")
    keys = (keys_of() % 40 * 2, OFFSETS)
    expected = layer(keys)
    got = opened([table_of(layer, "max", miss="zeros")]).lookup("films", keys)
    assert same_bits(got.view(expected.shape), expected)


def test_longer_bags_than_runs(opened):
    layer = trained("mean", dim=70)
    keys = torch.randint(0, 40, (3000,), generator=torch.Generator().manual_seed(1)) * 2
    offsets = torch.tensor([0, 256, 600, 3000, 3000])
    weights = torch.rand(3000, generator=torch.Generator().manual_seed(2))
    snapshot = opened([table_of(layer, "mean")])
    for of_keys in (None, weights):
        expected = layer((keys, offsets), of_keys).view(4, 70)
        assert same_bits(snapshot.lookup("films", keys, offsets, of_keys), expected)


def test_arrays_and_tensors_give_the_same(opened):
    layer = trained()
    snapshot = opened([table_of(layer, "sum")])
    keys, weights = keys_of(), torch.rand(N, requires_grad=True)
    got, found = snapshot.lookup("films", keys, OFFSETS, weights, found=True)
    array, found_array = snapshot.lookup(
        "films", keys.numpy(), OFFSETS.numpy(), weights.detach().numpy(), found=True
    )
    assert not got.requires_grad
    assert np.array_equal(got.numpy(), array)
    assert np.array_equal(found.numpy(), found_array)
    assert found.dtype == torch.bool
    wide = keys[: N - N % 3].view(3, -1)
    strided = wide.T.contiguous().T
    assert not strided.is_contiguous()
    assert same_bits(snapshot.lookup("films", strided), snapshot.lookup("films", wide))
    assert snapshot.lookup("films", wide).shape == (3, 12)
    assert snapshot.lookup("films", wide, combiner="none").shape == (*wide.shape, 12)
    assert snapshot.lookup("films", keys).shape == (N, 12)
    assert snapshot.lookup("films", wide, found=True)[1].shape == wide.shape
    half = weights.detach().bfloat16()
    got = snapshot.lookup("films", keys, OFFSETS, half)
    assert same_bits(got, snapshot.lookup("films", keys, OFFSETS, half.float()))


def test_wrong_tensors(opened):
    snapshot = opened([table_of(trained(), "sum")])
    with pytest.raises(ValueError, match="keys must be on the CPU, but is on meta"):
        snapshot.lookup("films", torch.empty(3, dtype=torch.int64, device="meta"))
    with pytest.raises(TypeError, match="must be int64 or int32, got float32"):
        snapshot.lookup("films", torch.rand(3))
    with pytest.raises(ValueError, match="2 keys of the KeyedJaggedTensor, got 1"):
        snapshot.lookup("films", Jagged(torch.tensor([1]), torch.tensor([0, 1]), ["a", "b"]))
    with pytest.raises(TypeError, match="keys must be a NumPy array"):
        snapshot.lookup("films", {"a": 1})
