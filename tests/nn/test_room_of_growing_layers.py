"""Loads, copies, saves and interrupts of layers that grow: nothing is lost, no room is taken."""

import copy
import io
import pickle
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from optim.cases import make

import sparsekit
from sparsekit import TableFullError, checkpoint
from sparsekit.nn import load_torch_state_dict
from sparsekit.tables import growth, hash_table, room
from sparsekit.tables.rows_of import RowsOf

from .test_growing_layers import assert_same, batches, large, layer_of, train

WIDE = {"max_capacity": 1 << 28}  # rows of dim 3, float64: 6 GiB


def peak():
    """Return the largest memory that this process has had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) * 1024


@contextmanager
def taking_little(less_than=100 << 20):
    """Check that the body takes less memory than that, in bytes, also for a while."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = peak()
    yield
    assert peak() - before < less_than


@pytest.fixture
def little():
    with taking_little():
        yield


@pytest.fixture
def in_steps(monkeypatch):
    monkeypatch.setattr(growth, "_STEPWISE", 16)
    monkeypatch.setattr(growth, "_LEAST_BUCKETS", 4)


def half_grown():
    """Return a layer whose larger index has some keys, and the number of its keys."""
    layer, key = layer_of(100), 50
    layer(torch.arange(50))
    while layer.table._growth is None or not layer.table._growth._copied:
        layer(torch.tensor([key]))
        key += 1
    assert not layer.table._growth.is_done
    return layer, key


def all_there(layer, keys):
    more = list(range(10**6, 10**6 + 150))
    for key in more:
        layer(torch.tensor([key]))
    assert layer.table.keys().tolist() == [*keys, *more]


@pytest.mark.parametrize("how", ["checkpoint", "state_dict"])
def test_going_back_while_a_larger_index_is_made(in_steps, tmp_path, how):
    layer, count = half_grown()
    checkpoint.save(layer, tmp_path / "saved")
    saved = {name: value.clone() for name, value in layer.state_dict().items()}
    if how == "checkpoint":
        checkpoint.load(layer, tmp_path / "saved")
    else:
        layer.load_state_dict(saved)
    all_there(layer, range(count))


def test_an_index_that_is_written_to_while_a_larger_one_is_made(in_steps):
    layer, count = half_grown()
    other = layer_of(100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "_STEPWISE", 1000)
        other(torch.arange(-count, 0))
    for own, theirs in zip(layer.table.buffers(), other.table.buffers(), strict=True):
        own.copy_(theirs)
    all_there(layer, range(-count, 0))


@pytest.mark.parametrize("name", ["Adam", "Adagrad"])
def test_a_table_that_grows_beside_one_that_is_full(name):
    """The keys of a table that is not full stay, although the lookup is refused."""
    full = sparsekit.Embedding(2, 3, name="a", dtype=torch.float64)
    layers = {"a": full, "b": layer_of()}
    group = sparsekit.EmbeddingGroup(layers)
    optimizer, plain = make(name, group.parameters()), large()
    of_plain = make(name, plain.parameters())
    train(layers["b"], optimizer, batches(3))
    train(plain, of_plain, batches(3))
    new = torch.arange(500, 700)
    with pytest.raises(TableFullError):
        group({"a": torch.arange(9), "b": new})
    plain(new)
    assert layers["b"].weight.reach >= len(layers["b"].table)
    for copied in (copy.deepcopy(layers["b"]), pickle.loads(pickle.dumps(layers["b"]))):
        assert torch.equal(copied.vectors(new), plain.vectors(new))
    for one, stepped in ((layers["b"], optimizer), (plain, of_plain)):
        one.eval()
        train(one, stepped, [new])
        one.train()
        train(one, stepped, batches(5, 1))
    assert_same(layers["b"], plain, (optimizer, of_plain))


@pytest.mark.parametrize("of_module", [10, 200])
@pytest.mark.parametrize("of_optimizer", [10, 200])
@pytest.mark.parametrize("kind", ["LazyAdam", "Adagrad", "torch.SGD"])
def test_an_optimizer_that_is_loaded_first(kind, of_module, of_optimizer):
    def stepping(one):
        if kind == "torch.SGD":
            return torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        return make(kind, one.parameters())

    results = []
    for new in (layer_of, large):
        saved = []
        for count in (of_module, of_optimizer):
            source = new()
            optimizer = stepping(source)
            train(source, optimizer, [torch.arange(count).flip(0)] * 2)
            saved.append((source.state_dict(), optimizer.state_dict()))
        target = new()
        optimizer = stepping(target)
        train(target, optimizer, [torch.arange(3)])
        optimizer.load_state_dict(saved[1][1])
        target.load_state_dict(saved[0][0])
        train(target, optimizer, [torch.arange(150)])
        results.append((target, optimizer))
    (grown, of_grown), (plain, of_plain) = results
    assert_same(grown, plain, (of_grown, of_plain))


class _Interrupts:
    """Raises KeyboardInterrupt before the n-th line of a function."""

    def __init__(self, function, line):
        self.code, self.left = function.__code__, line

    def __call__(self, frame, event, _):
        if frame.f_code is not self.code:
            return None
        return self.line

    def line(self, frame, event, _):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


def interrupted(function, line, call):
    """Return whether a call was interrupted before a line of a function."""
    before = sys.gettrace()
    sys.settrace(_Interrupts(function, line))
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


FUNCTIONS = {
    "replace": growth.CanGrow._replace,
    "reserve": growth.CanGrow.reserve,
    "grow_on": growth.CanGrow.grow_on,
    "step": growth.Growth.step,
    "extend": growth.CanGrow.extend_reach,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_interrupt_anywhere_while_growing(in_steps, name):
    plain, stopped = large(), 0
    of_plain = make("Adagrad", plain.parameters())
    bunches = torch.arange(300).split([9, 3, 3, 3, 30, *[5] * 10, 202])
    train(plain, of_plain, bunches)
    for line in range(1, 22):
        layer, before = layer_of(20), stopped
        optimizer = make("Adagrad", layer.parameters())
        for keys in bunches:
            stopped += interrupted(FUNCTIONS[name], line, lambda layer=layer, k=keys: layer(k))
            train(layer, optimizer, [keys])
        assert_same(layer, plain, (optimizer, of_plain))
        if stopped == before:
            break  # no call has as many lines
    assert stopped > 5


def test_an_interrupt_while_the_dtype_changes():
    for line in range(1, 40):
        layer = layer_of(2, ttl=9)
        layer(torch.arange(50))
        before = layer.vectors(torch.arange(50))
        function = room.RowsWithRoom.rows_in_reach.__wrapped__
        if not interrupted(function, line, layer.float):
            break
        assert layer.weight.shape == (layer.capacity, 3)
        assert layer.scores.shape == (layer.capacity,)
        torch.testing.assert_close(layer.vectors(torch.arange(50)).double(), before)
    assert line > 15


@pytest.mark.parametrize("keys", [0, 5])
def test_states_of_few_keys_are_small(keys, little):
    layer = layer_of(ttl=9, **WIDE)
    optimizer = make("LazyAdam", layer.parameters())
    train(layer, optimizer, [torch.arange(5)])
    if keys == 0:
        layer.clear()
    saved = io.BytesIO()
    torch.save([layer.state_dict(), optimizer.state_dict()], saved)
    assert saved.tell() < 20_000
    copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
    copy.deepcopy((layer, optimizer))


def test_states_are_saved_once_and_stay_interleaved():
    layer, plain = layer_of(), sparsekit.Embedding(5000, 3, name="t", dtype=torch.float64)
    sizes = []
    for one in (layer, plain):
        optimizer = make("LazyAdam", one.parameters())
        train(one, optimizer, [torch.arange(5000)])
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        sizes.append(saved.tell())
        _, copied = copy.deepcopy((one, optimizer))
        (state,) = copied.state.values()
        storages = {state[name].untyped_storage()._cdata for name in ("exp_avg", "exp_avg_sq")}
        assert len(storages) == 1
    assert sizes[0] < 1.05 * sizes[1]


@pytest.mark.parametrize("name", ["SGD", "LazyAdam"])
def test_a_load_makes_room_for_keys_alone(name):
    plain = sparsekit.Embedding(1 << 22, 3, name="t", dtype=torch.float64)  # 96 MiB
    kind = getattr(sparsekit.optim, name)
    of_plain = kind(plain.parameters(), lr=0.1)
    train(plain, of_plain, [torch.arange(10)])
    with taking_little(less_than=64 << 20):
        layer = layer_of(5, **WIDE)
        optimizer = kind(layer.parameters(), lr=0.1)
        optimizer.load_state_dict(of_plain.state_dict())
        layer.load_state_dict(plain.state_dict())
    assert layer.table.capacity <= 10
    train(layer, optimizer, batches(5))
    train(plain, of_plain, batches(5))
    assert_same(layer, plain)


def test_a_save_in_the_background(little, tmp_path):
    layer = layer_of(**WIDE)
    layer(torch.arange(500))
    checkpoint.async_save(layer, tmp_path / "saved").wait()
    other = layer_of()
    checkpoint.load(other, tmp_path / "saved")
    assert_same(layer, other)


def test_vectors_of_torch_and_momentum_of_torch(little):
    layer = layer_of(**WIDE)
    load_torch_state_dict(layer, {"weight": torch.ones(100, 3)})
    assert bool((layer.vectors(torch.arange(100)) == 1).all())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    train(layer, optimizer, batches(3))
    layer.erase(torch.arange(5))
    train(layer, optimizer, batches(3))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("of", ["meta", "empty", "garbage"])
def test_a_load_into_a_layer_without_content(of, assign):
    source = layer_of(ttl=9)
    source(torch.arange(300))
    layer = layer_of(5, ttl=9, device="meta" if of == "meta" else None)
    if of == "meta":
        assert layer.state_dict()["weight"].is_meta
        if not assign:
            layer.to_empty(device="cpu")
    elif of == "garbage":
        layer.table.size.fill_(-7)
        layer.table.buckets.fill_(123)
    layer.load_state_dict(source.state_dict(), assign=assign)
    assert_same(layer, source)
    assert layer.weight.shape == source.weight.shape
    layer(torch.arange(900))
    source(torch.arange(900))
    assert_same(layer, source)


def test_pickles_of_older_versions():
    assert hash_table.RowsOf is RowsOf  # where they look for it
    table = pickle.loads(pickle.dumps(sparsekit.HashTable(5)))
    older = {name: value for name, value in table.__dict__.items() if "max_cap" not in name}
    table.__setstate__({name: value for name, value in older.items() if name != "reach"})
    assert (table.max_capacity, table.reach) == (5, 5)
    table.find_or_insert(torch.arange(5))
