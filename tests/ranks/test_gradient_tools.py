"""Gradients are clipped and checked on two ranks as on one; both ranks get the same result."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.distributed as dist

import sparsekit
from sparsekit.distributed import wrap_ddp
from sparsekit.distributed.shard_gradient import ShardGradient
from sparsekit.distributed.world import settings
from sparsekit.optim.clip import clip_grad_norm_
from sparsekit.optim.finite import NonFiniteGradientError, check_finite_gradients

BATCH, SLOTS, NNZ, DIM = 12, 2, 3, 5
SHARES = {"even": (6, 6), "uneven": (1, 11), "rank 1 has no samples": (12, 0)}
# Keys of a table; with "modulo", rank 0 owns all even keys, so rank 1 learns no row.
KEYS = {"all": lambda keys: keys, "even": lambda keys: 2 * keys}


def backward(rank, share, keys_of, dtype, use_hashtable=True):
    """Return a model with the gradients of a rank's share of the batch."""
    layer = sparsekit.DistributedEmbedding(
        "sum", 90, DIM, SLOTS, NNZ, use_hashtable=use_hashtable, dtype=dtype, name="layer",
        placement="modulo" if keys_of == "even" else None,
    )  # fmt: skip
    torch.manual_seed(0)
    head = torch.nn.Linear(SLOTS * DIM, 1, dtype=dtype)
    model = wrap_ddp(torch.nn.Sequential(layer, torch.nn.Flatten(), head))
    generator = torch.Generator().manual_seed(0)
    keys = KEYS[keys_of](torch.randint(0, 30, (BATCH, SLOTS, NNZ), generator=generator))
    target = torch.randn(BATCH, 1, generator=generator).to(dtype)
    begin = sum(share[:rank])
    mine = slice(begin, begin + share[rank])
    error = model(keys[mine]) - target[mine]
    # Divide by the global batch: with a mean over a rank's samples, ranks would have equal weights,
    # but samples would not.
    ((error * error).sum() * len(share) / BATCH).backward()
    return model, layer, head


def clip(rank, share, keys_of, dtype, max_norm, norm_type, without=None):
    """Clip the gradients; return their norm, each key's clipped gradient and the head's."""
    model, layer, head = backward(rank, share, keys_of, dtype)
    if rank == 1 and without is not None:
        assert layer.weight.grad is None or len(layer.weight.grad._values()) == 0
        layer.weight.grad = None
    parameters = model.parameters()
    if rank == 1 and without == "parameter":
        parameters = [p for p in parameters if p.grad is not None]
    norm = clip_grad_norm_(parameters, max_norm, norm_type)
    if layer.weight.grad is None:
        rows, values = torch.empty(0, dtype=torch.int64), torch.empty(0, DIM, dtype=dtype)
    else:
        rows, values = layer.weight.grad._indices()[0], layer.weight.grad._values()
    gradients = dict(zip(layer.table.keys()[rows].tolist(), values, strict=True))
    return norm, gradients, head.weight.grad, head.bias.grad


def check_clip(two_ranks, share, *arguments, without=None):
    norm, gradients, *head = clip(0, (BATCH,), *arguments)
    _, _, max_norm, _ = arguments
    assert norm > max_norm
    of_ranks = two_ranks(clip, share, *arguments, without)
    close = {"rtol": 0, "atol": 1e-12 if norm.dtype == torch.float64 else 1e-5}
    found = {}
    for rank_norm, rank_gradients, *rank_head in of_ranks:
        torch.testing.assert_close(rank_norm, norm, **close)
        assert torch.equal(rank_norm, of_ranks[0][0])
        torch.testing.assert_close(rank_head, head, **close)
        assert found.keys().isdisjoint(rank_gradients)
        found |= rank_gradients
    torch.testing.assert_close(found, gradients, **close)


@pytest.mark.pairs
@pytest.mark.parametrize("norm_type", [1, 2, 3.5, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("share", SHARES)
def test_two_ranks_clip_as_one(two_ranks, share, keys, dtype, norm_type):
    check_clip(two_ranks, SHARES[share], keys, dtype, 0.1, norm_type)


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize("without", ["gradient", "parameter"])
def test_a_rank_without_a_gradient_takes_part(two_ranks, without, norm_type):
    arguments = ("even", torch.float64, 0.1, norm_type)
    check_clip(two_ranks, SHARES["even"], *arguments, without=without)


def clip_nothing(rank):
    weight = sparsekit.nn.EmbeddingWeight(torch.zeros(2, 2))
    if rank == 0:
        weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    return clip_grad_norm_([weight] if rank == 0 else [], 1)


def test_a_rank_without_parameters_takes_part(two_ranks):
    assert [float(norm) for norm in two_ranks(clip_nothing)] == [5, 5]


def clip_in_groups(rank):
    """Clip in process groups of one rank, each of which has its own tables."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    before = settings.process_group
    sparsekit.init(process_group=groups[rank])
    try:
        weight = sparsekit.nn.EmbeddingWeight(torch.zeros(1, 1))
        weight.grad = torch.tensor([[3.0 + rank]])
        # A group passed as an argument takes precedence over init's group.
        of_all = clip_grad_norm_([weight], math.inf, process_group=dist.group.WORLD).item()
        return clip_grad_norm_([weight], 1).item(), of_all
    finally:
        sparsekit.init(process_group=before)


def test_clipping_in_the_group_of_init(two_ranks):
    assert two_ranks(clip_in_groups) == [(3, 5), (4, 5)]


def total_norm(parameters, **how):
    return torch.nn.utils.get_total_norm([p.grad for p in parameters], **how)


def unscaled(parameters):
    """Access gradients as a GradScaler does, and as code that logs norms does."""
    for p in parameters:
        p.grad = p.grad.coalesce() if p.grad.is_sparse else p.grad
    torch.norm(torch.stack([p.grad.detach().data.norm(2) for p in parameters]))


NORMS_OF_TORCH = {
    "clip": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1),
    "clip foreach": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
    "clip one by one": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1, math.inf, foreach=False),
    "total": total_norm,
    "total foreach": lambda p: total_norm(p, foreach=True),
    "norms": unscaled,
    "copies": lambda p: torch.linalg.norm(copy.deepcopy(p[0].grad).clone() * 2),
}


def clip_by_torch(rank, penalty, twice):
    """Clip with torch's function. Shares are uneven, so the norm of the rows differs by rank."""
    for way in NORMS_OF_TORCH.values():
        model, layer, _ = backward(rank, SHARES["uneven"], "all", torch.float32)
        if twice:
            model(torch.zeros(1, SLOTS, NNZ, dtype=torch.int64)).sum().backward()
        if penalty:  # the penalty covers the whole weight, so the gradient is dense
            layer.weight.square().sum().backward()
        parameters = list(model.parameters())
        before = [p.grad.to_dense().clone() for p in parameters]
        with pytest.raises(RuntimeError, match=r"^layer: .* sparsekit\.optim\.clip_grad_norm_"):
            way(parameters)
        assert all(map(torch.equal, before, [p.grad.to_dense() for p in parameters]))
        # Functions that scale each row separately are correct for a shard, too.
        total = clip_grad_norm_(parameters, math.inf)
        torch.nn.utils.clip_grads_with_norm_(parameters, total / 2, total)
        after = [p.grad.to_dense() for p in parameters]
        torch.testing.assert_close(after, [grad / 2 for grad in before])
        torch.optim.SGD(parameters, lr=0.1).step()
        torch.save(layer.weight.grad, file := io.BytesIO())
        file.seek(0)
        assert type(torch.load(file, weights_only=True)) is torch.Tensor


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_norms_of_torch_are_refused_on_several_ranks(two_ranks, penalty, twice):
    """Each rank would clip by the norm of its own rows, and the dense parameters would diverge."""
    two_ranks(clip_by_torch, penalty, twice)


def clip_own_tables(rank):
    group = [dist.new_group([one]) for one in range(2)][rank]
    layer = sparsekit.Embedding(9, 2, name="own", process_group=group)
    layer(torch.tensor([3, 4])).square().sum().backward()
    assert type(layer.weight.grad) is torch.Tensor


def test_gradients_of_whole_tables_are_tensors_of_torch(two_ranks):
    two_ranks(clip_own_tables)


def clip_bad(rank, bad_rank, bad, norm_type, error_if_nonfinite):
    model, layer, _ = backward(rank, SHARES["even"], "all", torch.float32)
    if rank == bad_rank:
        layer.weight.grad._values()[1, 2] = bad
    return clip_grad_norm_(model.parameters(), 1, norm_type, error_if_nonfinite)


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_all_ranks_see_a_norm_that_is_not_finite(two_ranks, bad_rank, bad, norm_type):
    norms = two_ranks(clip_bad, bad_rank, bad, norm_type, False)
    assert [str(float(norm)) for norm in norms] == [str(bad)] * 2
    for outcome in two_ranks.outcomes(clip_bad, bad_rank, bad, norm_type, True):
        assert outcome.type == "RuntimeError"
        assert f"is {bad}" in outcome.message


def clip_alone(rank):
    """Return norms over process groups of one rank, which share nothing."""
    groups = [dist.new_group([one]) for one in range(2)]
    weight = sparsekit.nn.EmbeddingWeight(torch.zeros(1))
    weight.grad = torch.tensor([3.0 + rank])
    return [
        clip_grad_norm_(weight, math.inf, process_group=groups[rank]),
        clip_grad_norm_(weight, math.inf),
    ]


def test_the_group_may_be_given(two_ranks):
    assert [[float(norm) for norm in norms] for norms in two_ranks(clip_alone)] == [[3, 5], [4, 5]]


def twice(rank, strategy):
    """Check that the gradient of an output can be differentiated again, but a table's raises."""
    layer = sparsekit.DistributedEmbedding("sum", 90, DIM, 1, NNZ, name="layer", strategy=strategy)
    keys = torch.arange(6).view(2, 1, 3) + rank
    out = layer(keys)
    (of_output,) = torch.autograd.grad(out.pow(3).sum(), out, create_graph=True)
    (of_table,) = torch.autograd.grad(of_output.sum(), layer.weight)
    (expected,) = torch.autograd.grad((3 * layer(keys).square()).sum(), layer.weight)
    torch.testing.assert_close(of_table.to_dense(), expected.to_dense())
    (of_table,) = torch.autograd.grad(layer(keys).pow(3).sum(), layer.weight, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^layer: a gradient of the table"):
        of_table.to_dense().sum().backward()


@pytest.mark.parametrize("strategy", ["all_to_all", "reduce_scatter"])
def test_a_gradient_of_a_sharded_gradient_is_refused(two_ranks, strategy):
    two_ranks(twice, strategy)


def check(rank, broken, use_hashtable):
    """Return the key of the first broken row, and what check_finite_gradients reports.

    On the ranks in `broken`, the second row of the gradient has an infinity; on rank 0, the third
    row has one, too.
    """
    model, layer, head = backward(rank, SHARES["uneven"], "all", torch.float32, use_hashtable)
    key = None
    if rank in broken:
        grad = layer.weight.grad
        grad._values()[1 : 3 - rank, 4] = math.inf
        row = int(grad._indices()[0, 1])
        key = int(layer.table.keys()[row]) if use_hashtable else 2 * row + rank
    if "head" in broken:
        head.bias.grad.fill_(math.nan)
    try:
        check_finite_gradients(model)
    except NonFiniteGradientError as error:
        return key, (str(error), error.layer, error.key, error.rank)
    return key, None


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize("broken", [[0], [1], [0, 1]])
def test_all_ranks_raise_together(two_ranks, broken, use_hashtable):
    (key, error), (other_key, other_error) = two_ranks(check, broken, use_hashtable)
    keys = [key, other_key]
    assert error == other_error
    message, *attributes = error
    assert attributes == ["layer", keys[broken[0]], broken[0]]
    lines = message.splitlines()
    assert len(lines) == len(broken)
    for rank, line in zip(broken, lines, strict=True):
        assert line.startswith(f"layer: the gradient on rank {rank} has inf at key {keys[rank]}, ")
        assert line.endswith(f"column 4; not finite in {2 - rank} row(s)")


def test_dense_gradients_of_ranks(two_ranks):
    outcomes = two_ranks(check, ["head"], True)
    assert outcomes[0] == outcomes[1]
    message, *attributes = outcomes[0][1]
    assert attributes == ["module.2.bias", None, 0]
    assert message.splitlines() == [
        f"module.2.bias: the gradient on rank {rank} has nan at index (0,)" for rank in range(2)
    ]


def test_finite_gradients_of_ranks(two_ranks):
    assert two_ranks(check, [], True) == [(None, None)] * 2


def check_alone(rank):
    """Check each rank's gradients in a separate group; rank 1 has a NaN."""
    groups = [dist.new_group([one]) for one in range(2)]
    model, layer, _ = backward(rank, SHARES["even"], "all", torch.float32)
    if rank == 1:
        layer.weight.grad._values().fill_(math.nan)
    check_finite_gradients(model, process_group=groups[rank])


def test_the_group_of_the_check_may_be_given(two_ranks):
    none, raised = two_ranks.outcomes(check_alone)
    assert none is None
    assert raised.type == "NonFiniteGradientError"
    assert raised.message.startswith("layer: the gradient on rank 0 has nan at key ")
    assert "\n" not in raised.message


def test_what_is_made_of_a_shards_gradient_is_one():
    """Results computed from a ShardGradient are ShardGradients: torch's norm would be wrong."""
    own = ShardGradient.of(torch.ones(3, 2), "users")
    ones = torch.ones(3, 2)
    for made in (own * 2, torch.add(ones, own), torch.where(ones > 0, own, ones), own + ones):
        assert isinstance(made, ShardGradient)
        with pytest.raises(RuntimeError, match="users: this gradient has the rows of one rank"):
            torch.linalg.vector_norm(made)
    assert not isinstance(own.sum(), ShardGradient)
    assert torch.add(own, ones, alpha=2).tolist() == [[3.0, 3.0]] * 3


def test_what_is_no_gradient_of_a_shard_is_a_plain_tensor():
    own = ShardGradient.of(torch.ones(3, 2), "users")
    sparse = ShardGradient.of(torch.ones(3, 2).to_sparse(1), "users")
    for made in (own * torch.ones(3, 2, requires_grad=True), sparse.to_dense(), own.flatten()):
        assert type(made) is torch.Tensor
    assert type(sparse * 2) is ShardGradient
    copied = copy.deepcopy(own)
    copied.zero_()
    assert own.all()
    with pytest.raises(RuntimeError, match=r"^a table: this gradient has the rows of one rank"):
        torch.linalg.vector_norm(x=own)


def layers_of_gradients(rank):
    layers = {name: sparsekit.Embedding(9, 2, name=name) for name in "ab"}
    keys = torch.arange(3)
    sum(sparsekit.EmbeddingGroup(layers)(dict.fromkeys(layers, keys)).values()).sum().backward()
    return [layer.weight.grad.layer for layer in layers.values()]


def test_each_gradient_of_a_group_names_its_own_layer(two_ranks):
    assert two_ranks(layers_of_gradients) == [["a", "b"]] * 2


NORMS = {
    "linalg.vector_norm": torch.linalg.vector_norm,
    "linalg.matrix_norm": torch.linalg.matrix_norm,
    "linalg.norm": torch.linalg.norm,
    "norm": torch.norm,
    "method": lambda gradient: gradient.norm(),
    "foreach": lambda gradient: torch._foreach_norm([torch.ones(2), gradient]),
    "foreach of a tuple": lambda gradient: torch._foreach_norm((torch.ones(2), gradient)),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_every_norm_of_torch_is_refused(norm):
    own = ShardGradient.of(torch.ones(3, 2), "users")
    for gradient in (own, copy.deepcopy(own)):
        with pytest.raises(RuntimeError, match="users: this gradient has the rows of one rank"):
            norm(gradient)
    # Only a plain tensor is pickled, so a file can be read without sparsekit.
    assert type(pickle.loads(pickle.dumps(own))) is torch.Tensor
