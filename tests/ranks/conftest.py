"""Fixtures with pools of ranks, one per world size, that the tests of a module share."""

import threading

import pytest
import torch

import sparsekit
from sparsekit.tables import embedding_table

from .late import late
from .pool import Ranks

# Backends that exchange tensors on the CPU.
BACKENDS = ["torch", "shared_memory"]


def _choose(rank, backend):
    sparsekit.init(backend=backend)


@pytest.fixture(params=BACKENDS)
def two_ranks_over(two_ranks, request):
    """Return a pool of two ranks; each test runs once per backend of the exchange."""
    two_ranks(_choose, request.param)
    two_ranks.backend = request.param
    return two_ranks


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    pool = Ranks(request.param)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def two_ranks():
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.fixture
def fresh_ranks():
    """Return a factory of pools with short timeouts, for tests that leave ranks dead or hanging."""
    pools = []

    def make(world_size, timeout=10, backend="auto"):
        pools.append(Ranks(world_size, timeout))
        pools[-1](_choose, backend)  # returns when all ranks are up
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def late_ranks(monkeypatch):
    """Return a function like `late`; in addition, its ranks can call layers."""
    local = threading.local()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(embedding_table, "exchange_of", lambda *_: local.exchange)

    def run(function, *settings, **named):
        def of_rank(exchange):
            local.exchange = exchange
            return function(exchange)

        return late(of_rank, *settings, **named)

    return run
