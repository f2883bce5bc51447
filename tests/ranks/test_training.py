"""Training on N ranks gives the same weights as on one rank with the same global batches."""

import pytest
import torch

import sparsekit
from sparsekit.distributed import wrap_ddp

from . import on_device
from .pool import Ranks

STEPS, BATCH, SLOTS, NNZ, DIM = 20, 12, 2, 3, 5
# The single rank computes on the CPU, and a GPU's kernels round differently.
TOLERANCE = {torch.float32: 1e-4 if on_device.NAME == "cuda" else 1e-6, torch.float64: 1e-10}
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "our SGD": (sparsekit.optim.SGD, {"lr": 0.1}),
    "momentum": (sparsekit.optim.SGD, {"lr": 0.03, "momentum": 0.9, "mode": "catch_up"}),
    "Adam": (sparsekit.optim.Adam, {"lr": 0.01}),
    "LazyAdam": (sparsekit.optim.LazyAdam, {"lr": 0.01}),
    "RowWiseAdagrad": (sparsekit.optim.RowWiseAdagrad, {"lr": 0.1}),
}


def batches(dtype):
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        keys = torch.randint(-20, 20, (BATCH, SLOTS, NNZ), generator=generator)
        yield keys, torch.randn(BATCH, 1, generator=generator, dtype=torch.float64).to(dtype)


def share(rank, world_size):
    """Return a rank's samples: shares are uneven, and the last of 4 ranks has none."""
    parts = {1: [12], 2: [5, 7], 3: [1, 6, 5], 4: [4, 5, 3, 0]}[world_size]
    begin = sum(parts[:rank])
    return slice(begin, begin + parts[rank])


def build(combiner, use_hashtable, dtype, reduction, strategy="auto", placement=None):
    layer = sparsekit.DistributedEmbedding(
        combiner, 60, DIM, SLOTS, NNZ, use_hashtable=use_hashtable, dtype=dtype, name="layer",
        gradient_reduction=reduction,
        strategy=strategy, placement=placement,
    )  # fmt: skip
    torch.manual_seed(0)
    head = torch.nn.Linear(SLOTS * DIM, 1, dtype=dtype)
    return torch.nn.Sequential(layer, torch.nn.Flatten(), head)


def train(rank, world_size, combiner, use_hashtable, dtype, optimizer, reduction, *strategy):
    """Train a model; return the keys, their rows and the head's weight."""
    module = build(combiner, use_hashtable, dtype, reduction, *strategy)
    layer = module[0]
    model = wrap_ddp(module)
    sparse, dense = sparsekit.split_embedding_variable_from_others(model)
    kind, settings = OPTIMIZERS[optimizer.removesuffix(" in backward")]
    if kind is torch.optim.SGD:
        optimizers = [kind([*sparse, *dense], **settings)]
    else:
        optimizers = [kind(sparse, **settings), torch.optim.SGD(dense, lr=0.1)]
    if optimizer.endswith(" in backward"):
        sparsekit.optim.fuse_in_backward(optimizers[0], module)
    mine = share(rank, world_size)
    for keys, target in batches(dtype):
        keys = keys if use_hashtable else keys.abs()
        error = model(keys[mine]) - target[mine]
        # Divide by the global batch: with a mean over a rank's samples, ranks would have equal
        # weights, but samples would not.
        ((error * error).sum() * world_size / BATCH).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    layer.weight.catch_up()
    if use_hashtable:
        keys = layer.table.keys()
        rows = layer.weight[: len(keys)]
    else:
        keys = torch.arange(layer.capacity) * world_size + rank
        rows = layer.weight
    if world_size > 1:
        assert len(layer.owned(keys)) == len(keys)
    return keys, rows.detach(), module[2].weight.detach()


def gathered(results):
    """Return the rows of all ranks, sorted by key, and the head, which is equal on all ranks."""
    keys, rows, heads = zip(*results, strict=True)
    assert all(torch.equal(head, heads[0]) for head in heads)
    keys, rows = torch.cat(keys), torch.cat(rows)
    order = keys.argsort()
    seen = keys[order] < 20 if len(keys) >= 60 else slice(None)
    return keys[order][seen], rows[order][seen], heads[0]


@pytest.fixture(scope="module", params=[2, 3, 4])
def any_ranks(request):
    pool = Ranks(request.param)
    yield pool
    pool.close()


# Four of the eight combinations: each pair of values occurs in one of them.
SETTINGS = [
    (use_hashtable, optimizer, dtype)
    for i, use_hashtable in enumerate([True, False])
    for j, optimizer in enumerate(["SGD", "LazyAdam"])
    for k, dtype in enumerate(TOLERANCE)
    if (i + j + k) % 2 == 0
]


@pytest.mark.pairs
@pytest.mark.parametrize(("use_hashtable", "optimizer", "dtype"), SETTINGS)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_equals_one_rank(any_ranks, combiner, use_hashtable, optimizer, dtype):
    world_size = any_ranks.world_size
    # Each placement is used in half of the cases: all cases with both placements would take long.
    placement = "modulo" if dtype == torch.float64 or not use_hashtable else "hash"
    settings = (combiner, use_hashtable, dtype, optimizer, "mean", "auto", placement)
    one = gathered([train(0, 1, *settings)])
    many = gathered(any_ranks(train, world_size, *settings))
    for result, expected in zip(many, one, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.pairs
@pytest.mark.parametrize("strategy", ["all_to_all", "reduce_scatter"])
@pytest.mark.parametrize("in_backward", ["", " in backward"])
@pytest.mark.parametrize("optimizer", ["our SGD", "momentum", "Adam", "RowWiseAdagrad"])
def test_other_optimizers_equal_one_rank(two_ranks, optimizer, in_backward, strategy):
    settings = ("mean", True, torch.float64, optimizer + in_backward, "mean", strategy)
    one = gathered([train(0, 1, *settings)])
    many = gathered(two_ranks(train, 2, *settings))
    for result, expected in zip(many, one, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE[torch.float64])


@pytest.mark.parametrize("strategy", ["all_to_all", "reduce_scatter"])
def test_an_update_of_bfloat16_in_backward_is_that_of_a_step(two_ranks, strategy):
    normal, fused = (
        two_ranks(train, 2, "mean", True, torch.bfloat16, optimizer, "mean", strategy)
        for optimizer in ("our SGD", "our SGD in backward")
    )
    for one, other in zip(normal, fused, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("use_hashtable", "placement"), [(True, "hash"), (True, "modulo"), (False, None)]
)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_sums_of_bags_equal_one_rank(any_ranks, combiner, use_hashtable, placement):
    way = "reduce_scatter", placement
    settings = (combiner, use_hashtable, torch.float64, "LazyAdam", "mean", *way)
    one = gathered([train(0, 1, *settings)])
    many = gathered(any_ranks(train, any_ranks.world_size, *settings))
    for result, expected in zip(many, one, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE[torch.float64])


@pytest.mark.parametrize("strategy", ["all_to_all", "reduce_scatter"])
def test_a_sum_of_gradients_is_not_a_mean(two_ranks, strategy):
    settings = ("sum", True, torch.float64, "SGD")
    one = gathered([train(0, 1, *settings, "mean", strategy)])
    summed = gathered(two_ranks(train, 2, *settings, "sum", strategy))
    assert (summed[1] - one[1]).abs().max() > 1e-3
