"""Drop-ins on several ranks give the same results as one process with all samples."""

import pytest
import torch
from torch import nn

import sparsekit
from sparsekit import Embedding, EmbeddingBag, replace_embeddings

STEPS = 4
BIG = 10**18
KINDS = ["vectors", "sum", "mean", "max", "weighted", "one by one"]


def batch_of(rank, step):
    """Return a rank's raw ids: some are shared with other ranks, and some are padding."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, 30, (rank + 3, 4), generator=draw) * BIG // 7 - 3
    return ids, torch.rand(ids.shape, generator=draw)


def layer_of(kind):
    settings = {
        "dtype": torch.float64,
        "gradient_reduction": "sum",
        "name": "ids",
        "padding_key": -3,
        "max_norm": 1.5,
    }
    if kind == "vectors":
        return Embedding(40, 5, **settings)
    mode = kind if kind in ("mean", "max") else "sum"
    strategy = {"mean": "reduce_scatter"}.get(kind, "auto")
    return EmbeddingBag(40, 5, mode=mode, strategy=strategy, **settings)


def outputs_of(layer, kind, ids, weights):
    if kind == "vectors":
        return layer(ids)
    if kind == "weighted":
        return layer(ids, None, weights)
    if kind == "one by one":
        return layer(ids.view(-1), torch.arange(ids.numel()))
    return layer(ids)


def train(rank, kind, world_size=None):
    """Train for some steps, on all samples if world_size is given; return outputs and gradients."""
    layer = layer_of(kind)
    optimizer = sparsekit.optim.SGD(layer.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        ranks = [rank] if world_size is None else range(world_size)
        each = [batch_of(r, step) for r in ranks]
        ids, weights = (torch.cat(part) for part in zip(*each, strict=True))
        weights.requires_grad_()
        out = outputs_of(layer, kind, ids, weights.double())
        out.sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((out.detach(), weights.grad))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_one_process(two_ranks_over, kind):
    of_ranks = two_ranks_over(train, kind)
    whole = train(0, kind, world_size=2)
    for step, (expected, expected_grad) in enumerate(whole):
        parts = [of_rank[step] for of_rank in of_ranks]
        out = torch.cat([out for out, _ in parts])
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        if kind == "weighted":
            grad = torch.cat([grad for _, grad in parts])
            torch.testing.assert_close(grad, expected_grad)


def message_of(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is looked at later
        call()
    return str(caught.value)


def errors_of(rank):
    """Check that invalid input on one rank raises on both ranks, and that the next call works."""
    layer, found = EmbeddingBag(9, 4, mode="max", name="bag"), []
    ids = torch.tensor([[1, 2]])
    found.append(message_of(lambda: layer(ids, None, torch.ones(1, 2) if rank == 0 else None)))
    found.append(message_of(lambda: layer(ids[0] if rank == 1 else ids)))
    vectors = Embedding(9, 4, name="vectors")
    found.append(message_of(lambda: vectors(ids.float() if rank == 1 else ids)))
    return found, len(layer(ids)), len(vectors(ids))


def test_an_error_of_one_rank_is_one_on_both(two_ranks):
    for found, *lengths in two_ranks(errors_of):
        assert "per_sample_weights is only there" in found[0]
        assert "a 1-D input needs offsets" in found[1]
        assert "must be int64 or int32" in found[2]
        assert lengths == [1, 1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.items = nn.Embedding(20, 6, padding_idx=0)
        self.again = self.items
        self.bags = nn.EmbeddingBag(20, 6, mode="max")
        self.double()

    def forward(self, ids):
        return self.items(ids).sum(1) + self.again(ids).sin().sum(1) * self.bags(ids)

    def scores(self, vectors):
        return vectors @ self.items.weight.T


def losses(rank, swapped, world_size=None):
    model = Model()
    if swapped:
        with pytest.warns(UserWarning, match=r"Model\.scores reads items.weight, which .* of rank"):
            replace_embeddings(model, verbose=False, gradient_reduction="sum", extra_rows=3)
        assert model.again is model.items
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(STEPS):
        ranks = [rank] if world_size is None else range(world_size)
        batches = [
            torch.randint(20, (4, 3), generator=torch.Generator().manual_seed(7 * step + r))
            for r in ranks
        ]
        out = model(torch.cat(batches))
        out.pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(out.detach())
    if swapped:
        model(torch.tensor([[BIG, BIG + 1, BIG + 2]]))  # the table has room for new ids
    return found


def test_a_swapped_model_trains_like_the_original(two_ranks_over):
    of_ranks = two_ranks_over(losses, True)
    for step, expected in enumerate(losses(0, False, world_size=2)):
        out = torch.cat([of_rank[step] for of_rank in of_ranks])
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def swap_in_ddp(rank):
    model = nn.parallel.DistributedDataParallel(Model())
    return message_of(lambda: replace_embeddings(model))


def test_swapped_before_ddp(two_ranks):
    for found in two_ranks(swap_in_ddp):
        assert "call it before DistributedDataParallel" in found


def rows_of_given_vectors(rank):
    ids, vectors = torch.arange(9), torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    made = sparsekit.Embedding.from_pretrained(vectors, name="given")
    loaded = sparsekit.Embedding(9, 2, name="loaded")
    sparsekit.load_torch_state_dict(loaded, {"weight": vectors})
    for layer in (made, loaded):
        assert layer.table.keys().tolist() == layer.owned(ids).tolist()
        assert torch.equal(layer(ids), vectors)
    return len(made.table)


def test_each_rank_has_rows_for_its_own_ids_only(two_ranks):
    rows = two_ranks(rows_of_given_vectors)
    assert sum(rows) == 9
    assert min(rows) > 0
