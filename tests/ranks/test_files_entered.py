"""A lookup on two ranks enters few files; tests/test_modules.py counts those of one rank."""

import threading

import pytest
import torch

import sparsekit
from sparsekit.tables import embedding_table
from tests.test_modules import entries

from .in_memory import each, on_ranks

_local = threading.local()
KEYS = torch.tensor([[[7, -1, 7], [10**12, 0, 3]]])


@pytest.mark.parametrize(("strategy", "most"), [("all_to_all", 60), ("reduce_scatter", 82)])
def test_a_forward_on_two_ranks_enters_few_files(monkeypatch, strategy, most):
    """Each of the three collectives enters the exchange, its stream, transport and messages."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(embedding_table, "exchange_of", lambda *_: _local.exchange)

    def of_rank(exchange):
        _local.exchange = exchange
        layer = sparsekit.DistributedEmbedding(
            "mean", 1000, 8, 2, 3, name="users", strategy=strategy
        )
        layer(KEYS)  # the first call of a layer checks more
        return entries(lambda: layer(KEYS))

    for found in each(on_ranks(of_rank)):
        assert "distributed/exchange.py: agree" in found
        assert len(found) <= most, "\n".join(found)
