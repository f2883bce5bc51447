"""Programs in C++ check what changes while readers go on: rows, indexes, and memory."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sparsekit.serving import _library

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "serving"
# A minute of this and more under ThreadSanitizer: see tests/sanitize.sh.
SECONDS = os.environ.get("SPARSEKIT_STRESS_SECONDS", "2")


def compiled(folder, name, *options):
    if shutil.which("g++") is None:
        pytest.skip(f"no g++ to compile {name}.cpp")
    program = folder / name
    core = ROOT / "csrc" / "core"
    includes = [f"-I{path}" for path in (ROOT / "csrc", core, core / "include")]
    command = ["g++", "-std=c++17", "-g", "-Wall", "-Wextra", "-Wno-psabi", "-pthread", *includes]
    command += [HERE / f"{name}.cpp", *options, "-o", program]
    subprocess.run(command, check=True, timeout=300)
    return program


@pytest.mark.time_limit(300 + 3 * float(SECONDS))
@pytest.mark.parametrize("copy", [False, True])
def test_rows_are_whole_while_deltas_arrive(tmp_path, copy):
    library = Path(_library.LIBRARY)
    program = compiled(tmp_path, "live_stress", "-O2", library, f"-Wl,-rpath,{library.parent}")
    folder = tmp_path / "log"
    folder.mkdir()
    command = [program, folder, SECONDS, "7", *(["copy"] if copy else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "versions" in done.stdout


def test_indexes_and_rows_under_sanitizers(tmp_path):
    sanitize = "-fsanitize=address,undefined"
    empty = ["g++", sanitize, "-shared", "-o", tmp_path / "empty.so", "-xc++", os.devnull]
    if shutil.which("g++") is None or subprocess.run(empty, capture_output=True).returncode != 0:
        pytest.skip("no g++ with sanitizers")
    sources = [SOURCES / f"{name}.cpp" for name in ("live_index", "spare_rows", "index", "message")]
    options = ["-O1", sanitize, "-fno-sanitize-recover"]
    program = compiled(tmp_path, "live_index_steps", *options, *sources)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[:3000]
