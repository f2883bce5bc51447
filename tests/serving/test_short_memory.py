"""A reader that runs out of memory or room keeps serving the last good version."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from sparsekit.serving import _library
from sparsekit.serving.delta_file import Section, header_of, write_delta
from sparsekit.serving.format import base_name, delta_name

from . import made
from .logs import LOG_ID
from .test_allocations import HEADERS, HERE

FOLLOW = """
import resource, sys
from pathlib import Path
import numpy as np
from sparsekit.serving import Snapshot
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (16 << 20)
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
snapshot = Snapshot(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, before)
try:
    snapshot.refresh()
except MemoryError as error:
    print(snapshot.version, "no room for 5000 rows" in str(error))
print(snapshot.lookup("narrow", np.arange(5), found=True))
"""


def write(folder, version, sections):
    """Write a delta, and return its path."""
    path = folder / delta_name(version, 0, 1)
    write_delta(path, header_of(log_id=LOG_ID, version=version, num_ranks=1), sections)
    return path


def test_a_version_without_room_leaves_the_one_before_it(tmp_path):
    """One call takes over a version, and has made room in a table of the next one when it fails."""
    vectors = np.arange(3, dtype=np.float32)[:, None]
    tables = [
        made.Table(np.arange(3), vectors, "narrow", miss="zeros"),
        made.Table(np.arange(1), np.zeros((1, 1024), np.float32), "wide", miss="zeros"),
    ]
    base = made.snapshot(tables, log_id=LOG_ID)
    (tmp_path / base_name(0)).write_bytes(base)
    for version, narrow, wide in ((1, 1, 1), (2, 2000, 5000)):
        keys, wide_keys = np.arange(3, 3 + narrow), np.arange(wide)
        sections = [
            Section(0, 0, 4, keys, keys.astype("<f4")[:, None].view(np.uint8)),
            Section(1, 0, 4096, wide_keys, np.zeros((wide, 4096), np.uint8)),
        ]
        write(tmp_path, version, sections)
    code = [sys.executable, "-c", FOLLOW, tmp_path]
    done = subprocess.run(code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = np.array([[0], [1], [2], [3], [0]], np.float32), np.arange(5) < 4
    assert done.stdout == f"1 True\n{expected}\n"


def test_each_allocation_may_fail(tmp_path, rng):
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile the program that fails allocations")

    def vectors(n):
        return rng.normal(size=(n, 4)).astype(np.float32)

    tables = [made.Table(np.arange(60), vectors(60), name, miss="zeros") for name in "ab"]
    paths = [tmp_path / base_name(0)]
    paths[0].write_bytes(made.snapshot(tables, log_id=LOG_ID))
    for version in range(1, 5):
        sections = []
        for table in range(2):
            drawn = rng.permutation(80 if version < 3 else 300)
            gone, changed = drawn[:20], drawn[20 : 60 if version < 3 else 180]
            rows = vectors(len(changed)).view(np.uint8)
            sections += [Section(table, 0, 16, gone, None), Section(table, 0, 16, changed, rows)]
        paths.append(write(tmp_path, version, sections))
    program, folder = tmp_path / "short_memory", _library.LIBRARY.parent
    command = ["gcc", "-O1", "-Wall", f"-I{HEADERS}", "-o", program, HERE / "short_memory.c"]
    library = [f"-L{folder}", "-lsparsekit_serving", f"-Wl,-rpath,{folder}"]
    subprocess.run([*command, *library], check=True, timeout=300)
    done = subprocess.run([program, *paths], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout
