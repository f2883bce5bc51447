"""`make demo` does as little as it can, `make test` adds to that, and neither repeats anything."""

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEPS = {
    "environment": "-m venv",
    "requirements": "--requirement requirements.txt",
    "dev requirements": "--requirement requirements-dev.txt",
    "editable": "--editable",
    "small build": "SPARSEKIT_SIMT=0 .venv/bin/python setup.py",
    "build": "\n.venv/bin/python setup.py",
    "demo": "-m sparsekit train",
    "tests": "-m pytest",
}
SMALL = {"requirements": ".venv/.ready", "small build": "sparsekit/lib/.built-demo"}
FULL = {"dev requirements": ".venv/.ready-dev", "build": "sparsekit/lib/.built"}


_clock = itertools.count(10**9)


def touch(path):
    """Make a file newer than all that were touched before, however fast this is."""
    path.touch()
    os.utime(path, (next(_clock),) * 2)


@pytest.fixture
def tree(tmp_path):
    """The sources that make looks at."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("csrc", ".venv/bin", "sparsekit/lib"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("CMakeLists.txt", "setup.py", "version.txt", "pyproject.toml", "csrc/a.cpp"):
        touch(tmp_path / name)
    for name in ("requirements.txt", "requirements-dev.txt"):
        touch(tmp_path / name)
    return tmp_path


def steps(tree, target):
    """What the target would do; after that its marks are there."""
    command = ["make", "--dry-run", "--no-print-directory", target]
    output = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout
    done = {step for step, text in STEPS.items() if text in "\n" + output}
    for step, mark in {**SMALL, **FULL}.items():
        if step in done:
            touch(tree / mark)
    return done


def test_demo_then_test_then_demo(tree):
    assert steps(tree, "demo") == {"environment", "requirements", "small build", "demo"}
    assert steps(tree, "demo") == {"demo"}
    assert steps(tree, "test") == {"dev requirements", "editable", "build", "tests"}
    assert steps(tree, "demo") == {"demo"}
    assert steps(tree, "test") == {"tests"}


def test_test_first(tree):
    everything = {"environment", "requirements", "dev requirements", "editable", "build", "tests"}
    assert steps(tree, "test") == everything
    assert steps(tree, "demo") == {"demo"}


def test_a_source_that_has_changed(tree):
    steps(tree, "test")
    touch(tree / "csrc" / "new.cpp")
    assert steps(tree, "demo") == {"build", "demo"}
    assert steps(tree, "test") == {"tests"}


def test_requirements_that_have_changed(tree):
    steps(tree, "test")
    touch(tree / "requirements-dev.txt")
    assert steps(tree, "test") == {"dev requirements", "editable", "build", "tests"}
    assert steps(tree, "demo") == {"demo"}
