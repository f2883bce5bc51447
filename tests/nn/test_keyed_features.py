"""A group's outputs for a KeyedJaggedTensor equal its layers' outputs, bit for bit."""

import copy
import pickle
import re

import pytest
import torch

import sparsekit
from sparsekit import All2AllDenseEmbedding, DistributedEmbedding, EmbeddingGroup, Feature, optim
from sparsekit.lookup import table_ops
from tests.nn.alike import assert_same, check_step, state_of, upstream
from tests.nn.keyed import FEATURES, KEYS, Keyed, layers, random_keyed

ASKED = [("shared_a", "shared", "sum"), ("own", "own", "sqrtn"), ("rows", "rows", "mean")]
ASKED += [("shared_b", "shared", "mean")]
BATCH = 6


def one_by_one(layers, keyed):
    """Return a dict of name to output [batch, dim]; features of one table share a call."""
    tables = [layers[layer] for _, layer, _ in ASKED]
    calls = [keyed.of(name) for name, _, _ in ASKED]
    outputs = {}
    for table in dict.fromkeys(tables):
        mine = [i for i, t in enumerate(tables) if t is table]
        found = sparsekit.group_embedding_lookup_sparse(
            [table] * len(mine),
            [calls[i][0] for i in mine],
            [ASKED[i][2] for i in mine],
            [calls[i][1] for i in mine],
        )
        outputs |= {ASKED[i][0]: out for i, out in zip(mine, found, strict=True)}
    return {name: outputs[name] for name in FEATURES}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (optim.LazyAdam, torch.float32),
        (optim.LazyAdam, torch.bfloat16),
        (optim.Adam, torch.float32),  # rows may be late under Adam
    ],
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("output", ["dict", "concatenated"])
def test_training_is_that_of_the_layers(output, fused, kind, dtype, device):
    apart = layers(device, dtype=dtype)
    together = copy.deepcopy(apart)
    group = EmbeddingGroup(together, FEATURES, output)
    optimizers = [kind(model.parameters(), lr=0.1) for model in (apart, group)]
    if fused:
        for optimizer, model in zip(optimizers, (apart, group), strict=True):
            optim.fuse_in_backward(optimizer, model)
    for seed in range(6):
        batch = 0 if seed == 3 else BATCH + seed
        wide = torch.int64 if seed % 2 else torch.int32
        keyed = random_keyed(KEYS, batch, seed, device, weighted=seed % 3 == 1, dtype=wide)
        for training in (False, True):
            apart.train(training)
            group.train(training)
            expected, out = one_by_one(apart, keyed), group(keyed)
            if output == "dict":
                assert_same(out, expected)
            else:
                assert out.shape == (batch, 8 + 16 + 3 + 8)
                assert torch.equal(out, torch.cat(list(expected.values()), 1))
        grads = upstream(expected.values(), seed)
        torch.autograd.backward(list(expected.values()), grads)
        if output == "dict":
            torch.autograd.backward(list(out.values()), grads)
        else:
            out.backward(torch.cat(grads, 1))
        for p, q in zip(apart.parameters(), together.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == fused
            if not fused:
                assert q.grad.is_coalesced()
                assert torch.equal(p.grad.to_dense(), q.grad.to_dense())
        check_step(apart, together, optimizers)


def test_nothing_is_copied(device, monkeypatch):
    """The ops read the jagged tensor in place and write a single output."""
    group = EmbeddingGroup(layers(device), FEATURES, "concatenated")
    keyed = random_keyed(KEYS, BATCH, 0, device, weighted=True)
    seen = []
    for name in ("_find", "_find_or_insert", "_pool"):
        op = getattr(table_ops, name)
        watched = lambda *a, op=op, name=name: (seen.append((name, a)), op(*a))[1]  # noqa: E731
        monkeypatch.setattr(table_ops, name, watched)
    out = group(keyed)
    group.eval()(keyed)
    assert [name for name, _ in seen] == ["_find_or_insert", "_pool", "_find", "_pool"]
    for name, arguments in seen:
        if name == "_pool":
            assert len(arguments[0]) == 1
            assert [w.data_ptr() for w in arguments[7]] == [keyed.weights_or_none().data_ptr()]
        else:
            keys, offsets = arguments[7:9] if name == "_find_or_insert" else arguments[3:5]
            assert [k.data_ptr() for k in keys] == [keyed.values().data_ptr()]
            assert [o.data_ptr() for o in offsets] == [keyed.offsets().data_ptr()]
    assert seen[1][1][0][0].data_ptr() == out.data_ptr()


def test_requests_have_keys_of_their_own(device):
    keyed = random_keyed(KEYS, BATCH, 2, device)
    group = EmbeddingGroup(layers(device), FEATURES)
    requests = group._ask(group._tables(), keyed, None)
    for name, request in zip(FEATURES, requests, strict=True):
        assert torch.equal(request.keys, keyed.of(name)[0][0])


def test_layers_of_which_one_is_in_evaluation(device):
    apart = layers(device)
    apart["own"].eval()
    together = copy.deepcopy(apart)
    group = EmbeddingGroup(together, FEATURES, "concatenated")
    keyed = random_keyed(KEYS, BATCH, 1, device, weighted=True)
    for _ in range(2):
        expected, out = one_by_one(apart, keyed), group(keyed)
        assert torch.equal(out, torch.cat(list(expected.values()), 1))
        grads = upstream(expected.values(), 0)
        torch.autograd.backward(list(expected.values()), grads)
        out.backward(torch.cat(grads, 1))
        assert_same(state_of(apart), state_of(together))
        for layer in apart:
            grad = apart[layer].weight.grad.to_dense()
            assert torch.equal(grad, together[layer].weight.grad.to_dense())
        apart.train()
        group.train()


@pytest.mark.parametrize("output", ["dict", "concatenated"])
def test_weights_that_need_a_gradient(output, device):
    apart = layers(device)
    together = copy.deepcopy(apart)
    group = EmbeddingGroup(together, FEATURES, output)
    keyed, twin = (random_keyed(KEYS, BATCH, 4, device, weighted=True) for _ in "ab")
    keyed.weights_or_none().requires_grad_()
    twin.weights_or_none().requires_grad_()
    expected, out = one_by_one(apart, twin), group(keyed)
    out = out if output == "concatenated" else torch.cat(list(out.values()), 1)
    assert torch.equal(out, torch.cat(list(expected.values()), 1))
    out.square().sum().backward()
    sum(each.square().sum() for each in expected.values()).backward()
    torch.testing.assert_close(keyed.weights_or_none().grad, twin.weights_or_none().grad)
    for layer in apart:
        torch.testing.assert_close(
            together[layer].weight.grad.to_dense(), apart[layer].weight.grad.to_dense()
        )


@pytest.mark.parametrize("batch", [0, BATCH])
@pytest.mark.parametrize("padding", [None, 7])
def test_vectors_that_are_not_pooled(padding, batch, device):
    made = layers(device)
    made["vectors"] = All2AllDenseEmbedding(90, 5, 1, 1, padding_key=padding, name="v").to(device)
    features = {**FEATURES, "last": "vectors", "middle": Feature("own", combiner=None)}
    keyed = random_keyed(KEYS, batch, 2, device, weighted=True)
    out = EmbeddingGroup(made, features)(keyed)
    expected = {"last": made["vectors"], "middle": made["own"]}
    for name, layer in expected.items():
        (values, offsets), _ = keyed.of(name)
        assert out[name].is_nested
        assert out[name].shape[0] == batch
        assert out[name].shape[2] == layer.embedding_vec_size
        assert torch.equal(out[name].offsets(), offsets)
        rows = layer.table.find(values).to(torch.int64)
        known = rows >= 0
        assert (known == (values != layer.padding_key)).all()
        vectors = layer.weight[rows.clamp(min=0)] * known.unsqueeze(1)
        assert torch.equal(out[name].values(), vectors)
        (grad,) = upstream([vectors], 0)
        out[name].values().backward(grad, retain_graph=True)
        dense = torch.zeros_like(layer.weight).index_add(
            0, rows.clamp(min=0), grad * known.unsqueeze(1)
        )
        torch.testing.assert_close(layer.weight.grad.to_dense(), dense)


def test_padding_and_samples_of_few_keys(device):
    """Layers with padding or a key limit get copies of bags; others read the batch in place."""
    apart = layers(device)
    apart["shared"] = DistributedEmbedding("sum", 90, 8, 1, 5, padding_key=7, name="p").to(device)
    apart["own"] = DistributedEmbedding("sqrtn", 90, 16, 2, 5, max_feature_num=4).to(device)
    together = copy.deepcopy(apart)
    keyed = random_keyed(KEYS, 40, 3, device, weighted=True)
    out = EmbeddingGroup(together, FEATURES, "concatenated")(keyed)
    assert torch.equal(out, torch.cat(list(one_by_one(apart, keyed).values()), 1))
    assert (keyed.of("shared_a")[0][0] == 7).any()
    assert together["shared"].table.find(torch.tensor([7], device=device)).tolist() == [-1]
    together["own"].max_feature_num = 3
    name = re.escape(together["own"].name)
    with pytest.raises(ValueError, match=f"{name}: feature 'own': sample .* has 4 keys, more"):
        EmbeddingGroup(together, FEATURES)(keyed)


def test_a_full_table_counts_its_own_keys(device):
    made = layers(device)
    made["shared"] = DistributedEmbedding("sum", 10, 8, 1, 5, name="full").to(device)
    keyed = random_keyed(KEYS, BATCH, 1, device)
    mine = torch.cat([keyed.of(name)[0][0] for name in ("shared_a", "shared_b")])
    with pytest.raises(sparsekit.TableFullError) as raised:
        EmbeddingGroup(made, FEATURES)(keyed)
    error = raised.value
    assert (error.layer, error.size, error.capacity) == ("full", 0, 10)
    assert error.refused == len(mine.unique()) < len(keyed.values().unique())


def test_a_dict_of_features(device):
    apart = layers(device)
    together, third = copy.deepcopy(apart), copy.deepcopy(apart)
    keyed = random_keyed(KEYS, BATCH, 3, device, weighted=True)
    inputs = {name: keyed.of(name)[0] for name in FEATURES}
    weights = {name: keyed.of(name)[1] for name in FEATURES}
    # Give one feature as a nested tensor, and one as a separate KeyedJaggedTensor.
    inputs["own"] = torch.nested.nested_tensor_from_jagged(*inputs["own"])
    inputs["rows"] = Keyed(["rows"], *inputs["rows"], weights.pop("rows"))
    out = EmbeddingGroup(together, FEATURES)(inputs, weights)
    expected = one_by_one(apart, keyed)
    assert_same(out, expected)
    out = EmbeddingGroup(third, FEATURES, "concatenated")(inputs, weights)
    assert torch.equal(out, torch.cat(list(expected.values()), 1))
    unpooled = EmbeddingGroup({"own": apart["own"]}, {"f": Feature("own", None)})
    assert torch.equal(unpooled({"f": inputs["own"]})["f"].offsets(), inputs["own"].offsets())


def test_layers_without_features(device):
    """Without `features`, a layer looks up the feature of its name, for any kind of output."""
    made = {name: layer for name, layer in layers(device).items() if name != "own"}
    keyed = random_keyed(("shared", "rows"), BATCH, 5, device)
    expected = {name: layer(keyed.of(name)[0]).squeeze(1) for name, layer in made.items()}
    assert_same(EmbeddingGroup(made)(keyed), expected)
    inputs = {name: keyed.of(name)[0] for name in made}
    wanted = torch.cat(list(expected.values()), 1)
    for given in (keyed, inputs):
        assert torch.equal(EmbeddingGroup(made, output="concatenated")(given), wanted)
    one = EmbeddingGroup({"rows": made["rows"]}, output="concatenated")
    assert torch.equal(one({"rows": inputs["rows"]}), expected["rows"])


def test_what_sends_no_gradient(device):
    made = layers(device)
    made["own"].weight.requires_grad_(False)
    group = EmbeddingGroup(made, FEATURES)
    out = group(random_keyed(KEYS, BATCH, 1, device))
    out["shared_b"].sum().backward()
    assert made["rows"].weight.grad is None
    assert made["own"].weight.grad is None
    joined = EmbeddingGroup(made, FEATURES, "concatenated")
    joined(random_keyed(KEYS, BATCH, 1, device)).sum().backward()
    assert made["rows"].weight.grad is not None
    assert made["own"].weight.grad is None


def test_prefetch(device):
    plain = EmbeddingGroup(layers(device), {**FEATURES, "last": Feature("own", None)})
    ahead = copy.deepcopy(plain)
    for seed in range(3):
        keyed = random_keyed(KEYS, BATCH, seed, device)
        ahead.prefetch(keyed)
        with torch.no_grad():
            one, other = plain(keyed), ahead(keyed)
        assert torch.equal(one.pop("last").values(), other.pop("last").values())
        assert_same(one, other)


def test_a_layer_in_evaluation_since_prefetch(device):
    apart = layers(device)
    group = EmbeddingGroup(copy.deepcopy(apart), FEATURES, "concatenated")
    keyed = random_keyed(KEYS, BATCH, 1, device, weighted=True)
    group.prefetch(keyed)
    apart["own"].eval()
    group.layers["own"].eval()
    out = group(keyed)
    assert torch.equal(out, torch.cat(list(one_by_one(apart, keyed).values()), 1))
    assert_same(state_of(apart), state_of(group.layers))


def test_weights_that_need_a_gradient_after_prefetch_without(device):
    group = EmbeddingGroup(layers(device), FEATURES, "concatenated")
    keyed = random_keyed(KEYS, BATCH, 2, device, weighted=True)
    expected = group(keyed).detach()
    keyed.weights_or_none().requires_grad_()
    with torch.no_grad():
        group.prefetch(keyed)
    out = group(keyed)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert keyed.weights_or_none().grad.abs().sum() > 0


def test_states_do_not_know_of_features(device):
    made = layers(device)
    keyed = random_keyed(KEYS, BATCH, 1, device)
    group = EmbeddingGroup(made, FEATURES, "concatenated")
    expected = group(keyed)
    assert list(group.state_dict()) == list(EmbeddingGroup(made).state_dict())
    for copied in (copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert torch.equal(copied(keyed), expected)
        copied(keyed).sum().backward()
        assert copied.layers["own"].weight.grad is not None
    assert made["own"].weight.grad is None
    other = EmbeddingGroup(layers(device), FEATURES, "concatenated")
    other.load_state_dict(group.state_dict())
    assert torch.equal(other.eval()(keyed), expected)
