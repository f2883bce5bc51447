"""Outputs that overlap another argument raise an error; such calls once hung or crashed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparsekit

from .optimizer_rules import CASES as RULES

# Each call has an argument that overlaps another one. The calls run in another process, since one
# that is not refused may never return.
CALLS = f"""
import torch
from sparsekit import HashTable, ops
ADAM, MOMENTUM = {RULES["lazy adam"][:2]}, {RULES["momentum"][:2]}
keys, numbers = torch.arange(20), torch.zeros(3, 2, dtype=torch.float64)
step, two = torch.tensor([1]), torch.arange(2)


def insert(**changed):
    table = HashTable(100)
    table.find_or_insert(torch.arange(50, 60))
    arguments = dict(buckets=table.buckets, hash_seed=table.hash_seed, size=table.size, keys=keys)
    b = table.buckets
    arguments |= {{name: view(b, table.size) for name, view in changed.items()}}
    ops.hash_table_find_or_insert_(*arguments.values(), 100)


def renumber(buckets, new_rows, hash_seed=None):
    hash_seed = torch.tensor([3]) if hash_seed is None else hash_seed
    ops.hash_table_renumber_(buckets, hash_seed, new_rows)


def move(*tensors, rows=None):
    rows = torch.full((4,), -1, dtype=torch.int32) if rows is None else rows
    ops.move_rows_(tensors, rows, 2, [torch.zeros(())] * len(tensors))


def touch(*scores, clock=None, rows=None, index=None, counts=None, occurrences=None):
    bags, some = torch.arange(3).int(), torch.zeros(2).int()
    features = torch.tensor([[0, 0, 0, 2, 0, 9, 0, 0, 1]])
    counts = torch.tensor([1] + [0] * (len(scores) - 1)) if counts is None else counts
    clocks = [torch.tensor([5]) if clock is None else clock] * len(scores)
    ops.group_touch_(
        scores, some if index is None else index, some if rows is None else rows, counts, bags,
        features, torch.tensor([[2, 3]] * len(scores)), clocks, occurrences,
    )


def init(out=None, keys=two, rows=None, status=None):
    ops.init_rows_(torch.zeros(4, 4) if out is None else out, keys, rows, status)


def update(
    weight, states, rows=two, grad=None, row_step=None, step=step, number=None, count=False
):
    grad = torch.zeros(2, weight.shape[1]) if grad is None else grad
    arguments = [weight], states, [] if row_step is None else [row_step], [rows], [grad], [step]
    torch.ops.sparsekit.update_rows_(*arguments, *ADAM, count_steps=count, num_grads=number)


def update_all(*weights, states=None, rows=None, grads=None, steps=None, count=False):
    # Put a few small tables before the given ones, to test calls with many tables.
    few = [torch.zeros(3, 2) for _ in range(4)]
    own = states or [torch.zeros_like(w) for w in weights for _ in range(2)]
    own_grads = grads or [torch.zeros(2, w.shape[1]) for w in weights]
    own_steps = steps or [torch.tensor([1]) for _ in weights]
    arguments = (
        [*few, *weights], [torch.zeros(3, 2) for _ in range(8)] + own, None,
        [two] * 4 + (rows or [two] * len(weights)), [torch.zeros(2, 2) for _ in few] + own_grads,
        [torch.tensor([1]) for _ in few] + own_steps,
    )
    ops.update_rows_(*arguments, *ADAM, count_steps=count)


def catch_up(weight, states, row_step, rows=None, numbers=numbers):
    ops.catch_up_rows_(weight, states, row_step, rows, numbers, 1, *MOMENTUM)


whole, numbered = torch.zeros(8, 4), torch.zeros(8, 4, dtype=torch.int64)
floats = numbered.view(torch.float32)  # [8, 8] over the same memory
s = torch.zeros(8, 4), torch.zeros(8, 4)
wide = [torch.zeros(8, 8), torch.zeros(8, 8)]
lines = HashTable(20).buckets
words = torch.zeros(8, dtype=torch.int64)
"""

CASES = [
    ("insert(size=lambda b, s: b[3, :1])", "size", "buckets"),
    ("insert(size=lambda b, s: b[-1, -1:])", "size", "buckets"),
    ("insert(keys=lambda b, s: b.view(-1)[8:40])", "keys", "buckets"),
    ("insert(keys=lambda b, s: b.view(-1)[::9])", "keys", "buckets"),
    ("insert(keys=lambda b, s: b.view(torch.int32).view(-1)[-1:])", "keys", "buckets"),
    ("insert(keys=lambda b, s: s)", "keys", "size"),
    ("insert(hash_seed=lambda b, s: s)", "hash_seed", "size"),
    ("insert(hash_seed=lambda b, s: b[0, :1])", "hash_seed", "buckets"),
    ("renumber(lines, lines.view(torch.int32).view(-1)[10:14])", "new_rows", "buckets"),
    ("renumber(lines, two.int(), lines[0, :1])", "hash_seed", "buckets"),
    ("move(whole, whole[:, 1:])", "tensors[1]", "tensors[0]"),
    ("move(floats, rows=numbered.view(torch.int32).view(-1)[9:13])", "tensors[0]", "new_rows"),
    ("touch(words, words[7:])", "scores[1]", "scores[0]"),
    ("touch(words, clock=words[3:4])", "clocks[0]", "scores[0]"),
    ("touch(words, rows=words.view(torch.int32)[:2])", "rows", "scores[0]"),
    ("touch(words, index=words.view(torch.int32)[::9])", "index", "scores[0]"),
    ("touch(words, counts=words[:1])", "counts", "scores[0]"),
    ("touch(words, occurrences=words[2:4])", "occurrences", "scores[0]"),
    ("init(out=floats, keys=numbered[0, :2], rows=two)", "keys", "out"),
    ("init(out=floats, rows=numbered[3, 1:3])", "rows", "out"),
    ("init(out=floats, rows=two, status=numbered[7, 3:])", "status", "out"),
    ("update(floats, [torch.zeros(8, 8)] * 2)", "states[1]", "states[0]"),
    ("update(whole, [whole, s[0]])", "states[0]", "weight"),
    ("update(whole, s, grad=s[0][:2])", "grad", "states[0]"),
    ("update(whole, s, grad=whole[6:])", "grad", "weight"),
    ("update(floats, wide, rows=numbered[0, :2])", "rows", "weight"),
    ("update(floats, wide, step=numbered.fill_(1)[5, 1:2])", "step", "weight"),
    ("update(floats, wide, number=numbered.fill_(1)[5, 1:2])", "num_grads", "weight"),
    ("update(floats, wide, step=numbered.fill_(1)[5, 1:2], count=True)", "step", "weight"),
    ("update(whole, s, rows=numbered[0, :2], step=numbered.fill_(1)[0, 1:2], count=True)",
     "rows", "step"),
    ("update_all(whole, whole)", "weight of table 5", "weight of table 4"),
    ("update_all(whole, s[0], states=[*s, *torch.zeros(2, 8, 4)])",
     "weight of table 5", "states[0] of table 4"),
    ("update_all(whole, wide[0], grads=[whole[:2], torch.zeros(2, 8)])",
     "grad of table 4", "weight of table 4"),
    ("update_all(whole, wide[0], grads=[torch.zeros(2, 4), whole.view(4, 8)[2:]])",
     "grad of table 5", "weight of table 4"),
    ("update_all(floats, wide[0], rows=[two, numbered[0, :2]])",
     "rows of table 5", "weight of table 4"),
    ("update_all(whole, wide[0], steps=[step, step], count=True)",
     "step of table 5", "step of table 4"),
    ("update(whole, s, row_step=s[1].view(torch.int32).view(-1)[:8])", "row_step", "states[1]"),
    ("update(whole, s, row_step=whole.view(torch.int32).view(-1)[-8:])", "row_step", "weight"),
    ("t = torch.arange(8); update(whole, s, rows=t[4:6], row_step=t.view(torch.int32)[8:])",
     "rows", "row_step"),
    # The states lie side by side in p, but both include column 3.
    ("p = torch.zeros(8, 7); update(whole, [p[:, :4], p[:, 3:]])", "states[1]", "states[0]"),
    ("p = torch.zeros(72); update(whole, [p[:64].view(8, 8)[:, :4], p[6:70].view(8, 8)[:, :4]])",
     "states[1]", "states[0]"),
    ("p = torch.zeros(72); update(whole, [p[8:].view(8, 8)[:, 4:], p[:64].view(8, 8)[:, 2:6]])",
     "states[1]", "states[0]"),
    # The weight has elements 64 to 95 of p, and the state's rows 4 and 5 begin at 64 and 80.
    ("p = torch.zeros(128); update(p[64:96].view(8, 4), [p.view(8, 16)[:, :4], s[0]])",
     "states[0]", "weight"),
    ("init(out=floats[4:], keys=numbered[::4, 0], rows=two)", "keys", "out"),
    ("catch_up(whole, [s[0]], whole.view(torch.int32).view(-1)[:8])", "row_step", "weight"),
    ("catch_up(floats, [torch.zeros(8, 8)], torch.zeros(8).int(), rows=numbered[2, :3])",
     "rows", "weight"),
    ("t = torch.zeros(8, 8); catch_up(torch.zeros(8, 8), [t], torch.zeros(8).int(), "
     "numbers=t.view(torch.float64).view(-1, 2)[:3])", "numbers", "states[0]"),
]  # fmt: skip


def test_overlaps_are_refused():
    """One process makes all calls, on the CPU and on the host runner, and prints the errors."""
    body = "".join(f"attempt({call!r})\n" for call, *_ in CASES)
    body += f"import simt; simt.load(); simt.SimtMode().__enter__()\n{body}"
    program = f"""{CALLS}
import signal, sys
def attempt(call):
    signal.alarm(60)
    sys.stderr.write(call + chr(10))
    try:
        exec(call, globals())
        print("went on")
    except ValueError as error:
        print(error)
{body}"""
    path = [str(Path(sparsekit.__file__).parents[1]), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    messages = done.stdout.splitlines()
    for message, (call, one, other) in zip(messages, CASES * 2, strict=True):
        assert f"_: {one} overlaps {other} in memory" in message, call


def test_what_may_share_memory(engine):
    """Interleaved states, shared inputs that are only read, and adjacent views are allowed."""
    rule, settings, _ = RULES["lazy adam"]
    space = torch.zeros(9, 3, 4)
    weight, grad, step = torch.ones(9, 4), torch.ones(2, 4), torch.tensor([1])
    for states in (
        space.unbind(1)[:2],
        space.unbind(1)[:0:-1],
        [space.view(9, 12)[:, 1:5], space.view(9, 12)[:, 5:9]],
        [space.view(9, 12)[:, 8:], space.view(9, 12)[:, :4]],
        [space.view(-1)[:36].view(9, 4), space.view(-1)[36:72].view(9, 4)],
    ):
        space.zero_()
        twin = weight.clone()
        sparsekit.ops.update_rows_(
            twin, states, None, torch.tensor([8, 0]), grad, step, rule, settings
        )
        assert (states[0][[0, 8]] != 0).all()
        assert not states[0][1:8].any()
        assert space.count_nonzero() == 2 * 2 * 4
    numbers = torch.tensor([0, 3, 5, 6])
    table = sparsekit.HashTable(10)
    rows, _ = sparsekit.ops.hash_table_find_or_insert_(
        table.buckets, numbers[1:2], numbers[:1], numbers[1:], 10
    )
    assert rows.tolist() == [0, 1, 2]
    both = torch.zeros(4, 4)
    sparsekit.ops.init_rows_(both[:2], numbers[1:3], numbers[:2] * 0 + torch.tensor([0, 1]))
    assert both[:2].all()
    assert not both[2:].any()


def test_a_call_that_is_refused_changes_nothing(engine):
    table = sparsekit.HashTable(100)
    table.find_or_insert(torch.arange(50, 60))
    before = table.buckets.clone()
    with pytest.raises(ValueError, match="hash_table_find_or_insert_: keys overlaps buckets"):
        sparsekit.ops.hash_table_find_or_insert_(
            table.buckets, table.hash_seed, table.size, table.buckets.view(-1), 100
        )
    assert torch.equal(table.buckets, before)
    assert len(table) == 10
