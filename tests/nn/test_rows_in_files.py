"""A layer with storage="mmap:FOLDER" trains, saves and is copied like one in memory."""

import copy
import errno
import gc
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interruptions import interrupt
from optim.cases import OPTIMIZERS, make

import sparsekit
from sparsekit import TableFullError, checkpoint, memory, row_files
from sparsekit.optim import fuse_in_backward

from .test_growing_layers import assert_same, batches, train

KILLED = """
import os, signal, torch, sparsekit
layer = sparsekit.Embedding(5000, 8, name="t", storage="mmap:{}")
optimizer = sparsekit.optim.LazyAdam(layer.parameters())
for i in range(9):
    layer(torch.arange(500 * i, 500 * i + 500)).sum().backward()
    optimizer.step()
os.kill(os.getpid(), signal.SIGKILL)
"""
PAGE = os.sysconf("SC_PAGESIZE")
POLICIES = {
    "fixed": {},
    "grow": {"on_full": "grow"},
    "evict": {"on_full": "evict", "max_rows": 100, "score": "lfu"},
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def options_of(policy):
    rows = {"fixed": 2000, "grow": 2, "evict": 150}[policy]
    return rows, {"name": "t", "dtype": torch.float64, **POLICIES[policy]}


def in_memory(policy="fixed", dim=3, **options):
    rows, own = options_of(policy)
    return sparsekit.Embedding(rows, dim, **own, **options)


def in_file(folder, policy="fixed", dim=3, pages=3, **options):
    storage = {"storage": f"mmap:{folder}", "max_resident_bytes": pages * PAGE}
    return in_memory(policy, dim, **storage, **options)


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fused", [False, True], ids=["step", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_in_memory(name, fused, policy, folder, backend):
    layers = in_file(folder, policy), in_memory(policy)
    optimizers = [make(name, layer.parameters()) for layer in layers]
    for layer, optimizer in zip(layers, optimizers, strict=True):
        if fused:
            fuse_in_backward(optimizer, layer)
        train(layer, optimizer, batches(13, size=24))
    assert len(layers[0].table) > 80
    assert_same(*layers, optimizers)
    assert os.listdir(folder) == []  # the files have no names


@pytest.mark.parametrize("dim", [1, 7, 64, 300, 1500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_records_of_all_sizes(dim, dtype, folder):
    layers = [
        sparsekit.Embedding(600, dim, name="t", dtype=dtype, **storage)
        for storage in ({}, {"storage": f"mmap:{folder}", "max_resident_bytes": 20 * PAGE})
    ]
    optimizers = [sparsekit.optim.LazyAdam(one.parameters()) for one in layers]
    for layer, optimizer in zip(layers, optimizers, strict=True):
        for batch in batches(15):
            layer(batch).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*layers, optimizers)
    weight = layers[1].weight
    columns = [weight, *(optimizers[1].state[weight][x] for x in ("exp_avg", "exp_avg_sq"))]
    begins = [column.data_ptr() for column in columns]
    assert max(begins) - min(begins) < 3 * 4 * dim + 8  # in one record


def test_without_a_hash_table(folder):
    kind = {"use_hashtable": False, "name": "t", "embedding_initializer": sparsekit.nn.Normal()}
    layers = [
        sparsekit.DistributedEmbedding("sum", 3000, 5, 1, **kind, **storage)
        for storage in ({}, {"storage": f"mmap:{folder}", "max_resident_bytes": 4 * PAGE})
    ]
    assert torch.equal(*(one.weight for one in layers))
    for layer in layers:
        optimizer = sparsekit.optim.Adagrad(layer.parameters())
        for batch in batches(20):
            layer(batch.reshape(-1, 1, 1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(*(one.weight for one in layers))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_that_prefetches(policy, folder):
    layers = in_memory(policy), in_file(folder, policy)
    for layer in layers:
        group = sparsekit.EmbeddingGroup({"t": layer})
        optimizer = sparsekit.optim.LazyAdam(layer.parameters())
        each = [{"t": batch} for batch in batches(25)]
        for batch, after in zip(each, [*each[1:], None], strict=True):
            loss = group(batch)["t"].square().sum()
            if after is not None:
                group.prefetch(after)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*layers)


def test_prefetch_asks_for_the_rows_of_the_next_batch(folder):
    layer = in_file(folder, dim=512)
    group = sparsekit.EmbeddingGroup({"t": layer})
    group({"t": torch.arange(100)})
    layer.files._known[:] = 0
    group.prefetch({"t": torch.tensor([3, 5, 1 << 40])})
    pages = layer.files._known.nonzero()[0].tolist()
    assert pages == [3, 5]  # a row has 4,096 bytes
    assert len(layer.table) == 100  # nothing has been looked up


def test_memory_is_as_much_as_the_budget(folder):
    dim, budget = 512, 64
    layer = in_file(folder, dim=dim, pages=budget)
    if not _leaves_memory(folder):
        pytest.skip("pages of this file system cannot leave memory")
    optimizer = sparsekit.optim.SGD(layer.parameters())
    draw = torch.Generator().manual_seed(0)
    most = 0
    for _ in range(100):
        layer(torch.randint(0, 2000, (8,), generator=draw)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        most = max(most, layer.files.resident_bytes())
    assert len(layer.table) > 600
    # Pages that are being written are in memory, too, and 128 rows without a key, which a lookup
    # checks for values.
    assert most <= (budget + 16 + 128) * PAGE
    before = layer.weight[:600].clone()
    assert layer.files.resident_bytes() >= 600 * PAGE  # other code has gone through all
    layer(torch.arange(8))
    layer(torch.arange(1500, 1508))
    layer(torch.arange(1600, 1608))
    assert torch.equal(layer.weight[:600], before)


def _leaves_memory(folder):
    with open(folder / "probe", "w+b") as probe:
        probe.write(bytes(PAGE))
        probe.flush()
        os.fsync(probe.fileno())
        os.posix_fadvise(probe.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        there = subprocess.run(["fincore", "-nbo", "PAGES", probe.name], capture_output=True)
    os.unlink(folder / "probe")
    return there.returncode == 0 and there.stdout.strip() == b"0"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["checkpoint", "increments", "background", "state_dict", "pickle"])
def test_a_run_is_resumed(way, policy, folder, tmp_path_factory):
    keys = batches(30)
    whole = in_memory(policy)
    optimizer = make("LazyAdam", whole.parameters())
    train(whole, optimizer, keys)

    first = in_file(folder, policy)
    of_first = make("LazyAdam", first.parameters())
    place = tmp_path_factory.mktemp("saved") / "c"
    train(first, of_first, keys[:10])
    second = in_file(folder, policy)
    of_second = make("LazyAdam", second.parameters())
    if way == "increments":
        checkpoints = checkpoint.Checkpoints(place, complete_every=10)
        checkpoints.save(1, first, of_first)
        train(first, of_first, keys[10:15])
        checkpoints.save(2, first, of_first)
        checkpoints.load(second, of_second)
    elif way == "background":
        checkpoints = checkpoint.Checkpoints(place)
        checkpoints.async_save(1, first, of_first)
        train(first, of_first, keys[10:15])  # changes rows while they are written
        checkpoints.wait()
        checkpoints.load(second, of_second)
    elif way == "checkpoint":
        checkpoint.save(first, place, of_first)
        checkpoint.load(second, place, of_second)
    elif way == "state_dict":
        file = io.BytesIO()
        torch.save([first.state_dict(), of_first.state_dict()], file)
        assert file.tell() < 2 << 20
        file.seek(0)
        states = torch.load(file)
        second.load_state_dict(states[0])
        of_second.load_state_dict(states[1])
    else:
        second, of_second = pickle.loads(pickle.dumps((first, of_first)))
    train(second, of_second, keys[15 if way == "increments" else 10 :])
    assert_same(second, whole, (of_second, optimizer))
    records = {second.weight.stride(0)} | {
        of_second.state[second.weight][name].stride(0) for name in ("exp_avg", "exp_avg_sq")
    }
    assert records == {9}  # still in one record


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_has_a_file_of_its_own(policy, folder):
    layer = in_file(folder, policy)
    optimizer = make("LazyAdam", layer.parameters())
    train(layer, optimizer, batches(10))
    twin, of_twin = copy.deepcopy((layer, optimizer))
    assert twin.files is twin.weight.files
    assert twin.files is not layer.files
    before = [layer.weight.detach().clone() if policy != "grow" else layer.weight[:200].clone()]
    train(twin, of_twin, batches(10, seed=5))
    assert torch.equal(layer.weight[: len(before[0])], before[0])
    train(layer, optimizer, batches(10, seed=5))
    assert_same(layer, twin, (optimizer, of_twin))


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_optimizer_is_copied_before_its_layer(policy, copied, folder):
    layer = in_file(folder, policy)
    optimizer = make("LazyAdam", layer.parameters())
    train(layer, optimizer, batches(3))
    pair = optimizer, layer
    of_twin, twin = (
        copy.deepcopy(pair) if copied == "deepcopy" else pickle.loads(pickle.dumps(pair))
    )
    for one in ((layer, optimizer), (twin, of_twin)):
        train(*one, batches(10, seed=5))
    assert_same(layer, twin, (optimizer, of_twin))
    assert twin.weight.stride(0) == 9


def test_states_of_an_older_file_get_space_too(folder):
    layer = in_file(folder, "grow")
    kinds = sparsekit.optim.LazyAdam, sparsekit.optim.Ftrl
    both = [kind(layer.parameters()) for kind in kinds]
    for keys in batches(20):
        for optimizer in both:
            train(layer, optimizer, [keys])
    for optimizer in both:
        state = next(one for one in optimizer.state[layer.weight].values() if one.dim())
        assert memory._mapping_of(state).allocated >= layer.table.capacity


def test_an_interrupt_while_records_get_room_for_states(folder):
    layer = in_file(folder, "grow")
    train(layer, sparsekit.optim.SGD(layer.parameters()), batches(2))
    for moment in range(1, 1000):
        ended = interrupt(lambda: sparsekit.optim.LazyAdam(layer.parameters()), moment)
        layer(torch.arange(10 * moment, 10 * moment + 10))
        size = len(layer.table)
        file = memory._mapping_of(layer.weight.detach())
        assert file.allocated >= layer.table.capacity
        assert layer.weight[:size].any(1).all()  # no row has lost its vector
        optimizer = sparsekit.optim.Adagrad(layer.parameters())
        train(layer, optimizer, batches(1))
        state = optimizer.state[layer.weight]["sum"]
        assert memory._mapping_of(state) is memory._mapping_of(layer.weight.detach())
        if ended:
            break
    assert moment > 20


def test_rows_within_reach_have_space(folder, monkeypatch):
    layers = [
        sparsekit.Embedding(5, 512, name="t", on_full="grow", max_capacity=1000, **storage)
        for storage in ({}, {"storage": f"mmap:{folder}"})
    ]
    optimizers = [
        sparsekit.optim.Adagrad(one.parameters(), initial_accumulator_value=0.1) for one in layers
    ]

    def step(keys):
        for layer, optimizer in zip(layers, optimizers, strict=True):
            layer(keys).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with monkeypatch.context() as patch:
        full_after(patch, 6 * 4096)  # records of 6 rows
        step(torch.arange(6))
        assert layers[1].table.reach <= layers[1].table.capacity == 6
        with pytest.raises(TableFullError):
            layers[1](torch.arange(7))
    step(torch.arange(50))
    assert_same(*layers, optimizers)


def test_a_forked_process_changes_no_rows(folder):
    layer = in_file(folder)
    layer(torch.arange(9))
    before = layer.weight[:9].clone()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            same = torch.equal(layer.eval()(torch.arange(9)), before)
            with pytest.raises(RuntimeError, match="t: processes share this table's memory"):
                layer.train()(torch.arange(20))
            code = 0 if same else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(layer.weight[:9], before)


def test_a_state_has_rows_in_use_alone(folder):
    layer = sparsekit.Embedding(20_000, 16, name="t", storage=f"mmap:{folder}")
    optimizer = sparsekit.optim.LazyAdam(layer.parameters())
    layer(torch.arange(10)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(layer.state_dict()["weight"], file)
    assert file.tell() < 10 << 10
    other = sparsekit.Embedding(20_000, 16, name="t")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.vectors(torch.arange(10)), layer.vectors(torch.arange(10)))


def test_a_state_without_the_folder(tmp_path):
    place = tmp_path / "rows"
    place.mkdir()
    layer = in_file(place, "grow")
    layer(torch.arange(9))
    place.rmdir()
    assert torch.equal(layer.state_dict()["weight"][:9], layer.weight[:9])
    with pytest.raises(OSError, match=r"t: storage='mmap:.*No such file or directory"):
        pickle.loads(pickle.dumps(layer))


def test_a_layer_made_in_inference_mode(folder):
    with torch.inference_mode():
        layer = in_file(folder)
    layer.eval()(torch.arange(3))
    with pytest.raises(RuntimeError, match="t: the layer was made in inference mode, and rows in"):
        sparsekit.optim.LazyAdam(layer.parameters())


def test_a_second_optimizer_takes_the_place_of_the_first(folder):
    layers = in_memory(), in_file(folder)
    for layer in layers:
        train(layer, sparsekit.optim.LazyAdam(layer.parameters()), batches(10))
        train(layer, sparsekit.optim.Adagrad(layer.parameters()), batches(10, seed=1))
    assert_same(*layers)
    assert layers[1].weight.stride(0) == 6


def test_two_optimizers_in_turns(folder):
    layers = in_memory(), in_file(folder)
    for layer in layers:
        kinds = sparsekit.optim.LazyAdam, sparsekit.optim.Ftrl
        both = [kind(layer.parameters()) for kind in kinds]
        for i, batch in enumerate(batches(20)):
            train(layer, both[i % 2], [batch])
    assert_same(*layers)


def test_clear_and_erase(folder):
    layers = in_memory(), in_file(folder)
    for layer in layers:
        optimizer = sparsekit.optim.LazyAdam(layer.parameters())
        train(layer, optimizer, batches(20))
        layer.erase(torch.arange(50))
        train(layer, optimizer, batches(20, seed=2))
        layer.clear()
        assert not layer.weight.any()
        train(layer, optimizer, batches(20, seed=3))
    assert_same(*layers)


def test_a_table_is_made_without_writing_its_file(folder):
    before = _written_bytes()
    layer = sparsekit.Embedding(1 << 20, 64, name="t", storage=f"mmap:{folder}")  # 256 MiB
    sparsekit.optim.LazyAdam(layer.parameters())
    layer(torch.arange(10)).sum().backward()
    assert _written_bytes() - before < 16 << 20
    assert layer.files.resident_bytes() < 16 << 20


def _written_bytes():
    os.sync()
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def test_the_disk_is_free_again_with_the_layer(folder):
    layer = in_file(folder)
    optimizer = sparsekit.optim.LazyAdam(layer.parameters())
    train(layer, optimizer, batches(3))
    count = _open_files(folder)
    assert count >= 1
    del layer, optimizer
    gc.collect()
    assert _open_files(folder) == 0


def _open_files(folder):
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(x).startswith(str(folder)) for x in links if os.path.islink(x))


def full_after(monkeypatch, size):
    """Let the disk be full once a file is to have more than this number of bytes."""
    allocate = os.posix_fallocate

    def limited(fd, begin, length):
        if begin + length > size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, begin, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)


def test_a_full_disk_when_the_layer_is_made(folder, monkeypatch):
    full_after(monkeypatch, 1000)
    with pytest.raises(OSError, match=r"^\[Errno 28\] t: storage='mmap:.*' for 2,000 rows of 24"):
        in_file(folder)


def test_a_full_disk_when_the_optimizer_is_made(folder, monkeypatch):
    layer = in_file(folder)
    layer(torch.arange(9))
    before = layer.weight[:9].clone()
    full_after(monkeypatch, 100_000)
    with pytest.raises(OSError, match=r"t: storage='mmap:.*' for 2,000 rows of 72 bytes: No space"):
        sparsekit.optim.LazyAdam(layer.parameters())
    assert torch.equal(layer.weight[:9], before)
    sparsekit.optim.SGD(layer.parameters())


def test_a_full_disk_when_the_table_grows(folder, monkeypatch):
    layer = in_file(folder, "grow")
    optimizer = sparsekit.optim.LazyAdam(layer.parameters())
    train(layer, optimizer, batches(4))
    rows = len(layer.table)
    before = layer.weight[:rows].clone()
    with monkeypatch.context() as patch:
        full_after(patch, 72 * layer.table.capacity)
        with pytest.raises(TableFullError, match="t: the table on rank 0 is full") as caught:
            layer(torch.arange(1000))
        assert "No space left on device" in str(caught.value.__cause__)
        assert len(layer.table) == rows
        assert torch.equal(layer.weight[:rows], before)
    layer(torch.arange(1000))
    assert len(layer.table) >= 1000


def test_a_folder_that_has_vanished(folder):
    place = folder / "rows"
    place.mkdir()
    layer = in_file(place)
    place.rmdir()
    layer(torch.arange(9)).sum().backward()  # the file has no name that could vanish
    with pytest.raises(OSError, match=r"t: storage='mmap:.*rows'.*No such file or directory"):
        sparsekit.optim.LazyAdam(layer.parameters())
    with pytest.raises(ValueError, match=r"t: storage='mmap:.*rows': there is no folder"):
        in_file(place)


def test_nothing_is_left_after_a_kill(folder):
    run = subprocess.run([sys.executable, "-c", KILLED.format(folder)], check=False)
    assert run.returncode == -9
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"storage": "disk"}, ValueError, "must be 'memory' or 'mmap:FOLDER', got 'disk'"),
        ({"storage": "mmap:"}, ValueError, "must be 'memory' or 'mmap:FOLDER', got 'mmap:'"),
        ({"storage": 3}, TypeError, "storage must be a string, got 3"),
        ({"max_resident_bytes": 5}, ValueError, "max_resident_bytes=5 needs storage='mmap:FOLDER'"),
        ({"storage": "mmap:/nowhere"}, ValueError, "there is no folder /nowhere"),
        ({"storage": "mmap:/", "max_resident_bytes": 0}, ValueError, "max_resident_bytes must be"),
        ({"storage": "mmap:/", "device": "cuda"}, NotImplementedError, "device"),
    ],
)
def test_wrong_options(given, error, told):
    with pytest.raises(error, match=f"^t: .*{told}"):
        sparsekit.Embedding(10, 3, name="t", **given)


def test_what_rows_in_files_cannot(folder):
    layer = in_file(folder)
    with pytest.raises(NotImplementedError, match=r"^t: rows in files .* stay so"):
        layer.float()
    with pytest.raises(NotImplementedError, match=r"^t: .* neither converted nor emptied"):
        layer.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"^t: rows in files .* cannot be shared"):
        layer.share_memory()
    assert layer.to(torch.float64).weight.dtype == torch.float64


def test_the_report_of_memory(folder):
    layer = in_file(folder, dim=512)
    layer(torch.arange(9))
    (table,) = sparsekit.memory_report(layer).tables
    assert table.vectors == (9 * PAGE, 2000 * PAGE)
    assert 9 * PAGE <= table.resident == layer.files.resident_bytes() < 200 * PAGE
    assert sparsekit.memory_report(in_memory()).tables[0].resident is None


def test_from_meta(folder):
    layer = copy.deepcopy(in_file(folder, "grow", device="meta"))
    assert copy.deepcopy(in_file(folder, device="meta")).weight.is_meta
    layer.to_empty(device="cpu")
    other = in_memory("grow")
    for one in (layer, other):
        train(one, sparsekit.optim.LazyAdam(one.parameters()), batches(9))
    assert_same(layer, other)


def test_the_order_of_the_clock(folder):
    files = row_files.RowFiles("t", str(folder), 8, 4 * PAGE)
    files.allocate(8)
    weight = torch.nn.Parameter(files.vectors(PAGE // 4, torch.float32))  # a page a row
    known = lambda: files._known.tolist()  # noqa: E731
    files.ask_for(torch.tensor([0, 1, 2, -1]))
    assert known() == [2, 2, 2, 0, 0, 0, 0, 0]
    files.ask_for(torch.tensor([1, 3]))
    assert files._resident == 4
    files.ask_for(torch.tensor([4]))  # the first turn of the hand makes all old, the second drops
    assert known()[4] == 2
    assert files._resident <= 4
    with torch.no_grad():
        weight[:] = torch.arange(8.0)[:, None]
    files.ask_for(torch.arange(8))  # more than there is memory for
    assert known() == [2] * 8
    files.ask_for(torch.tensor([7]))
    assert known()[7] == 2
    assert weight[:, 0].tolist() == list(range(8))
