"""Runs commands of sparsekit's command line one after another, and kills one rank once in each.

killed_rank.py RANK STEP [MARKER ARGUMENTS...]...: RANK creates the file MARKER and dies before its
step number STEP of the command; if MARKER exists already, RANK survives. MARKER ends in ".marker".
"""

import itertools
import os
import signal
import sys
from pathlib import Path

from sparsekit import cli
from sparsekit.train.step import Step

update = Step.update


def run(arguments, marker, rank, step):
    """Run a command; `rank` dies before a step unless the marker exists."""
    done = 0

    def counted(self, *given):
        nonlocal done
        done += 1
        if done == step and os.environ.get("RANK", "0") == rank and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, *given)

    Step.update = counted
    return cli.main(arguments)


def main():
    rank, step, *rest = sys.argv[1:]
    starts = [i for i, argument in enumerate(rest) if argument.endswith(".marker")]
    return max(
        run(rest[begin + 1 : end], Path(rest[begin]), rank, int(step))
        for begin, end in itertools.pairwise([*starts, len(rest)])
    )


if __name__ == "__main__":
    sys.exit(main())
