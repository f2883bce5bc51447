"""Drop-ins add features to torch's layers: they accept any id, and our other layers' options."""

import copy
import inspect

import pytest
import torch
from torch import nn

import sparsekit
from sparsekit import (
    All2AllDenseEmbedding,
    DistributedEmbedding,
    Embedding,
    EmbeddingBag,
    EmbeddingGroup,
)

from .keyed import Keyed

T = torch.tensor
BIG = 10**18
DROP_INS = [Embedding, EmbeddingBag]
SAME_START = sparsekit.nn.Uniform(-1, 1)


def parameters(function):
    return inspect.signature(function).parameters


@pytest.mark.parametrize("drop_in", DROP_INS)
def test_arguments_are_those_of_torch_and_then_ours(drop_in):
    for ours, theirs in (
        (drop_in, getattr(nn, drop_in.__name__)),
        (drop_in.forward, getattr(nn, drop_in.__name__).forward),
        (drop_in.from_pretrained, getattr(nn, drop_in.__name__).from_pretrained),
    ):
        of_torch = list(parameters(theirs))
        assert list(parameters(ours))[: len(of_torch)] == of_torch
        # Our gradients are always sparse, whatever the argument says.
        defaults = [
            {name: parameters(function)[name].default for name in of_torch if name != "sparse"}
            for function in (ours, theirs)
        ]
        assert defaults[0] == defaults[1]
    others = {
        name
        for name, parameter in parameters(DistributedEmbedding).items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    } | {"use_hashtable"}
    others -= {"truncate"} if drop_in is EmbeddingBag else {"truncate", "strategy"}
    assert others <= set(parameters(drop_in))


def test_any_id_is_looked_up():
    ids = T([[BIG, -1, 0], [-(2**63), 2**63 - 1, BIG]])
    layer = Embedding(5, 4, name="ids")
    out = layer(ids)
    assert out.shape == (2, 3, 4)
    assert torch.equal(out[0, 0], out[1, 2])
    assert len(out.view(-1, 4).unique(dim=0)) == 5
    assert layer.table.keys().tolist() == [BIG, -1, 0, -(2**63), 2**63 - 1]
    out.sum().backward()
    assert layer.weight.grad._nnz() == 5
    with pytest.raises(sparsekit.TableFullError, match="num_embeddings"):
        layer(T([1]))


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_bags_of_any_ids_train(mode):
    ids, offsets = T([BIG, -1, 0, BIG]), T([0, 3, 3])
    layer = EmbeddingBag(10, 4, mode=mode, name="ids")
    vectors = Embedding(10, 4, name="ids")(ids).detach()
    reduced = {"mean": vectors[:3].mean(0), "sum": vectors[:3].sum(0), "max": vectors[:3].amax(0)}
    expected = torch.stack([reduced[mode], torch.zeros(4), vectors[3]])
    torch.testing.assert_close(layer(ids, offsets), expected)
    optimizer = sparsekit.optim.LazyAdam(layer.parameters(), lr=0.1)
    before = layer(ids, offsets).sum()
    before.backward()
    optimizer.step()
    assert layer(ids, offsets).sum() < before
    assert len(layer.table) == 3


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_bags_are_those_of_distributed_embedding(mode):
    layer = EmbeddingBag(50, 8, mode=mode, name="same", embedding_initializer=SAME_START)
    other = DistributedEmbedding(mode, 50, 8, 1, 4, name="same", embedding_initializer=SAME_START)
    keys = torch.randint(-(2**63), 2**63 - 1, (10,))[torch.randint(10, (6, 4))]
    grad = torch.randn(6, 8)
    for ours in (lambda: layer(keys), lambda: layer(keys.view(-1), torch.arange(6) * 4)):
        out, expected = ours(), other(keys.unsqueeze(1))
        assert torch.equal(out, expected.squeeze(1))
        layer.zero_grad()
        other.zero_grad()
        out.backward(grad)
        expected.backward(grad.unsqueeze(1))
        assert torch.equal(layer.weight.grad.to_dense(), other.weight.grad.to_dense())


def test_nested_bags():
    values, offsets = T([1, 2, 1]), T([0, 0, 2, 3])
    layer = EmbeddingBag(5, 3, mode="sum")
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    assert torch.equal(layer(nested), layer(values, offsets[:-1]))
    weights = torch.rand(3)
    out = layer(nested, None, torch.nested.nested_tensor_from_jagged(weights, nested.offsets()))
    assert torch.equal(out, layer(values, offsets[:-1], weights))
    with pytest.raises(ValueError, match="offsets must be None"):
        layer(nested, offsets)


def test_the_first_of_equal_ones_gets_the_gradient_of_a_maximum():
    start = sparsekit.nn.Constant(3.0)
    layer = EmbeddingBag(5, 2, mode="max", embedding_initializer=start, name="equal")
    layer(T([[7, 8, 9]])).sum().backward()
    assert layer.weight.grad.to_dense()[:3].tolist() == [[1, 1], [0, 0], [0, 0]]


def test_a_nan_is_the_maximum():
    layer = EmbeddingBag.from_pretrained(T([[1.0, 5.0], [float("nan"), 2.0]]), mode="max")
    out = layer(T([[0, 1], [0, 0]]))
    assert out[0].isnan().tolist() == [True, False]
    assert out[1].tolist() == [1.0, 5.0]


@pytest.mark.parametrize("drop_in", DROP_INS)
def test_padding_key_is_any_key(drop_in):
    layer = drop_in(5, 3, padding_key=-1)
    assert layer.padding_idx is None
    out = layer(T([[-1, -1], [BIG, -1]]))
    assert not out[0].any()
    assert layer.table.keys().tolist() == [BIG]
    with pytest.raises(ValueError, match="cannot both be given"):
        drop_in(5, 3, padding_idx=-1, padding_key=-1)
    assert drop_in(5, 3, padding_idx=-1).padding_key == 4  # -1 counts from the end, as in torch


def test_initial_vectors_are_torchs():
    vectors = Embedding(20_000, 8, name="start")(torch.arange(20_000))
    assert vectors.mean().abs() < 0.01
    assert (vectors.std() - 1).abs() < 0.01
    layer = Embedding(9, 4, embedding_initializer=sparsekit.nn.Constant(2.0))
    assert layer(T(5)).tolist() == [2.0] * 4


@pytest.mark.parametrize("drop_in", DROP_INS)
def test_dtype_is_torchs_default(drop_in):
    torch.set_default_dtype(torch.float64)
    try:
        assert drop_in(3, 2).weight.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert drop_in(3, 2, dtype=torch.bfloat16)(T([[1]])).dtype == torch.bfloat16


@pytest.mark.parametrize("drop_in", DROP_INS)
def test_evaluation_inserts_nothing(drop_in):
    layer, ids = drop_in(9, 4, name="start"), T([[1, BIG]])
    before = layer.eval()(ids)
    assert len(layer.table) == 0
    assert torch.equal(layer.train()(ids), before)
    assert len(layer.table) == 2


@pytest.mark.parametrize("drop_in", DROP_INS)
def test_states_and_copies(drop_in):
    layer, ids = drop_in(9, 4, padding_idx=3), T([[BIG, 3, 5]])
    out = layer(ids)
    other = drop_in(9, 4, padding_idx=3)
    other.load_state_dict(layer.state_dict())
    for twin in (copy.deepcopy(layer), other):
        assert torch.equal(twin(ids), out)


@pytest.mark.parametrize("drop_in", DROP_INS)
def test_the_state_of_torchs_layer_says_what_to_do(drop_in):
    theirs = getattr(nn, drop_in.__name__)(6, 4)
    layer = drop_in(9, 4)
    with pytest.raises(RuntimeError, match=r"call assign\(torch.arange\(len\(weight\)\), weight"):
        layer.load_state_dict(theirs.state_dict())
    weight = theirs.state_dict()["weight"]
    layer.assign(torch.arange(len(weight)), weight)
    ids = T([[5, 0, 1]])
    torch.testing.assert_close(layer(ids), theirs(ids))


def test_max_norm_of_new_ids():
    layer = Embedding(9, 4, max_norm=0.5, embedding_initializer=sparsekit.nn.Constant(1.0))
    ids = T([1, BIG, 3, BIG])
    torch.testing.assert_close(layer(ids).norm(dim=1), torch.full((4,), 0.5))
    torch.testing.assert_close(layer.vectors(ids[:2]), torch.full((2, 4), 0.25))
    full = Embedding.from_pretrained(torch.ones(2, 4), max_norm=0.5).eval()
    full(T([7, 0]))  # key 7 has no row
    assert full.weight.norm(dim=1).tolist() == [pytest.approx(0.5), 2]
    assert (layer.eval()(T([7])) == 1).all()
    layer.max_norm = None
    layer.assign(ids[:1], torch.ones(1, 4))
    assert (layer(ids[:1]) == 1).all()


def test_max_norm_in_a_group():
    """Each table has its own max_norm, and late rows catch up before max_norm is applied."""
    results = []
    for mode in ("catch_up", "sweep"):
        torch.manual_seed(0)
        layers = {"b": Embedding(9, 2, name="b"), "a": Embedding(9, 4, max_norm=0.5, name="a")}
        group = EmbeddingGroup(layers)
        optimizer = sparsekit.optim.Adam(group.parameters(), lr=0.1, mode=mode)
        for step in range(6):
            outs = group({"a": T([step % 3, 5]), "b": T([step, 1])})
            assert (outs["a"].norm(dim=1) <= 0.5 + 1e-6).all()
            assert (outs["b"].norm(dim=1) > 0.5).any()
            optimizer.zero_grad()
            # The step makes vectors longer.
            sum(-out.square().sum() for out in outs.values()).backward()
            optimizer.step()
        results.append([layer.state_dict()["weight"] for layer in layers.values()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_pretrained_with_room_for_more():
    vectors = torch.rand(3, 2)
    with pytest.raises(ValueError, match="num_embeddings must be at least the 3 rows"):
        Embedding.from_pretrained(vectors, num_embeddings=2)
    with pytest.raises(ValueError, match=r"embeddings must be \[n, dim\]"):
        EmbeddingBag.from_pretrained(vectors[0])
    layer = EmbeddingBag.from_pretrained(vectors, freeze=False, num_embeddings=4, padding_idx=-1)
    assert layer.padding_idx == 2
    assert torch.equal(layer(T([[2, 1]])), vectors[1:2])
    assert layer(T([[BIG]])).any()


def test_a_maximum_is_not_scattered():
    with pytest.raises(ValueError, match="adds up, and mode is 'max'"):
        EmbeddingBag(9, 4, mode="max", strategy="reduce_scatter")


def test_attributes_and_text():
    layer = EmbeddingBag(9, 4, mode="sum", include_last_offset=True, padding_idx=2, name="clicks")
    assert (layer.num_embeddings, layer.embedding_dim, layer.padding_idx) == (9, 4, 2)
    assert (layer.mode, layer.include_last_offset) == ("sum", True)
    for part in ("name='clicks'", "padding_key=2", "mode='sum'", "include_last_offset=True"):
        assert part in repr(layer)


def test_in_a_group():
    layers = {
        "bag": EmbeddingBag(50, 4, mode="sum", name="bag", padding_idx=7),
        "vectors": Embedding(50, 4, name="vectors"),
        "slots": DistributedEmbedding("mean", 50, 4, 2, 3, name="slots"),
    }
    group = sparsekit.EmbeddingGroup(layers)
    ids = torch.randint(0, 40, (5, 3))
    inputs = {"bag": ids, "vectors": ids, "slots": ids.repeat(1, 2).view(5, 2, 3)}
    out = group(inputs)
    for name, layer in layers.items():
        assert torch.equal(out[name], layer(inputs[name])), name
    # In a group, offsets include the last end, and weights are allowed.
    values, offsets, weights = ids.view(-1), torch.arange(6) * 3, torch.rand(5, 3)
    inputs["bag"] = values, offsets
    out = group(inputs, {"bag": weights.view(-1)})
    assert torch.equal(out["bag"], layers["bag"](ids, None, weights))
    # A KeyedJaggedTensor with a single feature gives a single slot.
    out = group({**inputs, "bag": Keyed(["only"], values, offsets, weights.view(-1))})["bag"]
    assert torch.equal(out, layers["bag"](ids, None, weights))
    features = {"x": "bag", "y": sparsekit.Feature("vectors", "mean")}
    both = {name: layers[name] for name in ("bag", "vectors")}
    group = sparsekit.EmbeddingGroup(both, features, output="concatenated")
    keyed = Keyed(["y", "x"], values[:12], torch.arange(0, 13, 3), None)
    out = group(keyed)
    assert out.shape == (2, 8)
    assert torch.equal(out[:, :4], layers["bag"](ids[2:4]))


def test_a_maximum_in_a_group():
    layer = EmbeddingBag(50, 4, mode="max", name="largest")
    group = sparsekit.EmbeddingGroup({"a": layer})
    ids = T([[1, 2], [3, 3]])
    assert torch.equal(group({"a": ids})["a"], layer(ids))
    with pytest.raises(
        ValueError, match="largest: sample_weights must be None, as combiner is 'ma"
    ):
        group({"a": ids}, {"a": torch.ones(2, 2)})


TORCH_WORDS = [
    ({"num_embeddings": 9}, "num_embeddings \\(here max_vocabulary_size_per_gpu\\)"),
    ({"embedding_dim": 9}, "embedding_dim \\(here embedding_vec_size\\)"),
    ({"padding_idx": 0}, "padding_idx \\(here padding_key, any key\\)"),
    ({"max_norm": 1.0}, "max_norm \\(only drop-ins have it\\)"),
    ({"sparse": True}, "sparse \\(gradients always are\\)"),
    ({"include_last_offset": True}, "include_last_offset \\(offsets always have their end\\)"),
]


@pytest.mark.parametrize(("words", "match"), TORCH_WORDS)
def test_words_of_torch_on_the_other_layers(words, match):
    with pytest.raises(TypeError, match=f"{match}; sparsekit.EmbeddingBag takes"):
        DistributedEmbedding("sum", 9, 4, 1, 1, **words)
    with pytest.raises(TypeError, match=f"^movies: there is no {match}; sparsekit.Embedding takes"):
        All2AllDenseEmbedding(9, 4, 1, 1, name="movies", **words)


def test_mode_on_the_other_layers():
    with pytest.raises(TypeError, match=r"mode \(here combiner\); sparsekit.EmbeddingBag"):
        DistributedEmbedding(1000, 64, mode="mean")
    with pytest.raises(TypeError, match=r"mode \(it does not pool, as EmbeddingBag does"):
        All2AllDenseEmbedding(1000, 64, mode="mean")
    with pytest.raises(TypeError, match=r"no num_embeddings .*, no mode \(here combiner\);"):
        DistributedEmbedding(mode="mean", num_embeddings=3)
    with pytest.raises(TypeError, match="no_such_word"):
        DistributedEmbedding("sum", 9, 4, 1, 1, no_such_word=1)
    assert "combiner" in parameters(DistributedEmbedding)


@pytest.mark.parametrize(
    "keys",
    [T(1), T([1]), T([[1]]), T([[1, 2]]), T([[[[1]]]]), torch.ones(2, 2, 2, dtype=torch.int64)],
)
def test_another_shape_names_the_class_to_use(keys):
    layer = All2AllDenseEmbedding(9, 4, 1, 1)
    with pytest.raises(ValueError, match=r"sparsekit\.Embedding takes keys of any shape"):
        layer(keys)
    if keys.dim() != 1:
        with pytest.raises(ValueError, match=r"must be 1-D, .* sparsekit\.Embedding takes keys"):
            All2AllDenseEmbedding(9, 4, 1, 1, dynamic_input=True)(keys)
    if keys.dim() != 3:
        with pytest.raises(ValueError, match=r"sparsekit\.EmbeddingBag takes bags as torch's"):
            DistributedEmbedding("sum", 9, 4, 1, 1)(keys)
    assert len(layer.table) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["mean", "max"])
def test_in_a_compiled_model(mode):
    layer = EmbeddingBag(9, 4, mode=mode, name="compiled")
    compiled = torch.compile(torch.nn.Sequential(layer, torch.nn.Tanh()), backend="eager")
    ids = T([[1, BIG], [3, 3]])
    assert torch.equal(compiled(ids), layer(ids).tanh())
    compiled(ids).sum().backward()
    assert layer.weight.grad._nnz() == 3


@pytest.mark.parametrize("max_norm", [5.0, 4.0])
def test_a_vector_is_scaled_only_if_its_norm_is_above_the_limit(max_norm):
    vectors = T([[3.0, 4.0]], dtype=torch.float64)
    layers = [
        kind.from_pretrained(vectors.clone(), max_norm=max_norm)
        for kind in (Embedding, nn.Embedding)
    ]
    found, expected = (layer(T([0])) for layer in layers)
    assert torch.equal(found, expected)
    assert torch.equal(found, vectors) == (max_norm == 5)


def test_norms_of_bfloat16_are_computed_in_float32():
    vectors = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer, wide = Embedding.from_pretrained(vectors, max_norm=1.0), vectors.float()
    norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    assert torch.equal(layer(torch.arange(5)), (wide * (1 / (norms + 1e-7))).bfloat16())


def test_a_lookup_that_scales_nothing_writes_nothing():
    layer = Embedding.from_pretrained(torch.ones(3, 2), freeze=False, max_norm=9.0)
    penalty = layer.weight.square().sum()
    layer(T([0, 1]))
    penalty.backward()  # uses the weight's values at the time of square()
    assert torch.equal(layer.weight.grad, torch.full((3, 2), 2.0))
