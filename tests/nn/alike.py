"""Compares layers called one by one with the same layers in a group."""

import torch
from conftest import generator


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, equal_nan=True)


def upstream(outputs, seed):
    """Return a gradient for each output."""
    return [
        torch.randn(out.shape, generator=generator(seed + i)).to(out)
        for i, out in enumerate(outputs)
    ]


def state_of(layers):
    """Return the layers' state without the hash tables' buckets, which depend on a random seed."""
    state = layers.state_dict()
    return {
        name: value for name, value in state.items() if not name.endswith(("buckets", "hash_seed"))
    } | {f"{name}.keys": layer.table.keys() for name, layer in layers.items() if layer.table}


def check_step(apart, together, optimizers):
    """Take a step with each optimizer; check that layers and optimizer states stay equal."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert_same(state_of(apart), state_of(together))
    for p, q in zip(apart.parameters(), together.parameters(), strict=True):
        assert_same(dict(optimizers[0].state[p]), dict(optimizers[1].state[q]))
