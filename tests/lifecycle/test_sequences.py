"""Layers with eviction do in random sequences of operations what the plain model does."""

import pytest

from .sequences import SEQUENCES, STEPS, run


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_sequences_on_the_cpu_engine(seed, tmp_path):
    run(0, seed, STEPS, tmp_path)


# The host runner takes some 20 times as long.
@pytest.mark.time_limit(1200)
@pytest.mark.parametrize("engine", ["simt"], scope="session", indirect=True)
@pytest.mark.parametrize("seed", range(0, SEQUENCES, 1 if SEQUENCES > 10 else 7))
def test_sequences_on_the_host_runner(seed, engine, tmp_path):
    run(0, seed, STEPS, tmp_path)
