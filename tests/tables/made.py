"""Makes tables without layers, as one rank or as one of several."""

import pytest
import torch

from sparsekit.tables import embedding_table
from sparsekit.tables.embedding_table import EmbeddingTable
from sparsekit.tables.options import TableOptions

both = pytest.mark.parametrize("assign", [False, True])


def table_of(*keys, capacity=9, dim=2, **options):
    """Return a table named n with these keys; every element of the i-th key's vector is i."""
    needed = {"use_hashtable": True, "dtype": torch.float32, "device": None, "name": "n"}
    made = EmbeddingTable(TableOptions(capacity, dim, **{**needed, **options}))
    if keys:
        rows = made.table.find_or_insert(torch.tensor(keys))
        with torch.no_grad():
            made.weight[rows] = rows[:, None] + torch.ones(dim, dtype=made.weight.dtype)
        made.weight.note_version()
    return made


def of_rank(monkeypatch, rank, world_size):
    """Make new tables believe that they are on this rank."""
    monkeypatch.setattr(embedding_table, "_place", lambda group, device: (rank, world_size))


def parts_of(module):
    """Return a module's state, with copies of its tensors."""
    return {name: each.detach().clone() for name, each in module.state_dict().items()}


def same(one, other):
    """Return whether two states have equal entries."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def without(state, *names):
    """Return the state without some entries."""
    return {name: each for name, each in state.items() if name not in names}
