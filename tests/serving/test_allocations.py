"""A lookup allocates nothing."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from sparsekit.serving import _library

from . import made

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "csrc" / "serving" / "include"


@pytest.mark.parametrize("miss", ["initial", "zeros", "fallback"])
def test_lookups_allocate_nothing(tmp_path, rng, miss):
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile the program that counts allocations")
    fallbacks = 3 if miss == "fallback" else 0
    keys = np.concatenate([np.arange(-3000, 3000, 2), np.arange(fallbacks) + made.FIRST_FALLBACK])
    vectors = rng.normal(size=(len(keys), 16)).astype(np.float32)
    table = made.Table(keys, vectors, miss=miss, num_fallbacks=fallbacks, row_format="int8")
    (tmp_path / "model.sks").write_bytes(made.snapshot([table]))
    program, folder = tmp_path / "allocations", _library.LIBRARY.parent
    command = ["gcc", "-O1", "-Wall", f"-I{HEADERS}", "-o", program, HERE / "allocations.c"]
    library = [f"-L{folder}", "-lsparsekit_serving", f"-Wl,-rpath,{folder}"]
    subprocess.run([*command, *library], check=True, timeout=300)
    done = subprocess.run([program, tmp_path / "model.sks"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0\n")


def test_the_header_is_installed_with_the_library():
    installed = _library.LIBRARY.parents[1] / "include" / "sparsekit_serving.h"
    assert installed.read_bytes() == (HEADERS / "sparsekit_serving.h").read_bytes()
