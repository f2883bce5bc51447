"""Runs sparsekit's command line, and kills one rank once.

killed_rank.py MARKER RANK STEP ARGUMENTS...: RANK creates the file MARKER and dies before its step
number STEP; if MARKER exists already, RANK survives.
"""

import os
import signal
import sys
from pathlib import Path

from sparsekit import cli
from sparsekit.train.step import Step


def main():
    marker, rank, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    update, done = Step.update, 0

    def counted(self, *arguments):
        nonlocal done
        done += 1
        if done == step and os.environ.get("RANK", "0") == rank and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, *arguments)

    Step.update = counted
    return cli.main(sys.argv[4:])


if __name__ == "__main__":
    sys.exit(main())
