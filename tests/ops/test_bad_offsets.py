"""Offsets beyond the entries raise an error before anything past the entries is read."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import sparsekit

# Entries end right before a page that must not be touched. A fault would end the process, so this
# program runs in a separate process.
PROGRAM = """
import contextlib, ctypes, mmap, sys
import simt
import torch
from sparsekit import ops

libc = ctypes.CDLL(None, use_errno=True)
simt.load()


def guarded(tensor):
    before = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, before + mmap.PAGESIZE)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + before
    assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = torch.frombuffer(memory, dtype=tensor.dtype, offset=before - tensor.nbytes)
    return copy[: tensor.numel()].copy_(tensor)


def refused(call, *arguments):
    try:
        call(*arguments)
    except ValueError as error:
        assert "offsets must rise from 0 to len(rows)" in str(error), error
    else:
        raise AssertionError("not refused")


def check(lengths, at, offset):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    n, bags = int(offsets[-1]), len(lengths)
    offsets[at] = offset if offset < 0 else offset + n
    rows, weights = guarded(torch.arange(n) % 7), guarded(torch.rand(n) + 0.5)
    weight, grad = torch.rand(7, 4), torch.rand(bags, 4)
    backward = torch.ops.sparsekit.embedding_bag_backward
    of_weights = torch.ops.sparsekit.embedding_bag_backward_sample_weights
    for code, combiner in enumerate(("sum", "mean", "sqrtn")):
        for given in (None, weights):
            refused(ops.embedding_bag, weight, rows, offsets, combiner, given)
            refused(backward, grad, rows, offsets, code, given, 7)
        refused(of_weights, grad, weight, rows, offsets, code, weights)


for backend in (contextlib.nullcontext, simt.SimtMode):
    print(backend.__name__, file=sys.stderr)
    with backend():
        for lengths in ([1, 0, 2, 0, 1], [1] * 40, [30, 20, 40], [200, 300, 1], [700]):
            for at in {1, len(lengths) // 2, len(lengths)}:
                for offset in (1, 100, 250, 1000, -1, -(2**40)):
                    check(lengths, at, offset)
"""


def test_nothing_beyond_the_entries_is_read():
    """Check the CPU engine and the kernels on the host runner."""
    tests = Path(__file__).parents[1]
    path = [str(Path(sparsekit.__file__).parents[1]), str(tests), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    beyond = f"an op has read beyond the entries: {done.stderr}"
    assert done.returncode != -signal.SIGSEGV, beyond
    assert done.returncode == 0, done.stderr
