"""Layers with eviction do in random sequences on several ranks what the plain model does."""

import pytest
from lifecycle.sequences import SEQUENCES, STEPS, run

AT_ONCE = 5


@pytest.mark.parametrize("first", range(0, SEQUENCES, AT_ONCE))
def test_sequences_on_ranks(ranks, first, tmp_path):
    for seed in range(first, first + AT_ONCE):
        assert len(set(ranks(run, seed, STEPS, tmp_path / str(seed), ranks.world_size))) == 1
