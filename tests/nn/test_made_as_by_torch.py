"""torch's default seed, dtype and device affect our layers as they affect nn.Embedding."""

import copy

import pytest
import torch
from conftest import same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import sparsekit
from sparsekit import optim
from sparsekit.nn import EmbeddingWeight

KEYS = torch.tensor([3, -1, 10**15])
ROWS = torch.tensor([3, 1, 2])


def bags(**settings):
    return sparsekit.DistributedEmbedding("sum", 9, 4, 1, 2, **settings)


def dense(**settings):
    return sparsekit.All2AllDenseEmbedding(9, 4, 1, 1, True, **settings)


def embedding(**settings):
    return sparsekit.Embedding(9, 4, **settings)


def embedding_bag(**settings):
    return sparsekit.EmbeddingBag(9, 4, **settings)


each_layer = pytest.mark.parametrize("make", [bags, dense, embedding, embedding_bag])
each_form = pytest.mark.parametrize("use_hashtable", [True, False])


def state_of(layer):
    """Return all state that determines a layer's behaviour, except the seed of its hash."""
    pieces = list(layer.items())
    start = [] if layer.table is None else [layer.vectors(KEYS)]
    return [*(tensor for piece in pieces for tensor in piece), layer.seed, layer.shard, *start]


def same(one, other):
    states = state_of(one), state_of(other)
    return len(states[0]) == len(states[1]) and all(map(same_bits, *states))


@each_layer
@each_form
def test_manual_seed_decides_unnamed_layers(make, use_hashtable):
    torch.manual_seed(1)
    one, other, linear = make(use_hashtable=use_hashtable), make(), torch.nn.Linear(2, 2)
    assert not torch.equal(one.seed, other.seed)
    torch.manual_seed(1)
    again = make(use_hashtable=use_hashtable)
    assert same(one, again)
    # A layer with a given name or seed draws no random number.
    named = make(name="n")
    assert torch.equal(make(seed=5).seed, torch.tensor([5]))
    assert same(other, make())
    assert torch.equal(torch.nn.Linear(2, 2).weight, linear.weight)
    torch.manual_seed(2)
    assert same(named, make(name="n"))
    assert not same(one, make(use_hashtable=use_hashtable))


def test_manual_seed_whatever_torch_is_told_besides():
    torch.manual_seed(1)
    expected = embedding()
    torch.manual_seed(1)
    with torch.inference_mode():
        assert same(embedding(), expected)
    torch.manual_seed(1)
    with torch.device("meta"):
        assert same(embedding(device="cpu"), expected)
    with FakeTensorMode():
        assert embedding(use_hashtable=False).weight.shape == (9, 4)


@each_layer
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_dtype(make, dtype):
    try:
        torch.set_default_dtype(dtype)
        layer = make()
        assert make(dtype=torch.float32).weight.dtype == torch.float32
        torch.set_default_dtype(torch.float16)
        with pytest.raises(ValueError, match=r"n: dtype must be one of .* got torch.float16"):
            make(name="n")
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.weight.dtype == dtype
    assert layer.vectors(KEYS).dtype == dtype


def train(layer, keys):
    optimizer = optim.LazyAdam(layer.parameters())
    layer(keys).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_default_device():
    """Layers with an explicit device, and the tensors that they make, ignore the default device."""
    kept, there = embedding(name="n"), torch.device("meta")
    train(kept, KEYS)
    kept.vectors(KEYS)
    with there:
        assert {tensor.device for tensor in embedding().state_dict().values()} == {there}
        layer = embedding(name="n", device="cpu")
        optimizer = train(layer, KEYS)
        assert same(layer, kept)
        model = torch.nn.Sequential(torch.nn.Embedding(5, 2, device="cpu"))
        sparsekit.replace_embeddings(model, verbose=False)
        train(model, KEYS % 5)
        pooled = embedding_bag(device="cpu", mode="max")
        group = sparsekit.EmbeddingGroup({"a": layer, "b": bags(device="cpu")})
        pooled(KEYS.view(1, 3)).sum().backward()
        slots = sparsekit.DistributedEmbedding(
            ["sum", "max"], 9, 4, slot_num=2, max_nnz=[1, None], truncate=True, device="cpu"
        )
        slots(KEYS.repeat(4).view(2, 2, 3)).sum().backward()
        group({"a": KEYS, "b": KEYS.view(3, 1, 1)})["b"].sum().backward()
        optim.LazyAdam(layer.parameters()).load_state_dict(optimizer.state_dict())
        layer.reset_parameters()
        layer.assign(KEYS, torch.ones(3, 4, device="cpu"))
        copy.deepcopy(layer).load_state_dict(layer.state_dict(), assign=True)


@each_layer
@each_form
def test_meta(make, use_hashtable):
    settings = {"name": "n", "use_hashtable": use_hashtable}
    layer = make(device="meta", **settings)
    layer.weight.requires_grad_(False)
    assert "capacity=9, dim=4" in repr(layer)
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}
    same_place = torch.zeros(3, dtype=torch.int64, device="meta")
    for use in (
        lambda: layer.vectors(same_place),
        lambda: layer.assign(same_place, torch.zeros(3, 4, device="meta")),
        lambda: layer.items(),
        lambda: sparsekit.EmbeddingGroup({"a": layer})({"a": same_place.view(3, 1, 1)}),
    ):
        with pytest.raises(RuntimeError, match=r"n: the layer is on meta.* to_empty"):
            use()
    layer.reset_parameters()
    assert layer.to_empty(device="cpu") is layer
    assert isinstance(layer.weight, EmbeddingWeight)
    assert not layer.weight.requires_grad
    layer.weight.requires_grad_(True)
    assert same(layer, make(**settings))
    trained, twin = layer, make(**settings)
    for one in (trained, twin):
        one.assign(ROWS, torch.ones(3, 4))
        with torch.no_grad():
            one.weight[2] += 1
    assert same(trained, twin)
    # A move to meta and back loses all rows.
    assert same(trained.to("meta").to_empty(device="cpu"), make(**settings))


@each_form
def test_states_of_layers_on_meta(use_hashtable):
    settings = {"use_hashtable": use_hashtable}
    saved = embedding(name="saved", **settings)
    saved.assign(ROWS, torch.ones(3, 4))
    layer = embedding(device="meta", name="n", **settings)
    with pytest.raises(RuntimeError, match=r"n: the module is on meta.* assign=True"):
        layer.load_state_dict(saved.state_dict())
    layer.load_state_dict(saved.state_dict(), assign=True)
    assert same(layer, saved)
    # A state on meta contains no values to load.
    on_meta = embedding(device="meta", **settings).state_dict()
    with pytest.raises(RuntimeError, match=r"dense tensor on cpu or cuda, got .* on meta"):
        layer.load_state_dict(on_meta)
    assert same(layer, saved)
    train(layer, ROWS)


def test_a_model_begun_on_meta():
    """A model made on meta is right after to_empty and reset_parameters, as under FSDP."""
    with torch.device("meta"):
        model = torch.nn.Sequential(embedding(name="n"), torch.nn.Linear(4, 1))
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert same(model[0], embedding(name="n"))
    train(model, KEYS)
    assert len(model[0].table) == 3


@each_layer
def test_skip_init(make):
    layers = {"embedding": sparsekit.Embedding, "embedding_bag": sparsekit.EmbeddingBag}
    if make.__name__ in layers:
        layer = torch.nn.utils.skip_init(layers[make.__name__], 9, 4, name="n")
    elif make is dense:
        layer = torch.nn.utils.skip_init(
            sparsekit.All2AllDenseEmbedding, 9, 4, 1, 1, True, name="n"
        )
    else:
        layer = torch.nn.utils.skip_init(
            sparsekit.DistributedEmbedding, "sum", 9, 4, 1, 2, name="n"
        )
    assert same(layer, make(name="n"))


def test_a_hash_table_begun_on_meta():
    table = sparsekit.HashTable(9, device="meta")
    assert "size=?" in repr(table)
    with pytest.raises(RuntimeError, match="HashTable: the module is on meta"):
        table.load_state_dict(sparsekit.HashTable(9).state_dict())
    table.to_empty(device="cpu")
    assert table.find_or_insert(KEYS).tolist() == [0, 1, 2]
    table.clear_()
    assert len(table) == 0
    assert table.find(KEYS).tolist() == [-1] * 3


@each_form
def test_reset_parameters(use_hashtable):
    settings = {"use_hashtable": use_hashtable}
    named, unnamed = embedding(name="n", **settings), embedding(**settings)
    for layer in (named, unnamed):
        optimizer = optim.Adam(layer.parameters(), lr=0.1, mode="catch_up")
        for ids in (ROWS, ROWS[:1], ROWS[:1]):
            layer(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        # Steps that rows had missed before the reset do not reach the new rows.
        seed = int(layer.seed)
        layer.reset_parameters()
        assert (int(layer.seed) == seed) == (layer is named)
        fresh = embedding(seed=int(layer.seed), **settings)
        assert same(layer, fresh)
        assert same_bits(layer(ROWS), fresh(ROWS))
        assert layer.weight.requires_grad
    torch.manual_seed(3)
    unnamed.reset_parameters()
    torch.manual_seed(3)
    assert same(unnamed, embedding(**settings))


def test_reset_forgets_that_the_weight_was_moved():
    """A step that moves free rows hides manual writes to them; after a reset, these raise again."""
    layer = embedding()
    optimizer = optim.LazyAdam(layer.parameters())
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    layer(KEYS)
    layer.reset_parameters()
    torch.nn.init.ones_(layer.weight)
    for training in (True, False):
        with pytest.raises(RuntimeError, match="weight was written to"):
            layer.train(training)(KEYS)
