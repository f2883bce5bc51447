"""A table that evicts, trained on seeded keys that drift, and what checkpoints must restore."""

import torch

import sparsekit
from sparsekit import optim

OPTIMIZERS = {
    "LazyAdam": lambda p: optim.LazyAdam(p, lr=0.01, bias_correction="per_row", amsgrad=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01, mode="catch_up"),
    "Ftrl": lambda p: optim.Ftrl(p, lr=0.1, l1=0.001),
    "torch's Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
}


def digits(keys):
    """Return scores that say nothing of when a key has come."""
    return (keys >> 33) % 10


SCORES = {
    "lru": {},
    "lfu": {"score": sparsekit.LFU(7)},
    "user": {"score": digits},
    "ttl": {"ttl": 9},
    "admission": {"admission": sparsekit.MinCount(2, expire_after=6), "max_rows": 30},
    "sketch": {"admission": sparsekit.MinCount(2, sketch_bytes=1 << 13), "max_rows": 30},
}


def made(score="lru", optimizer="LazyAdam", capacity=120, seed=3, **options):
    """Return a layer with room for 60 or 30 keys on all ranks, and its optimizer."""
    options = {"on_full": "evict", "max_rows": 60, "seed": seed} | SCORES[score] | options
    layer = sparsekit.DistributedEmbedding("sum", capacity, 8, 1, name="ids", **options)
    return layer, OPTIMIZERS[optimizer](layer.parameters())


def keys_of(step, samples=24):
    """Return the keys of a step, ``[samples, 1, 1]``: most come again, some are new."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.rand(samples, 1, 1, generator=generator) ** 2
    return ((drawn * 90).long() + 4 * step) * 2**33


def train(layer, optimizer, first, last, part=slice(None)):
    for step in range(first, last):
        keys = keys_of(step)[part]
        (layer(keys).square().sum() * layer.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(layer, optimizer):
    """Return keys, vectors, scores, states of the rows, sorted by key, clock and counts."""
    layer.catch_up()
    keys = layer.table.keys()
    rows = keys.argsort()
    state = {"keys": keys[rows], "vectors": layer.weight.detach()[rows].clone()}
    state |= {"scores": layer.scores[rows], "clock": layer.clock.clone()}
    for name, value in optimizer.state[layer.weight].items():
        if isinstance(value, torch.Tensor) and value.dim():
            state[name] = value[rows].clone()
        else:
            state[name] = torch.as_tensor(value).clone()
    if layer.life.counts is not None:
        state["counts"] = joined_counts([layer.life.counts.state()])
    assert not layer.weight[len(keys) :].any()
    assert not layer.scores[len(keys) :].any()
    return state


def joined(parts):
    """Merge the states of all ranks, sorted by key."""
    order = torch.cat([part["keys"] for part in parts]).argsort()
    found = {}
    for name, value in parts[0].items():
        values = [part[name] for part in parts]
        if name == "clock" or not value.dim():
            assert all(torch.equal(value, other) for other in values), name
            found[name] = value
        elif name == "counts":
            found[name] = joined_counts(values)
        else:
            found[name] = torch.cat(values)[order]
    return found


def joined_counts(parts):
    """Merge counts of all ranks: sorted by key, or the largest of each place of their sketches."""
    if parts[0].dtype == torch.int32:
        return torch.stack(parts).amax(0)
    counts = torch.cat(parts)
    return counts[counts[:, 0].argsort()]
