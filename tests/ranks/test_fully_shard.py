"""A model with tables and a fully_shard dense part trains the same on two ranks as on one."""

import copy
import math

import pytest
import torch
import torch.distributed as dist

import sparsekit
from sparsekit.distributed import ignored_parameters
from sparsekit.optim import clip_grad_norm_, clip_grad_value_

# All rules run the same code. These three cover all forms of optimizer states.
RULES = ["LazyAdam", "Adam", "RowWiseAdagrad"]


def model(group):
    torch.manual_seed(0)
    layer = sparsekit.EmbeddingBag(99, 5, name="t", mode="sum", process_group=group)
    # The last layer has one row, so rank 1 has no part of its weight and bias.
    return torch.nn.Sequential(layer, torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))


def train(rank, rules, clip):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    alone = [dist.new_group([one]) for one in range(2)][rank]
    mesh = init_device_mesh("cpu", (2,))
    for rule in rules:
        sharded, whole = model(None), model(alone)
        for layer in sharded[1:]:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh, ignored_params=set(ignored_parameters(sharded).values()))
        kind = getattr(sparsekit.optim, rule)
        optimizers = [kind(m.parameters(), lr=0.05) for m in (sharded, whole)]
        for step in range(2):
            keys = torch.randint(0, 30, (8, 3), generator=torch.Generator().manual_seed(step))
            for optimizer in optimizers:
                optimizer.zero_grad()
            sharded(keys[4 * rank : 4 * rank + 4]).square().mean().backward()
            whole(keys).square().mean().backward()
            if clip == "value":
                for one in (sharded, whole):
                    clip_grad_value_(one.parameters(), 1e-3)
            elif clip:
                norm = clip_grad_norm_(sharded.parameters(), 0.01, clip)
                expected = clip_grad_norm_(whole.parameters(), 0.01, clip, process_group=alone)
                torch.testing.assert_close(norm, expected)
            sparsekit.optim.check_finite_gradients(sharded)
            for optimizer in optimizers:
                optimizer.step()
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        keys = torch.arange(30).view(10, 3)
        torch.testing.assert_close(sharded.eval()(keys), whole.eval()(keys))
        for mine, theirs in zip(sharded[1:].parameters(), whole[1:].parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)


@pytest.mark.filterwarnings("ignore")
def test_fully_shard_beside_tables(two_ranks):
    two_ranks(train, RULES, None)
    for clip in (2, math.inf, "value"):
        two_ranks(train, ["SGD"], clip)


def replicas(rank):
    """Return norms of DTensors: sharded, replicated, or each along one axis of a 2-D mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    norms, of_all = [], []
    for mesh, placements in (
        (line, [Shard(0)]),
        (line, [Replicate()]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Replicate()]),
    ):
        gradient = torch.tensor([3.0, 4.0])
        parameter, gradient = (
            DTensor.from_local(local, mesh, placements) for local in (gradient * 0, gradient)
        )
        parameter = torch.nn.Parameter(parameter)
        parameter.grad = gradient
        of_all.append(copy.deepcopy(parameter))
        of_all[-1].grad = copy.deepcopy(gradient)
        norms.append(clip_grad_norm_(parameter, 1.0).item())
        scale = torch.tensor([3.0, 4.0]) / norms[-1]
        torch.testing.assert_close(parameter.grad.to_local(), scale, rtol=1e-5, atol=0)
    return [*norms, clip_grad_norm_(of_all, 1.0).item()]


@pytest.mark.filterwarnings("ignore")
def test_norms_of_replicas_count_once(two_ranks):
    whole, of_all = pytest.approx(math.sqrt(50)), pytest.approx(math.sqrt(150))
    assert two_ranks(replicas) == [[whole, 5, 5, whole, of_all]] * 2


def broken(rank):
    """Return the report of a sharded gradient of which rank 1 has a NaN in its second row."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh, module = init_device_mesh("cpu", (2,)), torch.nn.Module()
    own = torch.zeros(2, 3)
    module.sharded = torch.nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)]))
    own = own.clone()
    own[1, 2] = math.nan if rank == 1 else 0
    module.sharded.grad = DTensor.from_local(own, mesh, [Shard(0)])
    with pytest.raises(sparsekit.optim.NonFiniteGradientError) as caught:
        sparsekit.optim.check_finite_gradients(module)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_a_rank_looks_at_its_own_shard(two_ranks):
    message = "sharded: the gradient on rank 1 has nan at index (1, 2)"
    assert two_ranks(broken) == [message] * 2


def ignored(rank):
    made = torch.nn.Sequential(model(None), torch.nn.BatchNorm1d(1))
    found = ignored_parameters(made)
    assert found["0.0.weight"] is made[0][0].weight
    assert {"0.0.shard", "0.0.owners", "0.0.table.buckets"} <= found.keys()
    assert all(name.startswith("0.0.") for name in found)
    assert ignored_parameters(made[1]) == {}
    # Broadcast everything that is not ignored, as Lightning does in validation.
    made[0][0](torch.tensor([[1, 2, 3, 4]]))
    before = {name: tensor.clone() for name, tensor in found.items()}
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(made, found)
    torch.distributed.utils._sync_module_states(
        made, dist.group.WORLD, 2**20, src=0,
        params_and_buffers_to_ignore=set(made._ddp_params_and_buffers_to_ignore),
    )  # fmt: skip
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.items())


def test_tensors_of_a_table_that_a_model_has_first_by_another_name():
    layer = sparsekit.Embedding(9, 2, name="t")
    made = torch.nn.Module()
    made.tied = layer.weight
    made.register_buffer("first", layer.seed)
    made.layer = layer
    assert {"layer.weight", "layer.seed"} <= ignored_parameters(made).keys()


def test_ignored_parameters(two_ranks):
    two_ranks(ignored)


def accumulate(rank, group=None):
    """Return the gradients accumulated over two half batches, the first half under no_sync."""
    made = model(group)
    keys = torch.randint(0, 30, (8, 3), generator=torch.Generator().manual_seed(0))
    if group is not None:
        made(keys).square().mean().backward()
        return made[1].weight.grad, made
    wrapped = torch.nn.parallel.DistributedDataParallel(made)
    halves = keys[4 * rank : 4 * rank + 4].split(2)
    with wrapped.no_sync():
        (wrapped(halves[0]).square().mean() / 2).backward()
    (wrapped(halves[1]).square().mean() / 2).backward()
    return made[1].weight.grad, made


def accumulated(rank):
    alone = [dist.new_group([one]) for one in range(2)][rank]
    (dense, sharded), (expected, whole) = accumulate(rank), accumulate(rank, alone)
    torch.testing.assert_close(dense, expected)
    for one in (sharded, whole):
        sparsekit.optim.SGD(one.parameters(), lr=0.1).step()
    keys = torch.arange(30).view(10, 3)
    torch.testing.assert_close(sharded.eval()(keys), whole.eval()(keys))


def test_gradients_accumulate_under_ddp(two_ranks):
    two_ranks(accumulated)
