"""torch's tools for replicated parameters skip tables or raise an error."""

import copy
import io
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import sparsekit


def model(**keywords):
    layer = sparsekit.DistributedEmbedding("sum", 40, 3, 1, 1, name="table", **keywords)
    return torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(3, 1))


def keys(*numbers):
    return torch.tensor(numbers).view(-1, 1, 1)


def wrapped_as_it_is(rank, use_hashtable):
    torch.manual_seed(rank)
    made = model(use_hashtable=use_hashtable)
    layer = made[0]
    numbers = keys(2, 3, 8, 9)
    before = layer(numbers).detach()
    wrapped = DistributedDataParallel(torch.nn.ModuleDict({"inner": made})["inner"])
    assert torch.equal(layer(numbers), before)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for _ in range(2):
        wrapped(numbers).square().sum().backward()
        optimizer.step()
    layer.eval()
    assert torch.equal(layer(numbers), layer(numbers))
    assert not torch.equal(layer(numbers), before)
    heads = [None] * 2
    dist.all_gather_object(heads, made[2].weight)
    assert torch.equal(*heads)
    return layer(numbers).detach(), layer.weight.detach()[:4]


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_plain_ddp_leaves_tables_alone(two_ranks, use_hashtable):
    (vectors, rows), (same_vectors, other_rows) = two_ranks(wrapped_as_it_is, use_hashtable)
    assert torch.equal(vectors, same_vectors)
    assert not torch.equal(rows, other_rows)


def nothing_but_a_table(rank):
    with pytest.raises(RuntimeError, match="table: DistributedDataParallel has nothing to do"):
        DistributedDataParallel(model()[:1])


def test_ddp_of_a_table_alone(two_ranks):
    two_ranks(nothing_but_a_table)


def with_a_frozen_dense_part(rank):
    made = model()
    made[2].requires_grad_(False)
    wrapped = sparsekit.distributed.wrap_ddp(made)
    assert wrapped is made  # DistributedDataParallel would raise without trainable parameters
    wrapped(keys(2, 3)).sum().backward()
    assert made[0].weight.grad is not None
    assert made[2].weight.grad is None
    made[2].bias.requires_grad_(True)
    wrapped = sparsekit.distributed.wrap_ddp(made)
    assert isinstance(wrapped, DistributedDataParallel)
    wrapped(keys(2, 3) + rank).sum().backward()
    assert made[2].bias.grad == 2


def test_wrap_ddp_of_a_frozen_dense_part(two_ranks):
    two_ranks(with_a_frozen_dense_part)


def overwritten(rank):
    made = model()
    made(keys(2, 3))
    for tensor in made.state_dict(keep_vars=True).values():
        dist.broadcast(tensor.data.view(torch.uint8), 0)  # gloo cannot send int16
    with pytest.raises(RuntimeError, match=r"holds the table of rank 0 of 2.*wrap_ddp") as caught:
        made.eval()(keys(2, 3))
    assert ("on rank 1: " in str(caught.value)) == (rank == 0)


def test_a_table_that_another_has_overwritten(two_ranks):
    two_ranks(overwritten)


def redundancy(rank):
    # Import here: the import causes warnings about torch's own code.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    made = model(placement="modulo")  # one key for each rank
    made(keys(2, 3)).sum().backward()
    rows = made[0].weight.detach().clone()
    optimizer = ZeroRedundancyOptimizer(made.parameters(), torch.optim.SGD, lr=0.0)
    with pytest.raises(RuntimeError, match="ZeroRedundancyOptimizer would copy"):
        optimizer.step()
    assert torch.equal(made[0].weight, rows)
    tables, dense = sparsekit.split_embedding_variable_from_others(made)
    for optimizer in (
        ZeroRedundancyOptimizer(dense, torch.optim.SGD, lr=0.1),
        sparsekit.optim.SGD(tables, lr=0.1),
    ):
        optimizer.step()
    assert not torch.equal(made[0].weight, rows)


def test_zero_redundancy_optimizer_is_refused(two_ranks):
    two_ranks(redundancy)


def fully_sharded(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    made, mesh = model(), init_device_mesh("cpu", (2,))
    rows = made[0](keys(2, 3)).detach()
    with pytest.raises(RuntimeError, match="table: fully_shard would take the table apart"):
        fully_shard(made, mesh=mesh)
    assert torch.equal(made[0](keys(2, 3)), rows)
    made = model()
    fully_shard(made, mesh=mesh, ignored_params={made[0].weight})
    assert torch.equal(made[0](keys(2, 3)), rows)
    with pytest.raises(RuntimeError, match="table: FullyShardedDataParallel would take"):
        FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    made = model()
    FullyShardedDataParallel(made, device_id=torch.device("cpu"), ignored_states=[made[0]])


@pytest.mark.filterwarnings("ignore")
def test_fully_sharded_data_parallel_is_refused(two_ranks):
    two_ranks(fully_sharded)


def checkpoint(rank, folder):
    made = model()
    made(keys(2, 3, 4, 5))
    states = [{"model": made.state_dict()}, copy.deepcopy(made.state_dict())]
    for state in states:
        with pytest.raises(BaseException, match=r"table: .* would keep one rank's .*DcpState"):
            dcp.save(state, checkpoint_id=f"{folder}/dcp")

    # torch.save works: each rank saves its own state.
    torch.save(made.state_dict(), f"{folder}/{rank}.pt")
    for assign in (False, True):
        loaded = model(seed=7)
        state = torch.load(f"{folder}/{rank}.pt", weights_only=True)
        assert type(state["0.shard"]) is torch.Tensor
        loaded.load_state_dict(state, assign=assign)
        assert torch.equal(loaded(keys(2, 3, 4, 5)), made(keys(2, 3, 4, 5)))
        loaded.load_state_dict(made.state_dict(), assign=assign)
        copy.deepcopy(loaded)
    state = torch.load(f"{folder}/0.pt", weights_only=True)
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"rank 0 of 2.*each rank saves its own"):
            made.load_state_dict(state)


def warned_of(rank, savers, copies):
    """Save on some ranks only; return the warnings of each of the next two lookups."""
    table = sparsekit.Embedding(10, 4, name="saved")
    keys = torch.tensor([1, 2])
    table(keys)
    if rank in savers:
        torch.save(copy.deepcopy(table.state_dict()), io.BytesIO())
    for _ in range(copies):
        copy.deepcopy(table.state_dict())
    said = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            table(keys)
        said.append([str(warning.message) for warning in caught])
    return said


def test_a_state_that_is_saved_on_one_rank_only(two_ranks):
    for first, second in two_ranks(warned_of, [0], 0):
        assert len(first) == 1
        assert "saved on ranks [0] and not on ranks [1]" in first[0]
        assert second == []


def test_states_that_are_saved_on_all_ranks_or_none(two_ranks):
    assert two_ranks(warned_of, [0, 1], 1) == two_ranks(warned_of, [], 1) == [[[], []]] * 2


def test_a_checkpoint_of_one_rank_is_refused(two_ranks, tmp_path):
    two_ranks(checkpoint, str(tmp_path))


def average(rank, use_hashtable, lazy):
    """A vector's average includes the value looked up after each step, even before a row exists."""
    made = model(use_hashtable=use_hashtable)
    averaged = AveragedModel(made)
    kind = sparsekit.optim.Adam if lazy else sparsekit.optim.SGD
    optimizer = kind(made[:1].parameters(), lr=0.1)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        made[0](keys(2 * step, 2 * step + 1)).square().sum().backward()  # the other keys are late
        optimizer.step()
        averaged.update_parameters(made)
        seen.append(made[0].eval()(keys(*range(9))).detach())
        made.train()
    found = copy.deepcopy(averaged).eval().module[0](keys(*range(9)))
    torch.testing.assert_close(found, torch.stack(seen).mean(0))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("use_hashtable", [True, False])
def test_averaged_model(two_ranks, use_hashtable, lazy):
    average(0, use_hashtable, lazy)
    two_ranks(average, use_hashtable, lazy)


def test_an_average_of_other_rows():
    """A row of the average follows its key in the model, even if other keys were inserted."""
    made = model()
    averaged = AveragedModel(made)
    made[0](keys(1))
    averaged.update_parameters(made)
    averaged.module[0](keys(5, 6))
    expected = made[0](keys(1, 2, 3))
    averaged.update_parameters(made)
    assert torch.equal(averaged.module[0](keys(1, 2, 3)), expected)


def test_an_average_of_rows_that_an_optimizer_moved_before_any_key():
    made = model()
    averaged = AveragedModel(made)
    made[0].weight.grad = torch.ones_like(made[0].weight)
    torch.optim.SGD(made[0].parameters(), lr=0.1).step()
    averaged.update_parameters(made)
    expected = model()[0].eval()(keys(1))
    assert torch.equal(averaged.module[0].eval()(keys(1)), expected)


def test_an_average_of_buffers_is_refused():
    made = model()
    averaged = AveragedModel(made, use_buffers=True)
    with pytest.raises(ValueError, match=r"table: AveragedModel.use_buffers=True. would average"):
        averaged.update_parameters(made)


def test_an_average_of_buffers_without_tables_is_left_to_torch():
    made = torch.nn.BatchNorm1d(2)
    averaged = AveragedModel(made, use_buffers=True)
    made.running_mean.fill_(3)
    averaged.update_parameters(made)
    assert torch.equal(averaged.module.running_mean, made.running_mean)


def test_an_averaged_model_is_saved_whole():
    averaged = AveragedModel(model())
    file = io.BytesIO()
    torch.save(averaged, file)
    file.seek(0)
    torch.load(file, weights_only=False).update_parameters(model())
