"""An EmbeddingGroup has the outputs, gradients, states and errors of its separate layers."""

import copy
import random

import pytest
import torch
from conftest import generator

import sparsekit
from sparsekit import optim
from sparsekit.nn import Constant, Normal
from tests.nn.alike import assert_same, check_step, state_of, upstream
from tests.optim.cases import OPTIMIZERS

BATCH = 6
KEYS = torch.tensor([[[1, 2]]])


def layers():
    """Return layers of all kinds; the float64 layers need a second call of the ops."""
    bags, vectors = sparsekit.DistributedEmbedding, sparsekit.All2AllDenseEmbedding
    wide = {"dtype": torch.float64}
    made = {
        "sum": bags("sum", 80, 16, 1, 5, name="sum"),
        "mean": bags("mean", 80, 3, 2, 4, name="mean", embedding_initializer=Normal(0, 1)),
        "sqrtn": bags("sqrtn", 80, 8, 1, 5, name="sqrtn", padding_key=7),
        "rows": bags("sum", 50, 4, 1, 5, use_hashtable=False, name="rows"),
        "float64": bags("mean", 80, 20, 1, 5, name="float64", **wide),
        "vectors": vectors(80, 16, 2, 3, name="vectors", **wide),
        "any": vectors(80, 5, 1, 1, dynamic_input=True, name="any", padding_key=7),
    }
    return torch.nn.ModuleDict(made)


def batch(seed, device):
    """Return bags of 0 to 4 keys, all empty for every third seed, and weights for two layers."""
    draw = random.Random(seed)

    def keys(n):
        return torch.tensor([draw.randrange(40) for _ in range(n)], dtype=torch.int64).to(device)

    def bags(count):
        lengths = [draw.randrange(5) * (seed % 3 > 0) for _ in range(count)]
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(device)
        return keys(sum(lengths)), offsets

    inputs = {name: bags(BATCH) for name in ("sum", "sqrtn", "rows", "float64")}
    inputs["mean"] = bags(2 * BATCH)
    inputs["vectors"], inputs["any"] = keys(BATCH * 6).view(BATCH, 2, 3), keys(seed % 4)
    weights = {
        name: torch.rand(len(inputs[name][0]), generator=generator(seed)).to(device) + 0.5
        for name in ("mean", "float64")
    }
    return inputs, weights


def call(layers, inputs, weights, group=None):
    """Return the outputs of all layers by name."""
    if group is not None:
        return group({name: inputs[name] for name in layers}, weights)
    return {
        name: layer(inputs[name], *([weights[name]] if name in weights else []))
        for name, layer in layers.items()
    }


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_the_layers(name, fused, device):
    apart = layers().to(device)
    together = copy.deepcopy(apart)
    group = sparsekit.EmbeddingGroup(together)
    kind, settings = OPTIMIZERS[name]
    optimizers = [kind(model.parameters(), **settings) for model in (apart, together)]
    if fused:
        handles = [
            optim.fuse_in_backward(optimizer, model)
            for optimizer, model in zip(optimizers, (apart, group), strict=True)
        ]
        assert len(handles) == 2
    for seed in range(7):
        inputs, weights = batch(seed, device)
        for training in [True] if seed % 2 else [True, False]:
            apart.train(training)
            group.train(training)
            given = [{k: w.clone().requires_grad_() for k, w in weights.items()} for _ in "ab"]
            one = call(apart, inputs, given[0] if training else weights)
            other = call(together, inputs, given[1] if training else weights, group)
            assert_same(one, other)
        if seed % 2 == 0:
            continue  # the last call was in evaluation mode
        torch.autograd.backward(list(one.values()), upstream(one.values(), seed))
        torch.autograd.backward(list(other.values()), upstream(other.values(), seed))
        for k in weights:
            assert torch.equal(given[0][k].grad, given[1][k].grad)
        if not fused:
            grads = [
                {n: p.grad.to_dense() for n, p in model.named_parameters()}
                for model in (apart, together)
            ]
            assert_same(*grads)
            assert all(p.grad.is_coalesced() for p in together.parameters())
        check_step(apart, together, optimizers)


def test_gradients_in_evaluation(device):
    apart = layers().to(device)
    together = copy.deepcopy(apart)
    group = sparsekit.EmbeddingGroup(together)
    inputs, weights = batch(1, device)
    call(apart, inputs, weights)
    call(together, inputs, weights, group)
    apart.eval()
    group.eval()
    inputs, weights = batch(4, device)  # some keys are new
    one, other = call(apart, inputs, weights), call(together, inputs, weights, group)
    assert_same(one, other)
    torch.autograd.backward(list(other.values()), upstream(other.values(), 0))
    for name, layer in apart.items():
        twin = together[name]
        (grad,) = upstream([one[name]], list(apart).index(name))
        expected = expected_gradient(layer, inputs[name], weights.get(name), grad)
        torch.testing.assert_close(twin.weight.grad.to_dense(), expected)
        assert twin.weight.grad.is_coalesced()


def expected_gradient(layer, inputs, weights, grad):
    """Compute the gradient of a layer's rows with torch."""
    weight = layer.weight.detach().clone().requires_grad_()
    keys = inputs[0] if isinstance(inputs, tuple) else inputs.reshape(-1)
    rows = layer.table.find(keys) if layer.table else keys
    known = (rows >= 0) if layer.padding_key is None else (rows >= 0) & (keys != layer.padding_key)
    vectors = weight[rows.clamp(min=0)] * known.unsqueeze(1)
    if isinstance(inputs, tuple):
        counted = keys != layer.padding_key
        bags = torch.repeat_interleave(inputs[1].diff())
        w = torch.ones_like(keys, dtype=weight.dtype) if weights is None else weights.to(weight)
        w = w * counted
        count = len(inputs[1]) - 1
        pooled = weight.new_zeros(count, weight.shape[1]).index_add(0, bags, vectors * w[:, None])
        power = {"sum": 0, "mean": 1, "sqrtn": 2}[layer.combiner]
        total = weight.new_zeros(count).index_add(0, bags, w**power)
        if power:
            total = total.clamp(min=1e-30) if power == 1 else total.clamp(min=1e-30).sqrt()
            pooled = pooled / total[:, None]
        vectors = pooled
    vectors.backward(grad.reshape(vectors.shape))
    return weight.grad


def test_an_output_that_nobody_uses_sends_no_gradient(device):
    together = layers().to(device)
    group = sparsekit.EmbeddingGroup(together)
    inputs, weights = batch(1, device)
    out = call(together, inputs, weights, group)
    (out["sum"].sum() + out["vectors"].sum()).backward()
    with_gradient = {name for name, layer in together.items() if layer.weight.grad is not None}
    assert with_gradient == {"sum", "vectors"}


def test_a_frozen_layer_gets_no_gradient(device):
    together = layers().to(device)
    together["sum"].weight.requires_grad_(False)
    group = sparsekit.EmbeddingGroup(together)
    inputs, weights = batch(1, device)
    out = call(together, inputs, weights, group)
    sum(o.double().sum() for o in out.values()).backward()
    assert together["sum"].weight.grad is None
    assert all(layer.weight.grad is not None for name, layer in together.items() if name != "sum")


def test_layers_of_which_some_are_in_evaluation(device):
    apart = layers().to(device)
    apart["sum"].eval()
    together = copy.deepcopy(apart)
    inputs, weights = batch(1, device)
    group = sparsekit.EmbeddingGroup(together)
    assert_same(call(apart, inputs, weights), call(together, inputs, weights, group))
    assert len(together["sum"].table) == 0 < len(together["sqrtn"].table)
    assert_same(state_of(apart), state_of(together))


def test_a_table_asked_twice(device):
    """Features that share a table act like one call with the keys of all features in order."""
    shared = sparsekit.DistributedEmbedding("sum", 80, 4, 1, 90, name="shared").to(device)
    other = sparsekit.DistributedEmbedding("sum", 80, 4, 1, 5, name="other").to(device)
    twin = copy.deepcopy(shared)
    first, second = batch(1, device)[0]["sum"], batch(2, device)[0]["sum"]
    params, ids = [shared, other, shared], [first, first, second]
    outs = sparsekit.group_embedding_lookup_sparse(params, ids, ["sum", "sum", "mean"])
    keys = torch.cat([first[0], second[0]])
    twin((keys, torch.tensor([0, len(keys)], device=device)))
    assert torch.equal(twin.table.keys(), shared.table.keys())
    for bags, combiner, out in ((first, "sum", outs[0]), (second, "mean", outs[2])):
        (expected,) = sparsekit.group_embedding_lookup_sparse([twin], [bags], [combiner])
        assert torch.equal(out, expected)
        expected.sum().backward()
    (outs[0].sum() + outs[2].sum()).backward()
    torch.testing.assert_close(shared.weight.grad.to_dense(), twin.weight.grad.to_dense())
    assert shared.weight.grad.is_coalesced()
    assert other.weight.grad is None


def test_a_full_table_is_named_and_left_as_it_was(device):
    full = sparsekit.DistributedEmbedding("sum", 3, 4, 1, 1, name="full").to(device)
    roomy = sparsekit.DistributedEmbedding("sum", 5, 4, 1, 1, name="roomy").to(device)
    group = sparsekit.EmbeddingGroup({"roomy": roomy, "full": full})
    keys = torch.arange(5, device=device).view(5, 1, 1)
    full(keys[:2])
    before = full.weight.detach().clone()
    with pytest.raises(sparsekit.TableFullError) as raised:
        group({"full": keys, "roomy": keys})
    error = raised.value
    assert (error.layer, error.size, error.capacity, error.refused) == ("full", 2, 3, 3)
    assert full.table.keys().tolist() == [0, 1]
    assert torch.equal(full.weight, before)
    # Tables with enough capacity keep the new keys, with their initial vectors.
    twin = sparsekit.DistributedEmbedding("sum", 80, 4, 1, 1, name="roomy").to(device)
    expected = twin(keys)
    assert roomy.table.keys().tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(roomy(keys), expected)


@pytest.mark.parametrize(
    ("name", "bad", "error"),
    [
        ("rows", (torch.tensor([1, 60]), torch.tensor([0, 2])), "rows: key 60 at position 1"),
        ("float64", (torch.tensor([1, 6]), torch.tensor([0, 3])), "float64: offsets must end at"),
        ("mean", (torch.tensor([1, 6]), torch.tensor([0, 2, 1])), "mean: offsets must not decr"),
        ("sum", (torch.arange(6), torch.tensor([0, 6])), "sum: bag 0 has 6 keys, more than max_n"),
        ("sqrtn", (torch.arange(2), torch.tensor([1, 2])), r"sqrtn: offsets must start at 0"),
    ],
)
def test_a_bad_input_changes_nothing(name, bad, error, device):
    together = layers().to(device)
    group = sparsekit.EmbeddingGroup(together)
    inputs, weights = batch(1, device)
    del weights["mean"], weights["float64"]
    before = {k: v.clone() for k, v in group.state_dict().items()}
    inputs[name] = tuple(part.to(device) for part in bad)
    with pytest.raises((ValueError, IndexError), match=error):
        call(together, inputs, weights, group)
    assert_same(before, group.state_dict())


def test_many_tables_of_few_keys(device):
    """A group may have 70 tables, more than a 64-bit mask has bits."""
    number = 70
    apart = torch.nn.ModuleDict(
        {
            f"t{t}": sparsekit.DistributedEmbedding(
                "sum", 10, 1 + t % 9, 1, 2, name=f"t{t}", embedding_initializer=Constant(t)
            )
            for t in range(number)
        }
    ).to(device)
    together = copy.deepcopy(apart)
    group = sparsekit.EmbeddingGroup(together)
    inputs = {
        name: torch.randint(9, (3, 1, 2), generator=generator(t)).to(device)
        for t, name in enumerate(apart)
    }
    one, other = call(apart, inputs, {}), call(together, inputs, {}, group)
    assert_same(one, other)
    torch.autograd.backward(list(one.values()), upstream(one.values(), 0))
    torch.autograd.backward(list(other.values()), upstream(other.values(), 0))
    for p, q in zip(apart.parameters(), together.parameters(), strict=True):
        assert torch.equal(p.grad.to_dense(), q.grad.to_dense())


@pytest.mark.parametrize(
    ("inputs", "weights", "message"),
    [
        ({}, None, r"inputs must have the layers \['a'\], got none$"),
        ({"b": KEYS}, None, r"inputs must have the layers \['a'\], got \['b'\]$"),
        ({"a": KEYS}, {"b": KEYS}, r"sample_weights must be of the layers \['a'\], got \['b'\]$"),
        ([KEYS], None, "inputs must be a mapping with the names of layers, got list$"),
        (KEYS, None, "inputs must be a mapping with the names of layers, got Tensor$"),
        (
            {"a": KEYS},
            KEYS,
            "sample_weights must be a mapping with the names of layers, got Tensor$",
        ),
    ],
)
def test_names_that_do_not_fit(inputs, weights, message):
    group = sparsekit.EmbeddingGroup({"a": sparsekit.DistributedEmbedding("sum", 9, 4, 1, 2)})
    with pytest.raises((TypeError, ValueError), match=f"^EmbeddingGroup: {message}"):
        group(inputs, weights)


def test_a_full_table_is_named_behind_one_of_row_numbers():
    made = {
        "rows": sparsekit.Embedding(9, 4, name="rows", use_hashtable=False),
        "full": sparsekit.Embedding(2, 4, name="full"),
    }
    keys = torch.arange(3)
    with pytest.raises(sparsekit.TableFullError, match=r"^full: "):
        sparsekit.EmbeddingGroup(made)({"rows": keys, "full": keys})


def test_layers_on_two_devices():
    made = {place: sparsekit.Embedding(9, 4, name=place, device=place) for place in ("cpu", "meta")}
    with pytest.raises(ValueError, match=r"^EmbeddingGroup: meta is on meta, cpu on cpu$"):
        sparsekit.EmbeddingGroup(made)
    name = "group_embedding_lookup_sparse"
    with pytest.raises(ValueError, match=rf"^{name}: meta is on meta, cpu on cpu$"):
        sparsekit.group_embedding_lookup_sparse(list(made.values()), [KEYS] * 2, ["sum"] * 2)


def test_layers_that_are_no_mapping():
    with pytest.raises(TypeError, match=r"^EmbeddingGroup: layers must be a mapping, got list$"):
        sparsekit.EmbeddingGroup([sparsekit.DistributedEmbedding("sum", 9, 4, 1, 2)])


@pytest.mark.parametrize("empty", ["sum", "any"])
def test_a_gradient_added_to_an_empty_one_leaves_those_of_other_tables(empty, device):
    """torch adds to an empty gradient in place, which must not run into the next table's."""
    keys = torch.tensor([1, 2, 3], device=device)
    some, none = (keys, torch.arange(4, device=device)), (keys[:0], torch.zeros_like(keys[:1]))
    made = {
        "sum": sparsekit.DistributedEmbedding("sum", 80, 3, 1, name="sum"),
        "any": sparsekit.DistributedEmbedding("sum", 80, 4, 1, name="any"),
    }
    group = sparsekit.EmbeddingGroup(torch.nn.ModuleDict(made).to(device))
    inputs = {name: none if name == empty else some for name in made}
    sum(out.sum() for out in group(inputs).values()).backward()
    (7 * made[empty](some)).sum().backward()
    for name, layer in made.items():
        expected = torch.full((3, layer.embedding_vec_size), 7.0 if name == empty else 1.0)
        assert torch.equal(layer.weight.grad.coalesce().values().cpu(), expected)
