"""Rooms have memory for their first rows alone, which starts as zeros and stays where it is."""

import copy
import gc
import io
import pickle
import subprocess
import sys

import pytest
import rooms
import torch

from sparsekit import device_rooms, memory

ROWS = 1 << 20
UNIT = 1 << 16  # size of the stand-in's pages


@pytest.fixture(autouse=True)
def rooms_before():
    gc.collect()
    before = rooms.num_rooms(), rooms.memory_in_use()
    with rooms.rooms():
        yield before[0]
        gc.collect()
        assert (rooms.num_rooms(), rooms.memory_in_use()) == before


def room(first, rows=ROWS, width=3, dtype=torch.float64):
    return memory.untouched_zeros((rows, width), dtype, "cpu", first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_the_first_rows_have_memory(dtype):
    tensor = room(10, dtype=dtype)
    assert (tensor.shape, tensor.dtype) == ((ROWS, 3), dtype)
    assert memory.is_mapped(tensor)
    assert device_rooms.rows_with_memory(tensor) == UNIT // (3 * dtype.itemsize)
    assert not tensor[:10].any()
    tensor[:10] = 1
    assert tensor[:10].sum() == 30


def test_memory_is_added_in_place():
    before = rooms.memory_in_use()
    tensor = room(1)
    address = tensor.data_ptr()
    tensor[0] = 7
    sizes = set()
    for rows in (1, 5000, 20_000, 20_000, 100, 300_000, ROWS):
        device_rooms.commit(tensor, rows)
        assert device_rooms.rows_with_memory(tensor) >= rows
        assert not tensor[1:rows].any()
        tensor[rows - 1] = 7
        assert (tensor[:1] == 7).all()
        tensor[1:rows] = 0
        sizes.add(rooms.memory_in_use() - before)
    assert tensor.data_ptr() == address
    # Memory for each row once: doubling makes no copies.
    assert sorted(sizes) == [-(-n * 24 // UNIT) * UNIT for n in (1, 5000, 20_000, 300_000, ROWS)]


def test_small_tensors_are_plain(rooms_before):
    tensor = room(1, rows=100)
    assert not device_rooms.is_in_room(tensor)
    assert device_rooms.rows_with_memory(tensor) == 100
    device_rooms.commit(tensor, 100)
    assert rooms.num_rooms() == rooms_before


def test_views_of_a_room():
    space = memory.untouched_zeros((ROWS, 2, 3), torch.float64, "cpu", 1000)
    have = device_rooms.rows_with_memory(space)
    one, other = space.unbind(1)
    for part in (one, other):
        assert device_rooms.rows_with_memory(part) == have
        assert device_rooms.rows_with_memory(part[400:]) == have - 400
        assert device_rooms.rows_with_memory(part[:5]) == 5
        assert device_rooms.rows_with_memory(part[have + 9 :]) == 0
    other[:have] = 3
    memory.zero_(other[500:])
    assert other[:500].min() == 3
    assert not other[500:have].any()
    device_rooms.commit(other, 2 * have)
    assert device_rooms.rows_with_memory(one) >= 2 * have


def test_the_first_rows_are_the_same_memory(rooms_before):
    space = memory.untouched_zeros((ROWS, 2, 3), torch.float32, "cpu", 1000)
    one, other = memory.first_rows_of(dict(enumerate(space.unbind(1))), 10).values()
    space[:10] = 4
    assert one.shape == (10, 3)
    assert (one == 4).all()
    assert (other == 4).all()
    assert one.untyped_storage().nbytes() == 10 * 24
    assert one.untyped_storage()._cdata == other.untyped_storage()._cdata
    assert memory.first_rows(space, 0).shape == (0, 2, 3)
    del space
    assert (one == 4).all()  # keeps the room
    assert rooms.num_rooms() == rooms_before + 1


def test_copies_of_the_first_rows():
    tensor = room(1000)
    tensor[:10] = 2
    short = memory.first_rows(tensor, 10)
    file = io.BytesIO()
    torch.save(short, file)
    assert file.tell() < 5000
    copies = copy.deepcopy(short), pickle.loads(pickle.dumps(short)), short.clone()
    assert all((one == 2).all() and one.shape == (10, 3) for one in copies)
    longer = memory.with_length(copies[0], ROWS, 20)
    assert longer.shape == (ROWS, 3)
    assert (longer[:10] == 2).all()
    assert not longer[10:20].any()


def test_no_memory():
    with rooms.memory_of(3 * UNIT):
        tensor = room(1)
        tensor[0] = 5
        device_rooms.commit(tensor, 5000)
        have = rooms.memory_in_use()
        no_memory = pytest.raises(RuntimeError, match="could not allocate memory: out of memory")
        with rooms.memory_of(0), no_memory:
            device_rooms.commit(tensor, 100_000)
        assert rooms.memory_in_use() == have
        assert device_rooms.rows_with_memory(tensor) >= 5000
        assert (tensor[0] == 5).all()
    device_rooms.commit(tensor, 100_000)
    assert not tensor[1:100_000].any()
    with rooms.memory_of(0), pytest.raises(RuntimeError, match="out of memory"):
        room(1)
    with pytest.raises(RuntimeError, match="could not reserve addresses"):
        room(1, rows=1 << 46)


def test_more_than_the_room():
    tensor = room(1)
    with pytest.raises(RuntimeError, match="the room has fewer bytes"):
        device_rooms.commit(tensor, 2 * ROWS)


TOUCH = """
import sys
sys.path[:0] = ["tests"]
import rooms, torch
from sparsekit import device_rooms, memory
with rooms.rooms():
    tensor = memory.untouched_zeros((1 << 20, 3), torch.float64, "cpu", 1000)
    have = device_rooms.rows_with_memory(tensor)
    tensor[have - 1] = 1
    print("within")
    sys.stdout.flush()
    tensor[have + 1] = 1
    print("beyond")
"""


def test_rows_without_memory_cannot_be_touched():
    done = subprocess.run([sys.executable, "-c", TOUCH], capture_output=True, text=True)
    assert done.stdout == "within\n"
    assert done.returncode < 0, done
