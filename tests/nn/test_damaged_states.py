"""Loading a randomly damaged state raises without any effect, or gives a valid layer."""

import contextlib
import random

import torch
from conftest import same_bits

from .bags import single, vectors
from .test_loading import same_state, state_of, trained

LOADS = 500
ENTRIES = ["weight", "seed", "shard", "table.buckets", "table.hash_seed", "table.size"]


def some_keys(rng, n):
    return list({rng.randrange(-(2**63), 2**63) for _ in range(n)})


def random_bytes(rng, state, name):
    """Overwrite a few bytes of an entry."""
    flat = state[name].view(-1).view(torch.uint8)
    for _ in range(rng.randint(1, 16)):
        flat[rng.randrange(len(flat))] = rng.randrange(256)


def another_dtype(rng, state, name):
    dtypes = [torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool]
    state[name] = state[name].to(rng.choice(dtypes))


def another_shape(rng, state, name):
    value = state[name]
    state[name] = rng.choice(
        [value[:-1], value[:0], torch.cat([value, value]), value.unsqueeze(0), value.view(-1)]
        + ([value.T, value[:, 1:]] if value.dim() == 2 else [])
    ).clone()


def missing(rng, state, name):
    del state[name]


def another_entry(rng, state, name):
    state[name] = state[rng.choice(list(state))].clone()


def not_a_tensor(rng, state, name):
    state[name] = rng.choice([None, 3, [1, 2], "weight"])


def slot(state, rng, rows):
    """Return the bucket and the position of a used entry."""
    used = (rows >= 0).nonzero().tolist()
    return rng.choice(used) if used else (0, 0)


def in_the_buckets(rng, state, name):
    """Repeat a key or a row, swap two rows, drop an entry, or change a count of spilled keys."""
    buckets = state["table.buckets"]
    words = buckets.view(torch.int32)
    rows = words[:, 10:15]
    (b, s), (c, t) = slot(state, rng, rows), slot(state, rng, rows)
    what = rng.randrange(6)
    if what == 0:
        buckets[b, s] = buckets[c, t].item()
    elif what == 1:
        rows[b, s] = rows[c, t].item()
    elif what == 2:
        rows[b, s], rows[c, t] = rows[c, t].item(), rows[b, s].item()
    elif what == 3:
        rows[b, s] = -1
    elif what == 4:
        words[:, 15] = torch.tensor([rng.randrange(-(2**31), 2**31) for _ in words])
    else:
        rows[rng.randrange(len(rows)), rng.randrange(5)] = rng.randrange(40)


def another_size(rng, state, name):
    state["table.size"] += rng.choice([-1, 1, 5, -(10**6), 2**62, 2**63 - 1])


def exchanged(rng, state, name):
    """Replace the state's table or vectors with another layer's."""
    other = trained(some_keys(rng, rng.randint(1, 30)), embedding_vec_size=rng.choice([5, 6]))
    for name in rng.choice([["weight"], ["table.buckets"], ["table.size"], ENTRIES[3:]]):
        state[name] = other.state_dict()[name].clone()


DAMAGES = [random_bytes, another_dtype, another_shape, missing, another_entry, not_a_tensor,
           in_the_buckets, in_the_buckets, another_size, exchanged]  # fmt: skip


def rows_of(state):
    """Read a state entry by entry; return a dict of key to row, or None if the state is invalid."""
    state = {"shard": torch.tensor([0, 1])} | state  # old states lack `shard`
    shapes = {"seed": (1,), "shard": (2,), "table.hash_seed": (1,), "table.size": (1,)}
    for name in ENTRIES:
        value = state.get(name)
        if not isinstance(value, torch.Tensor):
            return None
        if name != "weight" and value.dtype != torch.int64:
            return None
        if tuple(value.shape) != shapes.get(name, tuple(value.shape)):
            return None
    weight, buckets = state["weight"], state["table.buckets"]
    if not weight.dtype.is_floating_point or weight.dim() != 2 or weight.shape[1] != 5:
        return None
    if buckets.dim() != 2 or buckets.shape[1] != 8 or state["shard"].tolist() != [0, 1]:
        return None
    pairs = []
    for line in buckets.tolist():
        words = [(word >> shift) % 2**32 for word in line[5:] for shift in (0, 32)]
        pairs += [(key, row) for key, row in zip(line[:5], words[:5], strict=True) if row < 2**31]
    rows = dict(pairs)
    sound = len(pairs) == len(rows) == int(state["table.size"]) <= len(weight)
    return rows if sound and set(rows.values()) == set(range(len(rows))) else None


def test_500_damaged_states():
    rng = random.Random(0)
    loaded = refused = 0
    for _ in range(LOADS):
        layer = trained(some_keys(rng, rng.randint(1, 20)), max_vocabulary_size_per_gpu=25)
        capacity = rng.choice([20, 25, 40, 200])
        keys = some_keys(rng, rng.randint(1, min(capacity, 30)))
        state = state_of(trained(keys, max_vocabulary_size_per_gpu=capacity))
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            damage, name = rng.choice(DAMAGES), rng.choice(ENTRIES)
            # Earlier damage may make a later change impossible.
            with contextlib.suppress(
                AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError
            ):
                damage(rng, state, name)
        before, rows = state_of(layer), rows_of(state)
        assign = rng.random() < 0.3
        try:
            layer.load_state_dict(dict(state), assign=assign)
        except RuntimeError:
            assert same_state(state_of(layer), before)
            refused += 1
            # A valid state that fits must load.
            assert (
                rows is None or len(rows) > 25 or (assign and state["weight"].dtype == torch.half)
            )
            continue
        loaded += 1
        assert rows is not None
        assert sorted(rows, key=rows.get) == layer.table.keys().tolist()
        keys = torch.tensor(list(rows))
        assert torch.equal(layer.table.find(keys), torch.tensor(list(rows.values())))
        expected = state["weight"][list(rows.values())]
        assert same_bits(vectors(layer, list(rows)), expected.to(layer.weight.dtype))
        # The layer accepts new keys until it is full, and then refuses them.
        room = 25 - len(rows)
        new = [key for key in some_keys(rng, 30) if key not in rows][:room]
        fresh = single(seed=int(state["seed"]))
        if new:
            assert same_bits(vectors(layer, new), vectors(fresh, new).to(layer.weight.dtype))
        assert layer.table.keys().tolist() == sorted(rows, key=rows.get) + new
    assert min(loaded, refused) > LOADS // 5
