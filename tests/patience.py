"""Limits of time that grow with what else the machine has to do."""

import os


def patience(seconds: float) -> float:
    """How long to wait for what is given so many seconds on a machine with nothing else to do.

    As many times longer as there are processes ready to run for each core, going by the last
    minute: two busy loops beside the tests, or another build, are no fault of theirs.
    """
    cores = len(os.sched_getaffinity(0))
    return seconds * max(1.0, os.getloadavg()[0] / cores)
