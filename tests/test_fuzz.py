"""The fuzzer runs for five seconds on each backend, and reports faults that tests inject."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SEED = 0 if os.environ.get("CI") else random.randrange(10**6)


def fuzz(*arguments, before=""):
    """Run the code in `before`, then the fuzzer; return its exit status and output."""
    script = (
        f"import sys; sys.argv[1:] = {list(arguments)}; from tests.fuzz import __main__ as fuzz\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script + before + "\nsys.exit(fuzz.main())"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["cpu", "simt"])
def test_ops_and_layers_equal_the_reference(backend):
    seconds = os.environ.get("SPARSEKIT_FUZZ_SECONDS", "5")
    code, printed = fuzz("--backend", backend, "--seconds", seconds, "--seed", str(SEED))
    assert code == 0, printed
    assert "no mismatch" in printed


WRONG_REFERENCE = """
from tests.reference import ops as reference
right = reference.gather_rows
reference.gather_rows = lambda table, rows: right(table, rows) + (rows == 3).unsqueeze(1)
"""


def test_a_mismatch_is_reported_and_can_be_repeated():
    options = ["--backend", "cpu", "--seed", "5", "--op", "gather_rows"]
    code, printed = fuzz(*options, "--seconds", "60", before=WRONG_REFERENCE)
    assert code == 1
    assert "Mismatch" in printed
    line = next(line for line in printed.splitlines() if "reproduce with" in line)
    again = line.partition("python -m tests.fuzz ")[2].split()
    code, printed = fuzz(*again, before=WRONG_REFERENCE)
    assert code == 1
    assert line in printed


def test_a_case_that_kills_its_process_is_named():
    # Exit as a sanitizer does.
    before = "import os; from sparsekit import ops; ops.unique = lambda keys: os._exit(1)"
    code, printed = fuzz("--op", "unique", before=before)
    assert code == 1
    assert "ended with 1" in printed
    assert "case 0: reproduce with" in printed


def test_a_case_without_end_is_stopped_and_named():
    before = "import time; from sparsekit import ops; fuzz.PATIENCE = 1\n"
    before += "ops.unique = lambda keys: time.sleep(1000)"
    code, printed = fuzz("--op", "unique", before=before)
    assert code == 1
    assert "no end after 1 s" in printed
    assert "case 0: reproduce with" in printed
