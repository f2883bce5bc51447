"""Tests of init, wrap_ddp and operations on a sharded layer."""

import copy
import inspect
import io
import itertools
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import sparsekit
from sparsekit.distributed import exchange_of, wrap_ddp
from sparsekit.distributed.world import settings


@pytest.fixture
def restore():
    before = dict(vars(settings))
    yield
    vars(settings).clear()
    vars(settings).update(before)


def test_a_seed_changes_all_initial_vectors(restore):
    def vectors():
        layer = sparsekit.DistributedEmbedding("sum", 9, 4, 1, 1, name="seeded")
        return layer(torch.tensor([[[5]]])).detach()

    first = vectors()
    sparsekit.init(seed=7)
    assert not torch.equal(vectors(), first)
    sparsekit.init(seed=0)
    assert torch.equal(vectors(), first)
    sparsekit.init(seed=-1)  # has the same 64 bits as the seed below
    last = vectors()
    sparsekit.init(seed=2**64 - 1)
    assert torch.equal(vectors(), last)


def test_init_sets_and_resets_a_wire_dtype(restore):
    for dtype in (torch.bfloat16, None):
        sparsekit.init(wire_dtype=dtype)
        assert settings.wire_dtype is dtype
    assert str(inspect.signature(sparsekit.init)).count("= <as it is>") == 5


def test_what_init_begins_with():
    first = type(settings)()
    assert (first.seed, first.process_group, first.backend) == (0, None, "auto")
    assert first.wire_dtype is None
    assert first.timeout == timedelta(minutes=5)


def test_init_takes_seconds_and_timedeltas(restore):
    sparsekit.init(global_batch_size=64, timeout=2.5)
    assert settings.timeout == timedelta(seconds=2.5)
    sparsekit.init(timeout=timedelta(minutes=1))
    assert settings.timeout == timedelta(minutes=1)


def test_init_keeps_what_is_not_given(restore):
    group = object()
    sparsekit.init(seed=5, process_group=group, backend="torch", timeout=7)
    for arguments in ({}, {"timeout": 8}, {"backend": "auto"}, {"process_group": None}):
        before = dict(vars(settings))
        sparsekit.init(**arguments)
        expected = {**before, **arguments}
        if "timeout" in arguments:
            expected["timeout"] = timedelta(seconds=8)
        assert vars(settings) == expected
    before = dict(vars(settings))
    with pytest.raises(ValueError, match="timeout must be positive"):
        sparsekit.init(seed=6, process_group=object(), timeout=-1)
    with pytest.raises(ValueError, match="backend must be one of"):
        sparsekit.init(seed=6, process_group=object(), timeout=9, backend="mpi")
    assert vars(settings) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"seed": 2**64}, ValueError, "sparsekit.init: seed must be in"),
        ({"seed": "a"}, TypeError, "sparsekit.init: seed must be an int"),
        ({"timeout": 0}, ValueError, "sparsekit.init: timeout must be positive"),
        ({"global_batch_size": 0}, ValueError, "sparsekit.init: global_batch_size"),
        ({"wire_dtype": torch.float16}, ValueError, "wire_dtype must be one of None, torch.bfloa"),
    ],
)
def test_what_init_refuses(restore, arguments, error, message):
    with pytest.raises(error, match=message):
        sparsekit.init(**arguments)


def test_one_process_needs_no_exchange():
    assert exchange_of(None, torch.device("cpu")) is None
    model = torch.nn.Linear(2, 2)
    assert wrap_ddp(model) is model


def copies_train_alike(rank, named_group):
    """Check that a copied, a loaded and an unpickled layer train like the original."""
    group = dist.group.WORLD if named_group else None
    layer = sparsekit.DistributedEmbedding("sum", 40, 3, 1, 2, name="copied", process_group=group)
    keys = torch.tensor([[[1, 2]], [[3, 4 + rank]]])
    layer(keys)
    loaded = sparsekit.DistributedEmbedding("sum", 40, 3, 1, 2, name="copied", seed=5)
    loaded.load_state_dict(layer.state_dict())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    others = [copy.deepcopy(layer), loaded, torch.load(file, weights_only=False)]
    more = torch.tensor([[[5, 2]], [[6, 1]], [[7 - rank, 0]]])
    expected = layer(more)
    for other in others:
        assert torch.equal(other(more), expected)
        assert torch.equal(other.table.keys(), layer.table.keys())


@pytest.mark.parametrize("named_group", [False, True])
def test_copies_of_a_sharded_layer(two_ranks, named_group):
    two_ranks(copies_train_alike, named_group)


def saved_as_a_whole(rank):
    layer = sparsekit.DistributedEmbedding("sum", 40, 3, 1, 2, name="saved")
    layer(torch.tensor([[[1, 2]]]))
    file = io.BytesIO()
    torch.save(layer, file)
    return file.getvalue()


def test_a_layer_of_two_ranks_is_refused_where_there_is_one(two_ranks):
    for rank, saved in enumerate(two_ranks(saved_as_a_whole)):
        layer = torch.load(io.BytesIO(saved), weights_only=False)
        keys = torch.tensor([3, 4])
        for call in (
            lambda: layer(keys.view(1, 1, 2)),  # noqa: B023
            lambda: layer.vectors(keys),  # noqa: B023
            lambda: layer.assign(keys, torch.ones(2, 3)),  # noqa: B023
        ):
            with pytest.raises(RuntimeError, match=f"saved: made on rank {rank} of 2, .* 0 of 1"):
                call()
        assert len(layer.table) == 1


def copy_with_a_prefetched_batch(rank):
    layer = sparsekit.DistributedEmbedding("sum", 40, 3, 1, 1, name="prefetched")
    group = sparsekit.EmbeddingGroup({"t": layer})
    batch = {"t": torch.arange(3).view(3, 1, 1) + rank}
    group.prefetch(batch)
    other = copy.deepcopy(group)
    expected = group(batch)["t"]
    assert torch.equal(other(batch)["t"], expected)


def test_copy_of_a_group_with_a_prefetched_batch(two_ranks):
    two_ranks(copy_with_a_prefetched_batch)


def compiled(rank):
    layer = sparsekit.DistributedEmbedding("mean", 40, 3, 1, 2, name="compiled")
    model = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(3, 1))
    keys = torch.tensor([[[1, 2]], [[3, 4 + rank]]])
    expected = model(keys)
    expected.sum().backward()
    grad = layer.weight.grad.to_dense()
    layer.weight.grad = None
    out = torch.compile(model, backend="aot_eager")(keys)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert torch.equal(layer.weight.grad.to_dense(), grad)


def test_torch_compile(two_ranks):
    two_ranks(compiled)


def timeout_of_a_layer_that_is_there(rank):
    layer = sparsekit.DistributedEmbedding("sum", 40, 3, 1, 1, name="t")
    keys = torch.tensor([[[1]]])
    layer(keys)
    sparsekit.init(timeout=5)
    layer(keys)
    if rank == 1:
        return 0
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="no answer from all other ranks"):
        layer(keys)
    return time.monotonic() - began


def test_a_timeout_that_is_set_later(fresh_ranks):
    waited = fresh_ranks(2, timeout=60)(timeout_of_a_layer_that_is_there)[0]
    assert 4.5 <= waited < 50


def alone_in_a_group(rank):
    groups = [dist.new_group([r]) for r in range(2)]
    layer = sparsekit.DistributedEmbedding(
        "sum", 40, 3, 1, 1, name="alone", process_group=groups[rank]
    )
    assert layer.exchange is None
    for number in range(3 + rank):  # ranks may make different numbers of calls
        layer(torch.arange(4).view(4, 1, 1) + 4 * number)
    assert layer.table.keys().tolist() == list(range(4 * (3 + rank)))


def test_a_group_of_one_rank_exchanges_nothing(two_ranks):
    two_ranks(alone_in_a_group)


def ignored_by_ddp(rank):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = sparsekit.DistributedEmbedding(
                "sum", 40, 3, 1, 1, name="ddp", placement="modulo"
            )
            self.head = torch.nn.Linear(3, 1)
            self.norm = torch.nn.BatchNorm1d(1)

        def forward(self, keys):
            return self.norm(self.head(self.embed(keys).flatten(1)))

    torch.manual_seed(rank)
    model = Model()
    wrapped = wrap_ddp(model)
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    keys = torch.arange(4).view(4, 1, 1) + 10 * rank
    for _ in range(3):  # DDP broadcasts buffers before each forward, but not the table's
        wrapped(keys).square().sum().backward()
    heads = [None] * 2
    dist.all_gather_object(heads, (model.head.weight, model.head.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*heads, strict=True))
    return model.embed.table.keys().tolist()


def test_ddp_leaves_the_tables_alone(two_ranks):
    keys = two_ranks(ignored_by_ddp)
    assert sorted(keys[0]) == [0, 2, 10, 12]
    assert sorted(keys[1]) == [1, 3, 11, 13]


def state_of_another_rank(rank):
    layer = sparsekit.DistributedEmbedding("sum", 40, 3, 1, 2, name="s", use_hashtable=False)
    states = [None] * 2
    dist.all_gather_object(states, layer.state_dict())
    layer.load_state_dict(states[rank])
    whole = {name: value for name, value in states[rank].items() if name != "shard"}
    for state, owner in ((states[1 - rank], f"rank {1 - rank} of 2"), (whole, "rank 0 of 1")):
        with pytest.raises(RuntimeError, match=f"s: the state is that of {owner}"):
            layer.load_state_dict(state)


def test_a_state_of_another_rank_is_refused(two_ranks):
    two_ranks(state_of_another_rank)


class Projected(sparsekit.DistributedEmbedding):
    """Layer that also contains a dense part."""

    def __init__(self):
        super().__init__("sum", 40, 3, 1, 1, name="projected")
        self.project = torch.nn.Linear(3, 2)

    def forward(self, keys):
        return self.project(super().forward(keys))


def dense_part_of_a_subclass(rank):
    torch.manual_seed(rank)
    layer = Projected()
    wrapped = wrap_ddp(torch.nn.Sequential(layer))
    wrapped(torch.tensor([[[rank]]])).sum().backward()
    weights = [None] * 2
    dist.all_gather_object(weights, (layer.project.weight, layer.project.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_ddp_takes_the_dense_part_of_a_subclass(two_ranks):
    two_ranks(dense_part_of_a_subclass)


def in_a_group_of_its_own(rank):
    """Check that ranks 0 and 1 share one table, while rank 2 has a separate table."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = groups[rank // 2]
    layer = sparsekit.DistributedEmbedding(
        "sum", 40, 3, 1, 1, name="part", process_group=mine,
        placement="modulo",
    )  # fmt: skip
    layer(torch.arange(6).view(6, 1, 1)).sum().backward()
    return layer.world_size, len(layer.table)


def test_a_group_of_some_ranks(fresh_ranks):
    assert fresh_ranks(3)(in_a_group_of_its_own) == [(2, 3), (2, 3), (1, 6)]


# This program runs in another process and prints its number of threads as it ends.
ENDING = """
import atexit, os, sys, time
rank, file, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]

def threads():
    return len(os.listdir("/proc/self/task"))

@atexit.register  # the last to be called
def tell():
    left, given_up = before[ending == "raise"], time.monotonic() + 20
    while threads() > left and time.monotonic() < given_up:
        time.sleep(0.01)  # one that has been joined may be listed for a moment longer
    print(*before, threads())

import torch, torch.distributed as dist
import sparsekit
torch.set_num_threads(1)
before = [threads()]
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
before.append(threads())
layer = sparsekit.DistributedEmbedding("sum", 40, 3, 1, 1, name="last")
layer(torch.arange(4).view(4, 1, 1)).sum().backward()
dist.barrier()
before.append(threads())
if ending == "raise":
    layer(torch.zeros(1, 1, 1))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ending", ["return", "raise"])
def test_no_thread_of_gloo_is_left_when_python_ends(ending, tmp_path):
    # A thread that uses Python after its finalization aborts the process, but only now and then.
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDING, str(rank), str(tmp_path / "ranks"), ending],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        output, errors = process.communicate()
        assert process.returncode == (ending == "raise"), errors
        alone, of_program, of_layer, at_end = map(int, output.split())
        assert alone < of_program < of_layer
        assert at_end == (of_program if ending == "raise" else alone)


def of_several_sizes(rank):
    # The ranks may have made different numbers of layers before.
    sparsekit.tables.embedding_table._names = itertools.count()
    layer = sparsekit.Embedding(10 + rank, 3, seed=1)
    return layer(torch.tensor([5])).shape


def test_ranks_may_have_room_for_different_numbers_without_a_name(two_ranks):
    assert two_ranks(of_several_sizes) == [(1, 3)] * 2
