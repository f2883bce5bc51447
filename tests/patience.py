"""Time limits that grow with the load of the machine."""

import os


def patience(seconds: float) -> float:
    """Return a time limit for work that takes at most `seconds` on an idle machine.

    The limit grows with the number of processes per core that are ready to run, averaged over the
    last minute: other processes, such as a build, must not fail a test.
    """
    cores = len(os.sched_getaffinity(0))
    return seconds * max(1.0, os.getloadavg()[0] / cores)
