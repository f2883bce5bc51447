"""On several ranks, a new key in a row that a load or reset freed gets a fresh optimizer state."""

import copy

import pytest
import torch

import sparsekit
from sparsekit import checkpoint, optim


def go_back(rank, way, fused, folder):
    layer = sparsekit.Embedding(200, 2, name="t", dtype=torch.float64)
    optimizer = optim.Adagrad(layer.parameters(), lr=0.1)
    if fused:
        optim.fuse_in_backward(optimizer, layer)

    def train(keys, factor):
        optimizer.zero_grad()
        (layer(keys) * factor).sum().backward()
        optimizer.step()

    train(torch.arange(20), 1.0)
    best = copy.deepcopy(layer.state_dict())
    checkpoint.save(layer, folder)
    train(torch.arange(60), 1000.0)
    if way == "load_state_dict":
        layer.load_state_dict(best)
    elif way == "checkpoint.load":
        checkpoint.load(layer, folder)
    else:
        layer.reset_parameters()
    new = torch.arange(100, 140)
    before = layer.vectors(new)
    train(new, 1.0)
    return (before - layer.vectors(new)).unique().tolist()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["load_state_dict", "checkpoint.load", "reset_parameters"])
def test_a_new_key_in_the_row_of_a_dropped_one(two_ranks, way, fused, tmp_path):
    for steps in two_ranks(go_back, way, fused, str(tmp_path / "saved")):
        assert steps == pytest.approx([0.1] * len(steps))
