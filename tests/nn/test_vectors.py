"""Tests of access to vectors by key: `vectors`, `assign` and `items` of every layer."""

import pytest
import torch
from conftest import INT64_MAX, INT64_MIN, same_bits

import sparsekit
from sparsekit import TableFullError, optim
from sparsekit.lookup.access import _checked_pairs

DIM = 3
KEYS = [7, INT64_MIN, 0, INT64_MAX, -1]


def bags(**settings):
    return sparsekit.DistributedEmbedding("mean", 9, DIM, 1, 4, name="n", **settings)


def dense(**settings):
    return sparsekit.All2AllDenseEmbedding(9, DIM, 1, 1, True, name="n", **settings)


def like_embedding(**settings):
    return sparsekit.Embedding(9, DIM, name="n", **settings)


def like_bags(**settings):
    return sparsekit.EmbeddingBag(9, DIM, name="n", mode="max", **settings)


LAYERS = [bags, dense, like_embedding, like_bags]


def numbers(n):
    return torch.arange(1.0, n * DIM + 1).view(n, DIM)


def held(layer, **settings):
    """Return the keys and vectors of all rows."""
    pieces = list(layer.items(**settings))
    return torch.cat([p.keys for p in pieces]), torch.cat([p.vectors for p in pieces])


@pytest.mark.parametrize("make", LAYERS)
def test_of_every_layer(make):
    layer = make()
    keys = torch.tensor(KEYS)
    fresh = layer.vectors(keys)
    assert len(layer.table) == 0
    layer.assign(keys[:3], numbers(3))
    assert same_bits(layer.vectors(keys), torch.cat([numbers(3), fresh[3:]]))
    own, vectors = held(layer)
    assert own.tolist() == KEYS[:3]
    assert same_bits(vectors, numbers(3))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_vectors_are_what_evaluation_reads(dtype, training):
    layer = dense(dtype=dtype, padding_key=5)
    layer(torch.tensor([1, 2, 3]))
    with torch.no_grad():
        layer.weight.mul_(2)
    keys = torch.tensor([[3, 5, -9], [1, 3, 10**12]])
    expected = layer.eval()(keys.flatten()).view(2, 3, DIM)
    layer.train(training)
    found = layer.vectors(keys.int() if training and dtype == torch.float32 else keys)
    assert same_bits(layer.vectors(keys), expected)
    assert found.dtype == dtype
    assert not found.requires_grad
    assert layer.vectors(torch.tensor(5)).tolist() == [0] * DIM
    assert layer.vectors(keys[:0]).shape == (0, 3, DIM)
    assert len(layer.table) == 3
    found.zero_()
    assert same_bits(layer.vectors(keys), expected)


def test_the_last_of_equal_keys_counts():
    layer = dense()
    layer.assign(torch.tensor([4, 6, 4, 8, 4, 6]), numbers(6))
    keys, vectors = held(layer)
    assert keys.tolist() == [4, 6, 8]
    assert same_bits(vectors, numbers(6)[[4, 5, 3]])


@pytest.mark.parametrize("padding", [0, 2, 8])
@pytest.mark.parametrize("use_hashtable", [True, False])
def test_what_is_assigned_to_padding_is_never_read(use_hashtable, padding):
    layer = like_embedding(padding_idx=padding, use_hashtable=use_hashtable)
    keys = torch.tensor([3, padding])
    layer.assign(keys, numbers(2))
    layer.assign(keys[:0], numbers(0))
    assert layer.vectors(keys).tolist() == [[1, 2, 3], [0, 0, 0]]
    assert same_bits(layer(keys).detach(), layer.vectors(keys))


def test_items_come_in_the_order_of_rows():
    layer = dense()
    layer.assign(torch.tensor(KEYS), numbers(5))
    pieces = list(layer.items(chunk=2))
    assert [len(piece.keys) for piece in pieces] == [2, 2, 1]
    keys, vectors = held(layer, chunk=2)
    assert keys.tolist() == KEYS
    assert same_bits(vectors, layer.weight[:5].detach())
    assert not vectors.requires_grad
    pieces[0].vectors.zero_()
    assert same_bits(held(layer)[1], vectors)
    assert list(dense().items()) == []
    for chunk in (0, 1.5):
        with pytest.raises((TypeError, ValueError), match="n: chunk must be"):
            layer.items(chunk=chunk)


def test_without_a_hash_table():
    layer = like_embedding(use_hashtable=False, padding_key=-1)
    keys, vectors = held(layer, chunk=4)
    assert keys.tolist() == list(range(9))
    assert same_bits(vectors, layer.weight.detach())
    layer.assign(torch.tensor([8, 2, 8]), numbers(3))
    expected = vectors.clone()
    expected[[2, 8]] = numbers(3)[[1, 2]]
    assert same_bits(held(layer)[1], expected)
    assert layer.vectors(torch.tensor([8, -1])).tolist() == [[7, 8, 9], [0, 0, 0]]
    for keys, message in [([9], "n: key 9 at position 0"), ([3, -1], "n: key -1 at position 1")]:
        with pytest.raises(IndexError, match=message):
            layer.assign(torch.tensor(keys), numbers(len(keys)))
    with pytest.raises(IndexError, match="n: key 9 at position 1"):
        layer.vectors(torch.tensor([1, 9]))
    assert same_bits(held(layer)[1], expected)


def test_of_a_layer_in_a_group():
    group = sparsekit.EmbeddingGroup({"user.id": dense()})
    layer = group.layers["user.id"]
    layer.assign(torch.tensor([5]), numbers(1))
    assert same_bits(layer.vectors(torch.tensor([5])), numbers(1))


def test_rows_catch_up_with_the_optimizer_first():
    """Under exact Adam, rows without a gradient catch up before they are read or assigned."""

    def trained(mode):
        layer = dense(dtype=torch.float64)
        optimizer = optim.Adam(layer.parameters(), lr=0.1, mode=mode)
        for keys in ([1, 2, 3, 4], [1], [1]):
            layer(torch.tensor(keys)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer, optimizer

    keys = torch.tensor([4, 2, 4])
    swept, (late, optimizer) = trained("sweep")[0], trained("catch_up")
    assert same_bits(late.vectors(keys), swept.vectors(keys))
    late = trained("catch_up")[0]
    assert same_bits(held(late, chunk=3)[1], held(swept)[1])
    late, optimizer = trained("catch_up")
    state = {name: value.clone() for name, value in optimizer.state[late.weight].items()}
    late.assign(torch.tensor([3]), numbers(1))
    assert same_bits(late.vectors(torch.tensor([3])), numbers(1).double())
    moments = optimizer.state[late.weight]
    assert (moments["exp_avg"][2] != 0).all()
    assert same_bits(moments["exp_avg"][0], state["exp_avg"][0])


def test_what_is_refused():
    layer = dense(key_dtype=torch.int32)
    layer.assign(torch.arange(8).int(), numbers(8))
    before = held(layer)
    ones, two = torch.ones(2, DIM), torch.tensor([20, 21], dtype=torch.int32)
    for keys, vectors, error, message in [
        ([1, 2], ones, TypeError, "n: keys must be a tensor, got list"),
        (two.float(), ones, TypeError, "n: keys must be int64 or int32, got torch.float32"),
        (two.long(), ones, TypeError, "n: keys must be torch.int32"),
        (two.view(1, 2), ones, ValueError, r"n: keys must have 1 dimension\(s\), got shape \(1, 2"),
        (two, ones[:1], ValueError, r"n: vectors must have shape \(2, 3\), got \(1, 3\)"),
        (two, ones[:, :2], ValueError, r"n: vectors must have shape \(2, 3\), got \(2, 2\)"),
        (two, ones[0], ValueError, r"n: vectors must have 2 dimension\(s\), got shape \(3,"),
        (two, ones.int(), TypeError, "n: vectors must be"),
        (two, ones.to("meta"), ValueError, "vectors on meta"),
        (two, ones, TableFullError, "n: the table .* 8 of 9 .* 2 new keys"),
    ]:
        with pytest.raises(error, match=message):
            layer.assign(keys, vectors)
        for now, then in zip(held(layer), before, strict=True):
            assert same_bits(now, then)
    for keys, error, message in [
        (two.float(), TypeError, "n: keys must be int64 or int32, got torch.float32"),
        (two.long(), TypeError, "n: keys must be torch.int32, got torch.int64"),
        ("12", TypeError, "n: keys must be a tensor, got str"),
        (two.to("meta"), ValueError, "n: .*weight on cpu.*keys on meta"),
    ]:
        with pytest.raises(error, match=f"^{message}"):
            layer.vectors(keys)


@pytest.mark.parametrize("padding", [-1, 5])
def test_a_padding_key_that_is_no_row_cannot_be_assigned(padding):
    layer = sparsekit.Embedding(5, 2, use_hashtable=False, padding_key=padding, name="rows")
    before = layer.weight.detach().clone()
    message = rf"^rows: key {padding} at position 1 is padding_key and has no row; .* in \[0, 5\)$"
    with pytest.raises(IndexError, match=message):
        layer.assign(torch.tensor([0, padding]), torch.ones(2, 2))
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("padding", [-1, 5])
def test_a_padding_key_that_is_no_row_is_looked_up(padding):
    layer = sparsekit.Embedding(5, 2, use_hashtable=False, padding_key=padding)
    vectors = layer(torch.tensor([4, padding]))
    assert torch.equal(vectors, torch.stack([layer.weight[4], torch.zeros(2)]))


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, keys: layer.vectors(keys),
        lambda layer, keys: layer.assign(keys, numbers(1)),
        lambda layer, keys: layer(keys),
    ],
)
def test_one_rank_cannot_use_its_part_of_a_table_alone(call):
    layer = dense()
    layer.world_size = 2
    with pytest.raises(RuntimeError, match=r"^n: made on rank 0 of 2, .* this is rank 0 of 1"):
        call(layer, torch.tensor([1]))
    assert len(layer.table) == 0


def test_a_layer_on_meta_has_no_vectors():
    layer, keys = dense(device="meta"), torch.tensor([1])
    for call in (
        lambda: layer.vectors(keys),
        lambda: layer.assign(keys, numbers(1)),
        lambda: layer.items(),
    ):
        with pytest.raises(RuntimeError, match=r"^n: the layer is on meta, and has no vectors"):
            call()


def test_each_row_catches_up_once():
    layer, caught_up = dense(), []
    layer.assign(torch.tensor(KEYS), numbers(5))
    layer.weight.before_read = lambda weight, rows: caught_up.append(sorted(rows.tolist()))
    layer.vectors(torch.tensor([KEYS[4], KEYS[1], KEYS[4], KEYS[1]]))
    assert caught_up == [[1, 4]]


def test_vectors_that_new_keys_would_overwrite_are_not_read():
    layer = dense()
    with torch.no_grad():
        layer.weight.fill_(1)
    with pytest.raises(RuntimeError, match=r"^n: weight was written to before any of its rows"):
        layer.vectors(torch.tensor([1]))


def test_rows_of_all_ranks_count_for_padding():
    layer = like_embedding(use_hashtable=False, padding_key=9)
    layer.world_size = 2
    keys, _ = _checked_pairs(layer, torch.tensor([17, 9]), numbers(2))
    assert keys.tolist() == [17, 9]
    layer.padding_key = 18
    with pytest.raises(IndexError, match=r"key 18 at position 0 .* in \[0, 18\)$"):
        _checked_pairs(layer, torch.tensor([18, 9]), numbers(2))


def test_zeros_may_be_assigned():
    layer, keys = dense(), torch.tensor([1, 2])
    layer.assign(keys, 0 * numbers(2))
    assert not layer.weight.written()
    assert not layer(keys).any()
