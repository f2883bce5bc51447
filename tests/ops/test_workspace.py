"""The engine stays within the workspace size that it requests.

The ops allocate workspace in blocks of 2 MiB, where small overruns would go unnoticed.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import sparsekit


def test_no_op_writes_behind_its_workspace(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the program that calls the engine")
    source = Path(__file__).with_name("workspace.cpp")
    library = (
        Path(sparsekit.__file__).parent
        / "lib"
        / sparsekit.instruction_set()
        / "libsparsekit_core.so"
    )
    include = Path(__file__).parents[2] / "csrc" / "core" / "include"
    program = tmp_path / "workspace"
    command = ["g++", "-std=c++17", "-O1", "-Wall", f"-I{include}", "-o", program, source, library]
    # A preloaded sanitizer is for the program, not for the compiler.
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    rpath = f"-Wl,-rpath,{library.parent}"
    subprocess.run([*command, rpath], check=True, timeout=300, env=plain)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "0 failures\n")
