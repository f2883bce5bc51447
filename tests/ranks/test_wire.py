"""Rows, bags and heads are at the right positions in the parts of a message."""

import numpy as np
import pytest
import torch

from sparsekit.distributed.wire import (
    ALIGNMENT,
    Layout,
    Parts,
    RaggedBags,
    bags_bytes,
    heads_of,
    pack,
    packed_sizes,
    padded,
    part_bytes,
    read_bags_of,
    unpack,
    write_bags,
    write_heads,
    write_to_all,
)

T = torch.tensor
NONE = torch.empty(0, dtype=torch.int64)


def parts_of(sizes):
    """Return parts of these sizes, one after another, filled with a byte that no test writes."""
    begins = np.cumsum([0, *sizes])
    data = torch.full((int(begins[-1]),), 171, dtype=torch.uint8)
    return Parts(data, begins[:-1].tolist())


def test_sizes():
    assert [padded(size) for size in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert [part_bytes(size) for size in (0, 1, 16, 17)] == [16, 32, 32, 48]


def test_heads_of_parts():
    parts = parts_of([32, 48, 32])
    write_heads(parts.data, [0, 80], [-7, 1])
    parts.data[16:24].view(torch.int64)[:] = 5
    assert heads_of(parts.data, [0, 80]).tolist() == [[-7, 1], [-7, 1]]
    assert heads_of(parts.data, [0], 1).tolist() == [[-7, 1, 5]]
    assert heads_of(parts.data, [], 2).shape == (0, 4)
    assert (parts.data[32:80] == 171).all()


@pytest.mark.parametrize("counts", [[[2, 0, 1], [1, 2, 0]], [[3, 0, 0], [0, 0, 3]]])
def test_what_is_packed_is_unpacked(counts):
    arrays = [torch.rand(3, 5).bfloat16(), torch.arange(6)[::2]]
    sizes = packed_sizes(arrays, counts)
    rows = [[10 * count for count in counts[0]], [8 * count for count in counts[1]]]
    assert sizes == [16 + padded(a) + padded(b) for a, b in zip(*rows, strict=True)]
    parts = parts_of(sizes)
    pack(parts, arrays, counts)
    for found, array in zip(unpack(parts, arrays, counts), arrays, strict=True):
        assert torch.equal(found, array)
    assert all((parts.data[begin : begin + 16] == 171).all() for begin in parts.begins)
    # An array begins at a multiple of 16 bytes.
    second = parts.begins[0] + 16 + padded(rows[0][0])
    found = parts.data[second : second + rows[1][0]].view(torch.int64)
    assert torch.equal(found, arrays[1][: counts[1][0]])


def test_the_same_arrays_for_all():
    arrays = [T([1, 2, 3]), torch.rand(2, 3)]
    sizes = packed_sizes(arrays, [[3, 3], [2, 2]])
    parts = parts_of(sizes)
    write_to_all(parts, arrays)
    found = unpack(parts, arrays, [[3, 3], [2, 2]])
    assert all(torch.equal(a, torch.cat([b, b])) for a, b in zip(found, arrays, strict=True))


def test_a_layout_of_pieces():
    counts = np.array([[3, 0, 2], [1, 1, 0]])
    layout = Layout(counts, [6, 8, 20], ALIGNMENT, words=3)
    # The words take 24 bytes. They are padded to 32 bytes and follow the head of 16 bytes.
    assert layout.sizes == [48 + 32 + 0 + 48, 48 + 16 + 16]
    assert layout.begins([0, 1000]).tolist() == [[48, 80, 80], [1048, 1064, 1080]]
    assert layout.ranges([0, 1000], slice(1, 3)) == [(80, 128), (1064, 1080)]
    assert layout.ranges([0, 1000], slice(0, 1)) == [(48, 80), (1048, 1064)]
    parts = parts_of(layout.sizes)
    payloads, offsets = layout.payloads(parts)
    assert [len(payload) for payload in payloads] == [112, 64]
    assert payloads[1].data_ptr() == parts.data.data_ptr() + 128 + 16
    assert offsets.tolist() == [[32, 64, 64], [32, 48, 64]]
    assert Layout(counts, [6, 8, 20]).sizes == [16 + 18 + 40, 16 + 6 + 8]


BAGS = {
    "weighted": [RaggedBags(T([2, 0, 3]), T([5, -6, 7, 0, 1]), torch.rand(5))],
    "without weights": [RaggedBags(T([1]), T([2**62]), None)],
    "both, and none": [
        RaggedBags(T([1, 2]), T([1, 2, 3]), None),
        RaggedBags(NONE, NONE, NONE.double()),
        RaggedBags(T([1]), T([4]), T([3.0], dtype=torch.float64)),
    ],
}


@pytest.mark.parametrize("case", BAGS)
def test_bags_are_read_as_they_were_written(case):
    bags = BAGS[case]
    bytes_of = [(len(b.counts), len(b.keys), 0 if b[2] is None else b[2].nbytes) for b in bags]
    size = bags_bytes(bytes_of)
    parts = parts_of([size, size])
    others = [bag._replace(keys=-bag.keys) for bag in bags]
    for begin, of_rank in zip(parts.begins, (bags, others), strict=True):
        write_bags(Parts(parts.data, [begin]), of_rank)
    dtypes = [torch.float32 if b[2] is None else b[2].dtype for b in bags]
    for rank, of_rank in enumerate((bags, others)):
        for found, given in zip(read_bags_of(parts, rank, dtypes), of_rank, strict=True):
            for one, other in zip(found, given, strict=True):
                assert (one is None) == (other is None)
                assert one is None or (one.dtype == other.dtype and torch.equal(one, other))
