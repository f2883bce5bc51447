"""Pools of ranks, one for each world size, kept for a module."""

import pytest

from .pool import Ranks


def _nothing(rank):
    pass


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
    """For a test that leaves ranks dead or in a collective; their timeout is short."""
    pools = []

    def make(world_size, timeout=10):
        pools.append(Ranks(world_size, timeout))
        pools[-1](_nothing)  # returns when all of them are up
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
