"""Compares every op with the CPU at many small shapes; gpu_check.sh runs it under a sanitizer.

usage: python tests/gpu_check_ops.py DEVICE SECONDS

DEVICE is cuda, or simt (the host runner) for a rehearsal. No case begins after SECONDS.
"""

import contextlib
import functools
import itertools
import random
import sys
import time

import rooms
import simt
import torch
from ops import (
    group_bags,
    test_group_bucketize,
    test_group_find,
    test_group_touch,
    test_group_update,
)
from ops.groups import random_group
from ops.optimizer_rules import CASES, PER_ROW, widths

import sparsekit
from sparsekit import ops

SIZES = (0, 1, 31, 33, 257, 1000)
DIMS = (1, 3, 16, 64, 100, 128, 1024)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2}
EXTREMES = torch.tensor([0, -1, -(2**63), 2**63 - 1])


def both(function, device, *arguments, mode, exact=True):
    """Call a function on the CPU and on the device, and check that the results are the same."""
    expected = function(*(a.clone() if torch.is_tensor(a) else a for a in arguments))
    with mode():
        actual = function(*(a.to(device) if torch.is_tensor(a) else a for a in arguments))
    for one, other in zip(_tensors(actual), _tensors(expected), strict=True):
        one = one.cpu()
        if exact or not one.is_floating_point():
            assert torch.equal(one, other), f"{function} on {[_shape(a) for a in arguments]}"
        else:
            scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
            tolerance = TOLERANCE[one.dtype] * scale
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance, check_device=False)


def _tensors(result):
    return result if isinstance(result, (tuple, list)) else [result]


def _shape(argument):
    return tuple(argument.shape) if torch.is_tensor(argument) else argument


def key_inputs(n):
    generator = torch.Generator().manual_seed(n)
    random = torch.randint(-(2**62), 2**62, (n,), generator=generator)
    yield random
    yield random % 7
    yield torch.full((n,), -5)
    yield EXTREMES[random % 4]
    yield torch.where(random % 2 == 0, 3, random)


def padded(keys):
    """Return the results of `unique_padded` without the padding at their end."""
    distinct, inverse, counts, number = torch.ops.sparsekit.unique_padded(keys)
    return distinct[: int(number)], inverse, counts[: int(number)]


def table_of(keys):
    """Return all results of a hash table for two batches of keys."""
    table = sparsekit.HashTable(max(1, len(keys)), load_factor=0.9, device=keys.device)
    first = table.find_or_insert(keys[: len(keys) // 2])
    before = table.find(keys)
    second = table.find_or_insert(keys)
    results = first, before, second, table.find(keys + 1), table.keys()
    larger = sparsekit.HashTable(2 * len(keys) + 1, device=keys.device)
    larger.hash_seed.copy_(table.hash_seed)
    ops.hash_table_copy_(larger.buckets, table.buckets, table.hash_seed, len(table))
    larger.size.copy_(table.size)
    results = *results, larger.keys()
    kept = torch.arange(len(table), device=keys.device) % 3 > 0
    new_rows = ops.compact_rows((~kept).nonzero().squeeze(1), len(table))
    ops.hash_table_renumber_(table.buckets, table.hash_seed, new_rows)
    table.size.copy_(kept.sum().reshape(1))
    found = ops.lowest_rows(
        keys[: len(kept)].long().abs() % 9, table.buckets, len(table), 1, 0, 0, table.size, 5
    )
    moved = keys[: len(kept)].clone()
    zero = torch.zeros((), dtype=keys.dtype, device="cpu")
    ops.move_rows_([moved], new_rows, len(table), [zero])
    return *results, *found, new_rows, moved, table.find(keys), table.keys(), table.size


def full_table(keys):
    """Insert keys into a table of three rows, often too few; return results and contents."""
    table = sparsekit.HashTable(3, load_factor=1.0, device=keys.device)
    rows, status = ops.hash_table_find_or_insert_(
        table.buckets, table.hash_seed, table.size, keys, 3
    )
    return rows, status[1:], table.size, table.keys()


def bags(weight, rows, offsets, combiner, sample_weights):
    """Return the pooled bags and the gradients of all inputs."""
    weight = weight.clone().requires_grad_()
    inputs = [weight]
    if sample_weights is not None:
        sample_weights = sample_weights.clone().requires_grad_()
        inputs.append(sample_weights)
    out = ops.embedding_bag(weight, rows, offsets, combiner, sample_weights)
    return (out.detach(), *torch.autograd.grad(out.sum() + (out * out).sum(), inputs))


def initial(keys, dim, dtype, distribution):
    out = torch.zeros(len(keys), dim, dtype=dtype, device=keys.device)
    ops.init_rows_(out, keys, seed=11, distribution=distribution, a=-0.05, b=0.05)
    return out


def updated(weight, rows, grad, case, per_row, seed):
    """Take two steps of a rule, the second without some rows; late rows catch up if supported."""
    rule, settings, count = CASES[case]
    wide = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype
    columns = widths(rule, count, weight.shape[1])
    space = torch.zeros(len(weight), sum(columns), dtype=wide, device=weight.device)
    states = list(space.split(columns, 1)) if count else []
    row_step = torch.zeros(len(weight), dtype=torch.int32, device=weight.device)
    step = torch.ones((), dtype=torch.int64, device=weight.device)
    for kept in (slice(None), slice(None, None, 2)):
        ops.update_rows_(
            weight, states, row_step, rows[kept], grad[kept], step, rule, settings,
            per_row=per_row, rounding_seed=seed,
        )  # fmt: skip
        step += 1
    if (rule, count) in (("sgd", 1), ("adam", 2)):
        numbers = torch.full((5, 2), 0.01, dtype=torch.float64, device=weight.device)
        ops.catch_up_rows_(weight, states, row_step, None, numbers, 2, rule, settings)
    return weight, row_step, *states


def check_keys(device, mode, keys):
    both(ops.unique, device, keys, mode=mode)
    both(padded, device, keys, mode=mode)
    both(ops.hash_integers, device, keys, mode=mode)
    both(table_of, device, keys, mode=mode)
    both(full_table, device, keys, mode=mode)
    for world_size in (1, 8, 1000):
        both(ops.bucketize, device, keys, world_size, mode=mode)
        owners = torch.arange(65536).remainder(world_size).to(torch.int16)
        both(ops.bucketize, device, keys, world_size, owners, mode=mode)


def check_rows(device, mode, n, dim, dtype):
    generator = torch.Generator().manual_seed(n + dim)
    data = torch.randint(-8, 9, (n, dim), generator=generator).to(dtype)
    rows = torch.randint(-1, 40, (n,), generator=generator)
    table = torch.randint(-8, 9, (40, dim), generator=generator).to(dtype)
    hot = torch.where(torch.arange(n) % 2 == 0, 3, rows)
    both(ops.gather_rows, device, table, rows, mode=mode)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        for ids in (rows, hot, rows.sort().values):
            both(ops.unsorted_segment_sum, device, data, ids, 40, mode=mode, exact=False)
        offsets = torch.tensor([0, n // 3, n // 3, n])
        for combiner in ("sum", "mean", "sqrtn"):
            both(bags, device, table, hot, offsets, combiner, None, mode=mode, exact=False)
        pairs = torch.cat([torch.arange(0, n, 2), torch.tensor([n, n])])
        both(bags, device, table, hot, pairs, "mean", None, mode=mode, exact=False)
        weights = torch.rand(n, generator=generator).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        )
        for combiner in ("sum", "sqrtn"):
            both(
                bags, device, table, rows, offsets, combiner, weights + 0.5, mode=mode, exact=False
            )
    torch.use_deterministic_algorithms(False)
    keys = torch.arange(n) * 12345678901
    for distribution in ("constant", "uniform", "normal"):
        both(initial, device, keys, dim, dtype, distribution, mode=mode, exact=False)
    touched = torch.randperm(40, generator=generator)[: min(n, 40)]
    for case, per_row, seed in itertools.product(CASES, (False, True), (None, 7)):
        # Stochastic rounding can turn a difference in the last bit into a whole bfloat16 step, so
        # those cases are left out.
        rounded = seed is None or dtype == torch.bfloat16
        if rounded and (not per_row or CASES[case][0] in PER_ROW):
            grad = data[: len(touched)]
            arguments = (table, touched, grad, case, per_row, seed)
            both(updated, device, *arguments, mode=mode, exact=False)


def check_groups(device, mode, seed, dtype):
    """Check the ops on many tables with random groups, using the functions of tests/ops."""
    draw = random.Random(seed)

    def group():
        return random_group(seed, dtype, device, most_keys=draw.choice((10, 300)))

    with mode():
        test_group_find.check(group())
        test_group_bucketize.check_all(group(), draw.choice((1, 2, 8)), draw.random() < 0.7, seed)
        group_bags.check_all(group())
        test_group_touch.check_random(group(), seed, draw.random() < 0.5)
        name = draw.choice(list(CASES))
        test_group_update.check(group(), name, draw.choice((1, 3)), count_steps=True)


def check_growing(device, mode, steps):
    """Check a layer that grows: no kernel may touch rows without memory."""
    on_host = rooms.rooms() if device.type == "cpu" else contextlib.nullcontext()
    with mode(), on_host:
        layer = sparsekit.Embedding(
            100, 16, on_full="grow", max_capacity=1 << 20, seed=1, device=device
        )
        optimizer = sparsekit.optim.Adagrad(layer.parameters(), initial_accumulator_value=0.1)
        for i in range(steps):
            keys = torch.arange(150 * i, 150 * i + 200, device=device)
            layer(keys).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert layer.table.keys().tolist() == list(range(150 * steps + 50))


def cases(device, mode):
    for steps in (2, 5, 9):
        yield functools.partial(check_growing, device, mode, steps)
    for n in SIZES:
        for keys in key_inputs(n):
            for dtype in (torch.int64, torch.int32):
                yield functools.partial(check_keys, device, mode, keys.to(dtype))
    for n, dim, dtype in itertools.product((0, 1, 33, 300), DIMS, DTYPES):
        yield functools.partial(check_rows, device, mode, n, dim, dtype)
    for seed, dtype in itertools.product(range(40), DTYPES):
        yield functools.partial(check_groups, device, mode, seed, dtype)


def main(device, seconds):
    simt_mode = device == "simt"
    if simt_mode:
        simt.load()
    mode = simt.SimtMode if simt_mode else contextlib.nullcontext
    todo = list(cases(torch.device("cpu" if simt_mode else device), mode))
    random.Random(0).shuffle(todo)  # so that even a short run covers all kinds of cases
    begin = said = time.monotonic()
    done = 0
    for case in todo:
        if time.monotonic() > begin + seconds:
            break
        case()
        done += 1
        if time.monotonic() > said + 5:  # report progress: the run may be stopped early
            said = time.monotonic()
            print(f"{done} of {len(todo)} cases so far", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    assert done > 10, f"only {done} cases in {seconds} s: that shows nothing"
    print(f"{done} of {len(todo)} cases on {device}, all as on the CPU")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
