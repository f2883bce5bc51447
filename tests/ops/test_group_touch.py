"""sparsekit.ops.group_touch_ equals the reference."""

import random
from functools import partial

import pytest
import torch
from conftest import assert_same_bits_for_any_threads, generator
from graphs import HostGraph, host_graphs
from reference import groups as reference_group
from simt_counts import counted

from sparsekit import ops
from sparsekit.ops.group_touch import ScorePolicy

from .groups import Group, Source, random_group
from .test_group_launches import batch_of

MOST = 2**32 - 1
NONE, LRU, LFU = ScorePolicy


def word(count, clock):
    return (count << 32 | clock) - (2**64 if count >= 2**31 else 0)


def bits(count):
    """Return random int64 words."""
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator(count))


def policies_of(*rows):
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2)


def touch(group, found, scores, policies, clocks, occurrences=None, op=ops.group_touch_, **given):
    rows, inverse, counts, bags, _ = found
    op(scores, inverse, rows, counts, bags, group.asked[2], policies, clocks, occurrences, **given)


def check(group, found, scores, policies, clocks, occurrences=None, ticks=()):
    """Touch the rows found and compare all scores and clocks; return the scores."""
    on_cpu = [tensor.cpu() for tensor in found]
    expected = [score.cpu().clone() for score in scores]
    given = None if occurrences is None else occurrences.cpu()
    times = [clock.cpu().clone() for clock in clocks]
    arguments = {"op": reference_group.group_touch_, "ticks": ticks}
    touch(group, on_cpu, expected, policies, times, given, **arguments)
    touch(group, found, scores, policies, clocks, occurrences, ticks=ticks)
    for now, wanted in zip([*scores, *clocks], [*expected, *times], strict=True):
        assert torch.equal(now.cpu(), wanted)
    return scores


def random_scores(draw, capacity):
    """Return words with small and large counts, and clocks around those of random_clock."""
    counts = [
        draw.choice([0, 1, 5, MOST - 1, MOST, draw.randint(0, MOST)]) for _ in range(capacity)
    ]
    times = [draw.choice([0, MOST, draw.randint(0, 2000), draw.randint(0, MOST)]) for _ in counts]
    return torch.tensor([word(*both) for both in zip(counts, times, strict=True)])


def random_clock(draw):
    return draw.choice([0, 1, 999, 2000, MOST, 2**40 + 7, -1, draw.randint(-(2**63), 2**63 - 1)])


def check_random(group, seed, occurrences):
    """Check a touch of random scores under random policies."""
    draw = random.Random(seed)
    rows, policies, scores, clocks = [], [], [], []
    for capacity in group.capacities:
        policies.append([draw.randrange(3), draw.choice([0, 1, 7, 1000, MOST, 2**32, 2**63 - 1])])
        rows.append(draw.choice([0, 5, capacity]))
        scores.append(random_scores(draw, rows[-1]).long().to(group.device))
        clocks.append(torch.tensor([random_clock(draw)], device=group.device))
    found = group.find_or_insert()
    given = None
    if occurrences:
        few = [draw.choice([1, 2, 0, -1, 40, MOST, 2**62]) for _ in range(len(found[0]))]
        given = torch.tensor(few, dtype=torch.int64, device=group.device)
    # No clock passes 2^63.
    ticks = [draw.choice([0, 1, 1, 1000]) if int(clock) < 2**62 else 0 for clock in clocks]
    check(group, found, scores, policies_of(*policies), clocks, given, ticks)


def test_clocks_advance_without_keys(device):
    group = one_table([], device)
    clocks, scores = [torch.tensor([5], device=device)], [torch.zeros(50).long().to(device)]
    for policy in (LRU, LFU):
        check(group, group.find_or_insert(), scores, policies_of([policy, 0]), clocks, ticks=[2])
    assert clocks[0].tolist() == [9]
    with pytest.raises(ValueError, match=r"^group_touch_: .*ticks\[0\] must be at least 0, got -1"):
        check(group, group.find_or_insert(), scores, policies_of([LRU, 0]), clocks, ticks=[-1])
    found = group.find_or_insert()
    with pytest.raises(ValueError, match=r"^group_touch_: .*ticks must have 1 element"):
        touch(group, found, scores, policies_of([LRU, 0]), clocks, ticks=[1, 1])


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("occurrences", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_random_groups(device, seed, occurrences):
    group = random_group(seed, torch.float32, device, 100)
    check_random(group, seed, occurrences)


def one_table(keys, device, capacity=50, hashed=True):
    group = Group(torch.float32, [4], [capacity], [hashed], [1], device)
    group.sources.append(Source(torch.tensor(keys).long(), torch.empty(0).long(), torch.empty(0)))
    group.ask(0, 0, 0, len(keys), "sum")
    return group


def step(scores, keys, clock, policy, halve_every=0, occurrences=None):
    """Touch the rows `keys` of a table without a hash table; return their scores."""
    group = one_table(keys, scores.device, len(scores), hashed=False)
    given = None if occurrences is None else torch.tensor(occurrences, device=scores.device)
    times = [torch.tensor([clock], device=scores.device)]
    policies = policies_of([policy, halve_every])
    check(group, group.find_or_insert(), [scores], policies, times, given)
    return [(int(s) % 2**64 >> 32, int(s) % 2**32) for s in scores[keys]]


def test_lru_writes_the_clock(device):
    scores = torch.zeros(8, dtype=torch.int64, device=device)
    step(scores, [3, 5, 3], 7, LRU)
    step(scores, [5], 2**50, LRU)
    assert scores.tolist() == [0, 0, 0, 7, 0, 2**50, 0, 0]


def test_lfu_counts_and_halves(device):
    scores = torch.zeros(8, dtype=torch.int64, device=device)
    assert step(scores, [3, 5, 3], 7, LFU, 10) == [(2, 7), (1, 7), (2, 7)]
    assert step(scores, [3], 9, LFU, 10) == [(3, 9)]  # no multiple of 10 since
    assert step(scores, [3], 10, LFU, 10) == [(2, 10)]
    assert step(scores, [3] * 9, 20, LFU, 10)[0] == (10, 20)
    assert step(scores, [3], 59, LFU, 10) == [(2, 59)]  # halved at 30, 40 and 50
    assert step(scores, [3], 58, LFU, 1) == [(3, 58)]  # the clock went back
    assert step(scores, [3], 2**32 + 60, LFU, 0) == [(4, 60)]
    assert step(scores, [5], 319, LFU, 10) == [(1, 319)]  # halved 31 times
    assert int(scores.ne(0).sum()) == 2


@pytest.mark.parametrize("halvings", [31, 32, 33, 64, 10**6])
def test_many_halvings_leave_nothing(device, halvings):
    scores = torch.full((2,), word(MOST, 0), device=device)
    assert step(scores, [0], halvings, LFU, 1) == [(1 + (MOST >> min(halvings, 32)), halvings)]


def test_counts_stop_at_the_largest(device):
    scores = torch.tensor([word(MOST - 2, 4), word(MOST, 4), 0], device=device)
    assert step(scores, [0, 0, 1], 5, LFU) == [(MOST, 5), (MOST, 5), (MOST, 5)]
    assert step(scores, [2, 2], 5, LFU, 0, [MOST, 1]) == [(MOST, 5), (MOST, 5)]


def test_occurrences(device):
    scores = torch.zeros(4, dtype=torch.int64, device=device)
    assert step(scores, [2, 1, 2, 0], 5, LFU, 0, [3, 0, 4, -5])[:2] == [(7, 5), (0, 5)]
    assert scores[0] == 5
    assert step(scores, [2, 1], 9, LRU, 0, [0, 1]) == [(0, 9), (0, 9)]


def test_a_table_without_policy_or_scores_is_left_alone(device):
    group = random_group(3, torch.float32, device)
    found = group.find_or_insert()
    kinds = [(NONE, 0), (LRU, 0), (LFU, 3)]
    policies = policies_of(*[kinds[t % 3] for t in range(len(group.dims))])
    clocks = [torch.tensor([9], device=device) for _ in group.dims]
    empty = [torch.empty(0, dtype=torch.int64, device=device) for _ in group.dims]
    check(group, found, empty, policies, clocks)
    full = [bits(capacity).to(device) for capacity in group.capacities]
    before = [score.clone() for score in full]
    check(group, found, full, policies * 0, clocks)
    assert all(map(torch.equal, full, before))


def test_no_tables_and_no_keys(device):
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    bags, features = torch.zeros(1, dtype=torch.int32, device=device), torch.empty(0, 9).long()
    given = nothing, nothing, nothing.long(), bags, features
    ops.group_touch_([], *given, policies_of(), [])
    scores = bits(5).to(device)
    group = one_table([], device)
    check(group, group.find_or_insert(), [scores.clone()], policies_of([LFU, 2]), [bags.long()])


@pytest.mark.parametrize("policy", [LRU, LFU])
def test_rows_and_indices_out_of_range_touch_nothing_else(device, policy):
    group = one_table([7, 8, 9, 7, 8, 9, 7], device)
    rows, inverse, counts, bags, starts = group.find_or_insert()
    rows[:3] = torch.tensor([-1, 20, 2**31 - 1])
    inverse[2:6] = torch.tensor([-1, 3, 2**31 - 1, -(2**31)])
    # The table's scores are in the middle of a larger tensor, which must not change.
    whole = torch.arange(60, device=device)
    for first in (-1, 20, 2**31 - 1, 4):
        rows[0] = first
        found = rows, inverse, counts, bags, starts
        clock = torch.tensor([99], device=device)
        check(group, found, [whole[20:40]], policies_of([policy, 0]), [clock])
    expected = torch.arange(60)
    expected[24] = 99 if policy == LRU else 24 + (2 << 32) - 24 + 99
    assert whole.tolist() == expected.tolist()


def test_a_large_table_among_small_ones(device, backend):
    n = 3_000 if backend == "simt" else 70_000
    group = Group(torch.float32, [1] * 4, [2 * n] * 4, [True] * 4, [1] * 4, device)
    for t, size in enumerate([300, n, 0, 200]):
        # Threads often add to the count of the same key.
        keys = torch.randint(0, n // 2, (size,), generator=generator(t))
        keys[::2] = 7
        group.sources.append(Source(keys, torch.empty(0).long(), torch.empty(0)))
        group.ask(t, t, 0, size, "sum")
    found = group.find_or_insert()
    policies = policies_of([LRU, 0], [LFU, 5], [LFU, 5], [LFU, 0])
    start = [torch.zeros(2 * n, dtype=torch.int64, device=device) for _ in range(4)]

    def compute():
        scores = [score.clone() for score in start]
        for clock in range(3, 13):
            clocks = [torch.tensor([clock], device=device) for _ in range(4)]
            touch(group, found, scores, policies, clocks)
        return scores

    assert_same_bits_for_any_threads(compute)
    check(group, found, start, policies, [torch.tensor([3], device=device) for _ in range(4)])


def test_a_graph_follows_the_clock():
    group, clock = one_table([7, 8, 7], "cpu"), torch.tensor([5])
    scores = torch.zeros(50, dtype=torch.int64)
    with host_graphs():
        found = group.find_or_insert()
        for policy, expected in ((LRU, [9, 9]), (LFU, [word(2, 11), word(1, 11)])):
            graph, policies = HostGraph(torch.device("cpu")), policies_of([policy, 3])
            run = partial(touch, group, found, [scores], policies, [clock])
            graph.warm_up(run)
            graph.capture(run)
            scores.zero_()
            clock.fill_(9 if policy == LRU else 11)
            graph.replay()
            assert scores[:3].tolist() == [*expected, 0]


def launches(policies, group, found):
    """Return the counts of the second call for tables under the given policies in turn."""
    tables = len(group.weights)
    scores = [torch.zeros(1000, dtype=torch.int64) for _ in range(tables)]
    given = policies_of(*[(policies[t % len(policies)], 7) for t in range(tables)])
    clocks = [torch.tensor([3]) for _ in range(tables)]
    for _ in range(2):
        with counted() as counts:
            touch(group, found, scores, given, clocks)
    return counts.sum("group_touch_")


@pytest.mark.parametrize("tables", [1, 26, 500])
def test_launches_and_waits(tables):
    group = batch_of(tables, 4, 3, (16,))
    found = group.find_or_insert()
    for policies, expected in (([NONE], 0), ([LRU, NONE], 1), ([LFU], 2), ([LFU, LRU, NONE], 2)):
        counts = launches(policies, group, found)
        assert counts.launches == counts.kernels == expected
        assert counts.waits == counts.torch == counts.copies_in == 0


def test_equal_keys_of_a_warp_cost_one_atomic():
    group = one_table([5] * 640, "cpu")
    with counted() as counts:
        found = group.find_or_insert()
        touch(group, found, [bits(50)], policies_of([LFU, 0]), [torch.tensor([3])])
    assert counts.sum("group_touch_").atomics <= 640 // 32


def valid():
    group = one_table([1, 2, 2], "cpu")
    rows, inverse, counts, bags, _ = group.find_or_insert()
    return {
        "scores": [torch.zeros(50, dtype=torch.int64)],
        "index": inverse,
        "rows": rows,
        "counts": counts,
        "bags": bags,
        "features": group.asked[2],
        "policies": policies_of([LFU, 5]),
        "clocks": [torch.tensor([3])],
        "occurrences": torch.ones(3, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("scores", lambda s: [*s, *s], "policies must have size 2 in dimension 0, got 1"),
        ("scores", lambda s: [s[0].view(5, 10)], r"scores\[0\] must have 1 dimension"),
        ("scores", lambda s: [s[0][::2]], r"scores\[0\] must be contiguous"),
        ("policies", lambda p: p[:, :1], "policies must have size 2 in dimension 1"),
        ("policies", lambda p: p + 1, r"policies\[0\] must begin with 0 \(none\).* got 3"),
        ("policies", lambda p: p - 3, r"policies\[0\] must begin with .* got -1"),
        ("policies", lambda p: p - policies_of([0, 6]), r"halve_every >= 0, got -1"),
        ("clocks", lambda c: [*c, *c], r"clocks must have 1 element\(s\), got 2"),
        (
            "clocks",
            lambda c: [torch.zeros(2, dtype=torch.int64)],
            r"clocks\[0\] must have one element, got 2",
        ),
        ("occurrences", lambda o: o[1:], "occurrences must have size 3 in dimension 0, got 2"),
        ("index", lambda i: i[1:], "rows must have size 2"),
        ("counts", lambda c: c + 2, r"counts\[0\] is 4, but must be in \[0, 3\]"),
        ("counts", lambda c: c.expand(2), "counts must have size 1"),
        ("bags", lambda b: b + 1, "bags must begin with 0"),
        ("features", lambda f: f + 1, r"table of features\[0\] is 1"),
    ],
)
def test_what_is_refused(name, change, message):
    arguments = valid()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=f"^group_touch_: .*{message}"):
        ops.group_touch_(**arguments)


@pytest.mark.parametrize("name", list(valid()))
def test_what_is_of_a_wrong_type(name):
    arguments = valid()
    value = arguments[name]
    wrong = [value[0].double()] if isinstance(value, list) else value.double()
    arguments[name] = wrong
    with pytest.raises(TypeError, match=rf"^group_touch_: {name}(\[0\])? must be int"):
        ops.group_touch_(**arguments)
