"""Runs cases in a child process for some seconds, and reports a case that kills or hangs it."""

import argparse
import faulthandler
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback

# Seconds after which a case counts as hanging; under a sanitizer the slowest cases take seconds.
PATIENCE = 120
REPORTED = 3  # exit status of a child that has printed its report; a sanitizer exits with 1


class Progress:
    """Number of the current case, in memory shared with the parent process."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)
        self.write(-1)

    def write(self, number: int) -> None:
        self._memory[:] = struct.pack("q", number)

    def read(self) -> int:
        return struct.unpack("q", self._memory[:])[0]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["cpu", "simt"], default="cpu")
    parser.add_argument("--op", action="append", help="only this one; may be given again")
    parser.add_argument("--case", type=int, help="only the case of this number")
    return parser.parse_args()


def reproduction(options: argparse.Namespace, number: int) -> str:
    only = "".join(f" --op {name}" for name in options.op or ())
    return (
        f"case {number}: reproduce with python -m tests.fuzz --backend {options.backend} "
        f"--seed {options.seed}{only} --case {number}"
    )


def work(options: argparse.Namespace, progress: Progress) -> int:
    """Run cases until time is up or a case fails; return the exit status."""
    from . import cases  # imports torch, which the parent does not need

    names = options.op or list(cases.OPS)
    count = dict.fromkeys(names, 0)
    started, number = time.monotonic(), options.case or 0
    while number == 0 or options.case is not None or time.monotonic() - started < options.seconds:
        progress.write(number)
        name = random.Random(f"{options.seed} {number} op").choice(names)
        case = cases.Case(options.seed, number, options.backend)
        try:
            cases.run(name, case)
        except Exception:
            print(f"\n{name}: {traceback.format_exc()}{case.report()}")
            print(reproduction(options, number), flush=True)
            return REPORTED
        count[name] += 1
        number += 1
        if options.case is not None:
            print(case.report())
            break
    ran = ", ".join(f"{name} {n}" for name, n in count.items())
    took = time.monotonic() - started
    print(
        f"{sum(count.values())} cases of seed {options.seed} on {options.backend} in {took:.0f} s, "
        f"no mismatch: {ran}",
        flush=True,
    )
    return 0


def watch(child: int, options: argparse.Namespace, progress: Progress) -> int:
    """Wait for the child, report the case that killed it, and end the child if it hangs."""
    seen, since = -1, time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if progress.read() != seen:
            seen, since = progress.read(), time.monotonic()
        elif seen >= 0 and time.monotonic() - since > PATIENCE:
            print(f"no end after {PATIENCE} s", flush=True)
            os.kill(child, signal.SIGABRT)  # faulthandler prints its stacks
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, REPORTED):
        print(f"ended with {code}")
        print(reproduction(options, progress.read()), flush=True)
    return 1 if code else 0


def main() -> int:
    options, progress = parse(), Progress()
    # On a busy machine, threads that spin while they wait take time from threads that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        faulthandler.enable()
        sys.exit(work(options, progress))
    return watch(child, options, progress)


if __name__ == "__main__":
    sys.exit(main())
