"""The gradient of a table's gradient is a lookup, as with torch's own embedding."""

import pytest
import torch
from torch.nn.functional import embedding

import sparsekit
from sparsekit import Embedding, EmbeddingBag, EmbeddingGroup

IDS = torch.tensor([[1, 2, 2], [5, 1, 7], [0, 0, 3]])
SCALE = torch.tensor([[0.5, 2, 1], [1, -1, 3], [1, 0, 1]], dtype=torch.float64)
DIM, ROWS = 3, 9

POOLED = {
    "sum": lambda v: v.sum(1),
    "mean": lambda v: v.mean(1),
    "max": lambda v: v.max(1).values,
    "weighted": lambda v: (v * SCALE.unsqueeze(2)).sum(1),
}


def vectors(seed=0):
    made = torch.randn(
        ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return made.requires_grad_()


def layer_of(kind, weight, **options):
    options = {"freeze": False, "name": f"the {kind}", **options}
    return kind.from_pretrained(weight.detach(), **options)


def penalised(outputs, weights):
    """Return the weights' gradients of a loss that also penalises the gradient of the outputs."""
    loss = sum(out.pow(3).sum() for out in outputs)
    first = torch.autograd.grad(loss, weights, create_graph=True)
    (loss + sum(g.to_dense().pow(2).sum() for g in first)).backward()
    return [weight.grad.to_dense() for weight in weights]


@pytest.mark.parametrize("mode", POOLED)
@pytest.mark.parametrize("train", [True, False])
def test_bags(mode, train):
    weight = vectors()
    weighted = {"per_sample_weights": SCALE} if mode == "weighted" else {}
    layer = layer_of(EmbeddingBag, weight, mode="sum" if weighted else mode).train(train)
    expected = penalised([POOLED[mode](embedding(IDS, weight))], [weight])
    torch.testing.assert_close(penalised([layer(IDS, **weighted)], [layer.weight]), expected)


@pytest.mark.parametrize("output", ["dict", "concatenated"])
def test_several_tables(output):
    """Second gradients are right with a table used twice, an unused output and mixed dtypes."""
    dtypes = [torch.float64, torch.float32 if output == "dict" else torch.float64]
    weights = [vectors(i).detach().to(dtype).requires_grad_() for i, dtype in enumerate(dtypes)]
    layers = {
        n: layer_of(EmbeddingBag, w, mode="sum", name=n) for n, w in zip("ab", weights, strict=True)
    }
    layers["b"].insert = False  # with insert=False, the table needs a separate call of the ops
    features = {"0": "a", "1": "b", "2": "a", "3": "b"}
    keys = {"0": IDS, "1": IDS + 1, "2": IDS.flip(0), "3": IDS}
    bags = {name: ids.unsqueeze(1) for name, ids in keys.items()}
    found = EmbeddingGroup(layers, features, output)(bags)
    if output == "concatenated":
        found = dict(zip(features, found.split(DIM, 1), strict=True))
    by_name = dict(zip("ab", weights, strict=True))
    expected = {n: embedding(keys[n], by_name[of]).sum(1) for n, of in features.items()}
    of_all = [
        penalised([parts["0"].sin() * parts["1"], parts["2"]], own)
        for parts, own in (
            (found, [layer.weight for layer in layers.values()]),
            (expected, weights),
        )
    ]
    torch.testing.assert_close(*of_all, rtol=1e-5, atol=1e-5)


def test_keys_without_a_row_get_nothing():
    weight = vectors()
    layer = layer_of(Embedding, weight).eval()
    unseen = torch.cat([IDS.flatten(), torch.tensor([10**12])])
    loss = layer(unseen).pow(3).sum()
    (first,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
    first.to_dense().pow(2).sum().backward()
    (expected,) = torch.autograd.grad(
        embedding(IDS, weight).pow(3).sum(), weight, create_graph=True
    )
    expected.pow(2).sum().backward()
    torch.testing.assert_close(layer.weight.grad.to_dense(), weight.grad)


def test_steps_through_steps():
    """A gradient passes through a training step, as in MAML."""
    weight = vectors()
    layer = layer_of(Embedding, weight)
    for step, (found, look_up) in enumerate(
        [
            (weight, lambda w: embedding(IDS, w)),
            (layer.weight, lambda w: torch.func.functional_call(layer, {"weight": w}, IDS)),
        ]
    ):
        moved = found
        for _ in range(2):
            loss = look_up(moved).pow(3).sum()
            (gradient,) = torch.autograd.grad(loss, moved, create_graph=True)
            moved = moved - 0.1 * gradient.to_dense()
        look_up(moved).square().sum().backward()
        assert step == 0 or found.grad.is_sparse or found.grad.abs().sum() > 0
    torch.testing.assert_close(layer.weight.grad.to_dense(), weight.grad)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_that_is_kept_with_its_graph():
    weight = vectors()
    layer = layer_of(Embedding, weight)
    kept = []
    for one, out in ((weight, embedding(IDS, weight)), (layer.weight, layer(IDS))):
        out.pow(3).sum().backward(create_graph=True)
        gradient, one.grad = one.grad, None
        gradient.to_dense().pow(2).sum().backward()
        kept.append(one.grad.to_dense())
    torch.testing.assert_close(kept[1], kept[0])


def test_updates_in_backward_have_no_gradient_to_differentiate():
    layer = layer_of(Embedding, vectors())
    optimizer = sparsekit.optim.SGD(layer.parameters(), lr=0.1)
    sparsekit.optim.fuse_in_backward(optimizer, layer)
    before = layer(IDS).detach()
    layer(IDS).pow(3).sum().backward(create_graph=True)
    assert layer.weight.grad is None
    assert not torch.equal(layer(IDS), before)
