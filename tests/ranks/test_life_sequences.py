"""Layers with eviction do in random sequences on several ranks what the plain model does."""

import pytest
from lifecycle.sequences import SEQUENCES, STEPS, run

AT_ONCE = 5


@pytest.mark.parametrize("first", range(0, SEQUENCES, AT_ONCE))
def test_sequences_on_ranks(ranks, first, tmp_path):
    for seed in range(first, first + AT_ONCE, 2):
        folder = tmp_path / str(seed)
        assert len(set(ranks(run, seed, STEPS, folder, ranks.world_size))) == 1


@pytest.mark.parametrize("first", range(0, SEQUENCES, AT_ONCE))
def test_sequences_that_go_on_on_other_ranks(ranks, first, tmp_path):
    """Save on one rank and load on several, and the other way."""
    part = STEPS // 3
    for seed in range(first + 1, first + AT_ONCE, 2):
        folder = tmp_path / str(seed)
        run(0, seed, part, folder)
        ranks(run, seed, part, folder, ranks.world_size, part)
        run(0, seed, part, folder, 1, 2 * part)
