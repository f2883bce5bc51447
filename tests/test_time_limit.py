"""A test that hangs fails at its time limit; if no signal reaches the test, its process ends.

The cases run pytest with this suite's conftest.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

WAITING = """
@LIMIT
def test_asleep():
    time.sleep(1000)

@LIMIT
def test_with_a_process():
    subprocess.run(["sleep", "1000"])

@LIMIT
def test_that_ends():
    pass
"""

# No signal gets through, and the interpreter's lock stays held: there is no report to wait for.
IN_NATIVE_CODE = """
sys.modules["conftest"].REPORT_S = 1

@pytest.fixture
def stuck():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

@LIMIT
def test_with_a_fixture(stuck):
    pass
"""


def run(folder, tests):
    header = "import ctypes, subprocess, sys, time, pytest\nLIMIT = pytest.mark.time_limit(1)\n"
    (folder / "test_it.py").write_text(header + tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = time_limit(seconds)\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-ra"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
    )


def test_tests_that_wait(tmp_path):
    done = run(tmp_path, WAITING)
    failed = set(re.findall(r"FAILED test_it.py::(\w+) - Failed: not done after 1 s", done.stdout))
    assert failed == {"test_asleep", "test_with_a_process"}, done.stdout + done.stderr
    assert "2 failed, 1 passed" in done.stdout
    assert done.returncode == 1


def test_a_test_stuck_in_native_code(tmp_path):
    done = run(tmp_path, IN_NATIVE_CODE)
    assert re.search(r"Timeout .*\n(.*\n)+.* in stuck\n", done.stderr), done.stdout + done.stderr
    assert done.returncode == 1
