"""Fixtures: the stand-in for libnccl, compiled once, and a process per test file that loads it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from .fake import BUILT, in_process_of_its_own


def compiled(folder, *options):
    """Compile the stand-in for libnccl; return the library's path."""
    if not BUILT:
        pytest.skip("a build without NCCL")
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the stand-in for libnccl")
    library = folder / "libfake_nccl.so"
    source = Path(__file__).with_name("fake_nccl.cpp")
    command = ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-shared", "-fPIC", *options]
    subprocess.run([*command, "-o", library, source, "-lpthread"], check=True)
    return library


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("nccl"))


@pytest.fixture(scope="module")
def fake(library):
    """Return ``call(function, ...)``, which runs a function in a process with fake_nccl.cpp."""
    with in_process_of_its_own(library) as call:
        call.library = library
        yield call


@pytest.fixture(scope="module")
def old_fake(tmp_path_factory):
    """Return the same as `fake`, but with the functions of an NCCL before 2.28.7."""
    library = compiled(tmp_path_factory.mktemp("nccl"), "-DWITHOUT_REVOKE")
    with in_process_of_its_own(library) as call:
        yield call
