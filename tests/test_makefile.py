"""`make demo` does the minimum, `make test` adds to it, and neither repeats a step."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEPS = {
    "environment": "-m venv",
    "requirements": "--requirement requirements.txt",
    "dev requirements": "--requirement requirements-dev.txt",
    "editable": "--editable",
    "small build": "SPARSEKIT_SIMT=0 .venv/bin/python setup.py",
    "build": "} .venv/bin/python setup.py",
    "demo": "-m sparsekit train",
    "tests": "-m pytest",
}


_clock = itertools.count(10**9)


def touch(path):
    """Make a file newer than all files touched before, however fast the test runs."""
    path.touch()
    os.utime(path, (next(_clock),) * 2)


@pytest.fixture
def tree(tmp_path):
    """Create the sources whose times make compares."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("csrc", ".venv/bin", "sparsekit/lib"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("CMakeLists.txt", "setup.py", "version.txt", "pyproject.toml", "csrc/a.cpp"):
        touch(tmp_path / name)
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-dev-no-deps.txt"):
        touch(tmp_path / name)
    return tmp_path


def steps(tree, target, **variables):
    """Return the steps that the target would take, and create its marker files."""
    command = ["make", "--dry-run", "--no-print-directory", target]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SPARSEKIT", "MAKE"))}
    output = subprocess.run(
        command, cwd=tree, capture_output=True, text=True, check=True,
        env={**environment, **variables},
    ).stdout  # fmt: skip
    for removed, mark in re.findall(r"^(?:rm -f (\S+) && )?touch (\S+)$", output, re.MULTILINE):
        for path in tree.glob(removed) if removed else ():
            path.unlink()
        touch(tree / mark)
    return {step for step, text in STEPS.items() if text in "\n" + output}


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


def test_a_build_that_leaves_something_out_is_known_by_its_mark(tree):
    steps(tree, "test")
    assert steps(tree, "build", SPARSEKIT_CUDA="0", SPARSEKIT_SIMT="0") == {"build"}
    assert steps(tree, "build", SPARSEKIT_CUDA="0", SPARSEKIT_SIMT="0") == set()
    assert steps(tree, "test") == {"build", "tests"}
    assert steps(tree, "test") == {"tests"}


@pytest.mark.parametrize("nvcc", [True, False])
def test_what_the_tests_run_has_cuda_wherever_there_is_an_nvcc(tree, nvcc):
    tools = {each: shutil.which(each) for each in ("make", "sh", "find", "grep")}
    folder = tree / "tools"
    folder.mkdir()
    for name, path in tools.items():
        (folder / name).symlink_to(path)
    home = tree / "toolkit"
    (home / "bin").mkdir(parents=True)
    if nvcc:
        (home / "bin" / "nvcc").touch()
    makefile = tree / "Makefile"
    makefile.write_text(makefile.read_text().replace("/usr/local/cuda", str(tree / "none")))
    command = ["make", "--dry-run", "demo", "build", "wheel"]
    output = subprocess.run(
        command, cwd=tree, capture_output=True, text=True, check=True,
        env={"PATH": str(folder), "CUDA_HOME": str(home)},
    ).stdout  # fmt: skip
    builds = [
        line for line in output.splitlines() if "setup.py" in line or "--no-build-isolation" in line
    ]
    assert len(builds) == 5
    asked = f"SPARSEKIT_CUDA=${{SPARSEKIT_CUDA:-{int(nvcc)}}} "
    assert [asked in line for line in builds].count(True) == 4
    (demo,) = [line for line in builds if "SPARSEKIT_SIMT=0" in line]
    assert asked not in demo


def test_requirements_that_have_changed(tree):
    steps(tree, "test")
    touch(tree / "requirements-dev.txt")
    assert steps(tree, "test") == {"dev requirements", "editable", "build", "tests"}
    assert steps(tree, "demo") == {"demo"}


def test_bytecode_is_kept_whatever_the_machine_says(tree):
    show = f"show:; @{sys.executable} -c 'import sys; print(sys.dont_write_bytecode)'"
    output = subprocess.run(
        ["make", "--eval", show, "--no-print-directory", "show"],
        cwd=tree, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    ).stdout  # fmt: skip
    assert output == "False\n"
