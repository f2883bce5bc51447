"""Detects that training is slow because its threads share cores with other processes."""

from __future__ import annotations

import os
import resource
import time

import torch

# Minimum seconds of training needed for a judgment, and number of context switches per thread and
# second that is exceeded only if other processes use our cores.
LEAST_S = 5.0
SWITCHES_PER_THREAD_S = 10.0
# Environment variables that determine how threads wait.
CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


class Spinning:
    """Compares the rate of involuntary context switches with that on an otherwise idle machine.

    At the end of every parallel loop, OpenMP's threads wait for one another by spinning, and a
    training step has dozens of such loops. If other processes use the same cores, the thread that
    the others wait for may be suspended for a whole time slice, while spinning threads waste
    theirs. Sleeping threads avoid this: they free their cores, and are woken at once.
    """

    def __init__(self) -> None:
        self._told = False
        self.begin()

    def begin(self) -> None:
        """Start measuring."""
        self._begin = _now()

    def hint(self) -> str:
        """Return advice on how to train faster; empty if it was given before or would not help."""
        seconds, switches = (now - was for now, was in zip(_now(), self._begin, strict=True))
        threads = torch.get_num_threads()
        chosen = any(name in os.environ for name in CHOSEN)
        few = switches < SWITCHES_PER_THREAD_S * threads * seconds
        if self._told or threads == 1 or chosen or seconds < LEAST_S or few:
            return ""
        self._told = True
        return (
            f"\nhint: other processes use these cores, and torch's {threads} threads spin while "
            f"they wait for each other; OMP_NUM_THREADS=1 or OMP_WAIT_POLICY=passive, set before "
            f"Python starts, may be many times faster"
        )


def _now() -> tuple[float, int]:
    return time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
