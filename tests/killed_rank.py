"""sparsekit as the command line runs it, but for a rank that is killed once.

killed_rank.py MARKER RANK STEP ARGUMENTS...: the rank dies before its step of that number, unless
the file MARKER is there, which it makes.
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
