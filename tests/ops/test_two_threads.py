"""When two threads insert into one table at once, one raises and the table stays valid."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparsekit

# Runs in another process: without mutual exclusion the calls would write out of bounds.
PROGRAM = """
import os, random, sys, threading
import torch
from sparsekit import HashTable, ops

torch.set_num_threads(1)


def together(*works):
    # Calls the functions at the same time, waits for all of them, and raises their errors.
    barrier, errors = threading.Barrier(len(works)), []

    def run(work):
        try:
            barrier.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def insert(table, keys, refusals, direct=False):
    try:
        if direct:  # a view, which is another tensor
            state = table.buckets[:], table.hash_seed, table.size
            rows = ops.hash_table_find_or_insert_(*state, keys, table.capacity)[0]
        else:
            rows = table.find_or_insert(keys)
        assert torch.equal(rows, table_rows(table, keys))
    except sys.modules["sparsekit"].TableFullError:  # a RuntimeError, too
        raise
    except RuntimeError as error:
        assert "another thread is inserting into this table" in str(error), error
        assert direct or str(error).startswith("users: "), error
        refusals.append(error)


def table_rows(table, keys):
    return table.find(keys)
"""

INSERTERS = """
# Both calls fail: the table has no room for either half, so both remove the keys they inserted.
for full in (False, True):
    refusals = []
    for attempt in range(100):
        n = 300_000
        keys = torch.randperm(4 * n)
        table = HashTable(n // 2 if full else 4 * n, name="users", load_factor=1.0 if full else 0.6)
        fill = keys[-n // 4:]
        table.find_or_insert(fill)
        before = table.buckets.clone()

        def attempt_to(keys, direct):
            try:
                insert(table, keys, refusals, direct)
            except sys.modules["sparsekit"].TableFullError:
                assert full

        together(lambda: attempt_to(keys[:n], False), lambda: attempt_to(keys[n:2 * n], True))
        assert len(table.keys()) == len(table)
        if full:
            assert torch.equal(table.buckets, before)
        if len(refusals) >= 3:
            break
    assert refusals, "the calls never met"
    table.find_or_insert(fill)  # nothing is left behind
"""

PART = """
# A view of some buckets counts as the same table, even in a call that inserts nothing.
n = 200_000
keys, none = torch.randperm(n), torch.empty(0, dtype=torch.int64)
refusals = []
for attempt in range(100):
    table, done = HashTable(2 * n, name="users"), []

    def add():
        try:
            insert(table, keys, refusals)
        finally:
            done.append(True)

    def insert_nothing():
        while not done:
            try:
                size = torch.zeros(1, dtype=torch.int64)
                ops.hash_table_find_or_insert_(table.buckets[1:], table.hash_seed, size, none, 1)
            except RuntimeError as error:
                assert "another thread is inserting into this table" in str(error), error
                refusals.append(error)

    together(add, insert_nothing)
    if refusals:
        break
assert refusals, "the calls never met"
"""

CLEARER = """
# Clearing is a change, too.
n, refusals = 200_000, []
keys = torch.randperm(n)
for attempt in range(100):
    table, done = HashTable(2 * n, name="users"), []

    def add():
        try:
            while True:
                try:
                    return table.find_or_insert(keys)
                except RuntimeError as error:
                    assert "another thread is inserting into this table" in str(error), error
        finally:
            done.append(True)

    def clear():
        while not done:
            try:
                ops.hash_table_clear_(table.buckets)
            except RuntimeError as error:
                assert "another thread is inserting into this table" in str(error), error
                refusals.append(error)

    together(add, clear)
    if refusals:
        break
assert refusals, "the calls never met"
"""

FINDER = """
refusals, done = [], []
n = 400_000
table, keys = HashTable(2 * n, name="users"), torch.randperm(2 * n)


def look_up():
    while not done:
        rows = table.find(keys[:5000])
        assert ((rows >= -1) & (rows < n)).all()
        try:
            assert len(table.keys()) <= n
        except ValueError as error:
            assert "damaged" in str(error)


def add():
    try:
        insert(table, keys[:n], refusals)
    finally:
        done.append(True)


together(add, look_up, look_up)
assert not refusals
assert torch.equal(table.find(keys[:n]), torch.arange(n))
"""

FORK = """
for attempt in range(4):
    table, n = HashTable(2_000_000, name="users"), 1_000_000
    keys = torch.randperm(n)
    codes = []

    def fork():
        for _ in range(8):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    table.find_or_insert(keys[:3])  # the table may be half done
                    code = 0
                except ValueError:
                    code = 0
                finally:
                    os._exit(code)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    together(lambda: table.find_or_insert(keys), fork)
    assert codes == [0] * 8
"""


NAMES = ["INSERTERS", "PART", "CLEARER", "FINDER", "FORK"]
# AddressSanitizer's allocator does not take its locks before a fork, so a child could wait for ever
# for a lock that another thread held.
UNDER_ASAN = "libasan" in os.environ.get("LD_PRELOAD", "")

# Fork for each case before anything is computed: importing torch takes longer than the cases.
IN_FORKS = """
import os, sys
import torch, sparsekit

for name, program in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    pid = os.fork()
    if pid == 0:
        exec(program, {"__name__": "__main__"})
        sys.stderr.flush()
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def done():
    path = [str(Path(sparsekit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    names = [name for name in NAMES if not (name == "FORK" and UNDER_ASAN)]
    programs = [part for name in names for part in (name, PROGRAM + globals()[name])]
    return subprocess.run(
        [sys.executable, "-c", IN_FORKS, *programs],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", NAMES)
def test_threads(done, name):
    if name == "FORK" and UNDER_ASAN:
        pytest.skip("AddressSanitizer deadlocks after a fork beside a thread that allocates")
    assert f"{name} 0" in done.stdout.splitlines(), f"{done.stdout}: {done.stderr}"
