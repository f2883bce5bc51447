"""Models that write to a delta log, and the comparison of a reader with them."""

import numpy as np
import torch

import sparsekit
from sparsekit import optim
from sparsekit.serving import DeltaLog
from sparsekit.serving.encoding import decode_rows, encode_rows

DIM = 8
KEYS = 3 * 2**33  # of key i


def made(rows=400, seed=3, optimizer=lambda p: optim.SGD(p, lr=0.1), **options):
    """Return a model with two tables, and its optimizer."""
    films = sparsekit.DistributedEmbedding("sum", rows, DIM, 1, name="films", seed=seed, **options)
    users = sparsekit.Embedding(50, DIM, dtype=torch.bfloat16)
    model = torch.nn.ModuleDict({"films": films, "users": users})
    return model, optimizer(model.parameters())


def keys_of(step, count=30, most=200):
    """Return keys of a step, int64 ``[count]``: a window that moves, some of them negative."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(0, most, (count,), generator=generator) + 3 * step
    return (drawn - 100) * KEYS


def train(model, optimizer, step):
    keys = keys_of(step)
    loss = model["films"](keys.view(-1, 1, 1)).square().sum()
    loss = loss + model["users"](keys // KEYS % 50).float().square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def rows_of(layer):
    """Return the keys of a table and their vectors as float32 arrays."""
    layer.catch_up()
    table = layer.table
    keys = torch.arange(layer.capacity) if table is None else table.keys()
    return keys.numpy(), layer.weight.detach()[: len(keys)].float().numpy()


def assert_serves(reader, model, rows="float32", known=()):
    """Compare all rows of a reader, a snapshot or a pinned version, with those of a model.

    Args:
        reader: the reader.
        model: the model.
        rows: format of the reader's rows.
        known: more keys to ask for; those that the model does not have must be absent.
    """
    for name, layer in model.items():
        keys, vectors = rows_of(layer)
        expected = decode_rows(encode_rows(vectors, rows), rows, DIM)
        found_vectors, found = reader.lookup(name, keys, found=True)
        assert found.all(), (name, keys[~found][:5])
        np.testing.assert_array_equal(found_vectors, expected, err_msg=name)
        if layer.table is not None and len(known):
            absent = np.setdiff1d(known, keys)
            assert not reader.lookup(name, absent, found=True)[1].any()


OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, mode="touched"),
    "LazyAdam": lambda p: optim.LazyAdam(p, lr=0.01),
    "exact Adam": lambda p: optim.Adam(p, lr=0.01, mode="catch_up"),
    "torch's Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}
ALL_KEYS = np.unique(np.concatenate([keys_of(step).numpy() for step in range(60)]))


def log_of(folder, model, rows="float32", **options):
    return DeltaLog(folder, model, **{"rows": rows, "every_steps": 1, "compact_at": None} | options)
