"""The parameter of a layer keeps its marks, notices writes, and lets late rows catch up."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from sparsekit.tables.hash_table import HashTable
from sparsekit.tables.weight import (
    EmbeddingWeight,
    count_own_writes,
    free_rows_hold,
    own_writes,
)

T = torch.tensor


def made(rows=5, keys=(), **options):
    """Return a weight that belongs to a table with these keys, and the table."""
    table = HashTable(rows)
    table.find_or_insert(torch.tensor(keys, dtype=torch.int64))
    weight = EmbeddingWeight(torch.zeros(rows, 2), **options)
    weight.belongs_to(table)
    return weight, table


def write(weight, row=0, value=1.0):
    with torch.no_grad():
        weight[row] = value


def frozen_by_inference():
    with torch.inference_mode():
        return EmbeddingWeight(torch.zeros(5, 2), requires_grad=False)


# Catching up


@pytest.mark.parametrize("rows", [None, T([1, 2])])
def test_missed_steps_of_the_given_rows_are_applied(rows):
    weight, calls = EmbeddingWeight(torch.zeros(2, 2)), []
    weight.catch_up(rows)
    weight.before_read = lambda *arguments: calls.append(arguments)
    weight.catch_up(rows)
    assert len(calls) == 1
    assert calls[0][0] is weight
    assert calls[0][1] is rows


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_copies_catch_up_first_and_have_no_tie(copied, requires_grad):
    weight, _ = made(keys=[3], requires_grad=requires_grad)
    weight.before_read = lambda one, rows: write(one, value=7.0)
    weight.update_in_backward = weakref.WeakMethod(weight.keys)
    other = copied(weight)
    assert type(other) is EmbeddingWeight
    assert other.requires_grad == requires_grad
    assert other[0].tolist() == [7, 7]
    assert (other.before_read, other.update_in_backward, other._table) == (None, None, None)
    assert other.keys() is None
    write(other, 1)
    assert not weight[1].any()


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_a_deep_copy_keeps_marks(moved, written):
    weight, _ = made(keys=[3])
    weight.moved = moved
    if written:
        write(weight)
    other, again = copy.deepcopy([weight, weight])
    assert other is again
    assert (other.moved, other.written(), weight.written()) == (moved, written, written)


# Writes


def test_writes_are_told_by_the_version_counter():
    weight, _ = made()
    assert weight.noted_version == weight._version
    for value in (1.0, 2.0):
        write(weight, value=value)
        assert weight.written()
        assert weight.written()
        weight.note_version()
        assert not weight.written()
    weight.noted_version = None  # an interrupted write of the library
    write(weight)
    assert not weight.written()
    assert weight.noted_version == weight._version
    fresh = EmbeddingWeight(torch.zeros(2, 2))
    assert not fresh.written()
    assert fresh.noted_version is not None


def test_versions_of_inference_tensors_are_not_asked_for():
    weight = frozen_by_inference()
    weight.note_version()
    assert weight.noted_version == -1
    assert not weight.written()
    with own_writes([weight]):
        pass
    assert weight.noted_version == -1
    assert not copy.deepcopy(weight).written()


def test_writes_of_the_library_do_not_hide_earlier_ones():
    weight, _ = made()
    for before in (False, True):
        if before:
            write(weight)
        weight.begin_writing()
        assert (weight.noted_version is None) != before
        write(weight, 1)
        weight.end_writing()
        assert weight.written() == before
    weight.note_version()
    weight.begin_writing()
    weight.begin_writing()  # after an interrupted write
    write(weight)
    weight.end_writing()
    assert not weight.written()


def test_a_block_of_own_writes():
    one, other, plain = made()[0], made()[0], torch.nn.Parameter(torch.zeros(2))
    with own_writes([one, plain, other]):
        assert one.noted_version is other.noted_version is None
        for each in (one, other):
            write(each)
    assert not one.written()
    assert not other.written()
    write(other)
    with own_writes([other]):
        write(other)
    assert other.written()  # the write before
    with pytest.raises(IndexError), own_writes([one]):
        write(one, row=99)
    assert one.noted_version is None


def test_single_own_writes_are_counted():
    one, other, plain = made()[0], made()[0], torch.nn.Parameter(torch.zeros(2))
    other.noted_version = None
    write(one)
    count_own_writes([one, plain, other])
    assert not one.written()
    assert other.noted_version is None
    write(one)
    write(one)
    count_own_writes([one])
    assert one.written()


# Keys


def test_a_weight_belongs_to_a_table_as_long_as_it_exists():
    weight, table = made(keys=[4, -5])
    assert weight.keys().tolist() == [4, -5]
    del table
    gc.collect()
    assert weight.keys() is None
    assert EmbeddingWeight(torch.zeros(2, 2)).keys() is None


@pytest.mark.parametrize("place", [None, 1, 2, 4])
@pytest.mark.parametrize("keys", [[], [3], [3, 4]])
def test_values_of_rows_without_keys_count_as_moved_by_an_optimizer(place, keys):
    """Nonzero rows without a key count as moved by an optimizer, unless no row has a key."""
    moved = bool(keys) and place is not None and place >= len(keys)
    values, table = torch.zeros(5, 2), HashTable(5)
    table.find_or_insert(torch.tensor(keys, dtype=torch.int64))
    if place is not None:
        values[place] = 1
    weight = EmbeddingWeight(values)
    weight.belongs_to(table)
    assert weight.moved == moved
    assert weight.noted_version == weight._version
    again = EmbeddingWeight(values)
    again.note_version()
    again.belongs_to(table)  # its rows are known already
    assert not again.moved
    again.follow_keys()
    assert again.moved == moved
    again.moved = True
    values.zero_()
    again.follow_keys()
    assert again.moved  # once moved, always moved
    meta = EmbeddingWeight(torch.zeros(5, 2, device="meta"))
    meta.belongs_to(table)
    assert not meta.moved


def test_rows_that_get_other_keys_count_as_written_by_the_library():
    weight, _ = made(keys=[1, 2])
    write(weight)
    calls = []
    weight.before_read = lambda one, rows: calls.append((rows, one.noted_version))
    weight.note_keys()
    assert calls[0][0] is None
    assert calls[0][1] is not None  # missed steps were applied first
    assert weight.noted_version is None
    write(weight)
    weight.follow_keys()
    assert not weight.written()
    assert weight.noted_version is not None


def optimizers_of(weight, number=2):
    """Return optimizers; the state of row r under optimizer i is r + 1 + 10 i."""
    optimizers = [torch.optim.SGD([weight], lr=0.1) for _ in range(number)]
    for i, optimizer in enumerate(optimizers):
        weight.is_stepped_by(optimizer)
        optimizer.state[weight] = {"m": torch.arange(float(len(weight))) + 10 * i + 1}
    return optimizers


@pytest.mark.parametrize(
    ("now", "moved"), [([9, 5, 7], [3, 0, 1, 0, 0]), ([8], [2, 0, 0, 0, 0]), ([], [0, 0, 0, 4, 5])]
)
def test_states_of_all_optimizers_move_with_their_keys(now, moved):
    weight, table = made(keys=[7, 8, 9])
    one, other = optimizers_of(weight)
    none = torch.optim.SGD([weight], lr=0.1)
    empty = torch.optim.SGD([weight], lr=0.1)
    weight.is_stepped_by(none)
    weight.is_stepped_by(empty)
    assert empty.state[weight] == {}  # reading it creates it
    weight.note_keys()
    assert one.state[weight]["keys"].tolist() == [7, 8, 9]
    assert other.state[weight]["keys"] is one.state[weight]["keys"]
    assert weight not in none.state
    assert empty.state[weight] == {}
    table.clear_()
    table.find_or_insert(torch.tensor(now, dtype=torch.int64))
    weight.note_keys()  # the keys of the states are noted once
    assert one.state[weight]["keys"].tolist() == [7, 8, 9]
    weight.follow_keys()
    assert one.state[weight]["m"].tolist() == moved
    assert other.state[weight]["m"].tolist() == [m and m + 10 for m in moved]
    assert "keys" not in one.state[weight]
    assert "keys" not in other.state[weight]
    assert weight not in none.state


def test_one_optimizer_is_settled_alone():
    weight, table = made(keys=[7, 8])
    one, other = optimizers_of(weight)
    weight.note_keys()
    table.clear_()
    table.find_or_insert(T([8]))
    weight.settle(one)
    assert one.state[weight]["m"].tolist() == [2, 0, 0, 0, 0]
    assert other.state[weight]["m"].tolist() == [11, 12, 13, 14, 15]
    alone = EmbeddingWeight(torch.zeros(5, 2))
    (single,) = optimizers_of(alone, 1)
    single.state[alone]["keys"] = T([7])
    alone.settle(single)  # no table, no keys
    assert single.state[alone]["keys"].tolist() == [7]


def test_keys_of_a_table_without_values_are_none_at_all(monkeypatch):
    weight, table = made(keys=[7, 8])
    (optimizer,) = optimizers_of(weight, 1)

    def damaged():
        raise ValueError("damaged")

    monkeypatch.setattr(table, "keys", damaged)
    with torch.device("meta"):
        weight.note_keys()
    keys = optimizer.state[weight]["keys"]
    assert (keys.dtype, keys.shape, keys.device) == (torch.int64, (0,), weight.device)


def test_an_optimizer_is_not_kept_alive_by_a_weight():
    weight, _ = made(keys=[7])
    optimizers = optimizers_of(weight)
    assert len(weight._optimizers) == 2
    weight.is_stepped_by(optimizers[0])
    assert len(weight._optimizers) == 2
    gone = weakref.ref(optimizers.pop())
    del optimizers[:]
    gc.collect()
    assert gone() is None
    assert not weight._optimizers
    assert EmbeddingWeight._optimizers is None


@pytest.mark.parametrize("rows", [1, 2, 64, 64 + 2, 128, 5 * 64 + 3])
def test_two_samples_of_the_free_rows(rows):
    keys, step = 2 * 64, max(1, rows // 64)
    seen = {*range(min(rows, 64)), *range(0, rows, step)}
    weight = torch.zeros(keys + rows, 2)
    weight[:keys] = 1  # rows with keys are not asked
    assert not free_rows_hold(weight, keys)
    for row in range(rows):
        weight[keys + row, 1] = -1
        assert free_rows_hold(weight, keys) == (row in seen), row
        weight[keys + row, 1] = 0
    assert not free_rows_hold(weight, keys + rows)
