"""Descriptors that do not change from step to step are sent to the device once."""

from itertools import count

import pytest
import torch
from graphs import HostGraph, host_graphs
from simt_counts import counted

from .group_bags import pool
from .test_group_launches import batch_of
from .test_group_update import tables_of, update

TABLES = 280  # 26 tables have so few descriptors that none are kept
# Number of rows of a test's tables. It is part of their descriptors, so that a test never finds the
# copies of an earlier one, whose memory its own tables may reuse.
ROWS = count(20)


def group_of(bags, rows):
    return batch_of(TABLES, bags, 2, (3, 8, 4), keys=rows)


class Steps:
    """A group with many tables of `rows` rows, and the optimizer states for its steps."""

    def __init__(self, rows):
        self.rows, self.group = rows, group_of(2, rows)
        self.tables = tables_of(self.group, "lazy adam")

    def ask(self, bags):
        """Make the next steps look up other keys, in `bags` bags of each table."""
        other = group_of(bags, self.rows)
        self.group.sources, self.group.features = other.sources, other.features
        self.group.places = other.places

    def move(self, t):
        """Move what belongs to a table to other memory."""
        table = self.group.hash_tables[t]
        table.buckets, table.size = table.buckets.clone(), table.size.clone()
        for tensors in (self.group.weights, self.tables.weights, self.tables.steps):
            tensors[t] = tensors[t].clone()

    def run(self):
        """Make a step, and return its outputs."""
        outs = self.group.outs()
        found = self.group.find_or_insert()
        pool(self.group, outs, found)
        update(self.group, outs, found, self.tables)
        return outs

    def descriptors(self):
        """Run a step on the host runner, and return the number of launches for descriptors."""
        with counted() as counts:
            self.run()
        return counts.sum(name="group: descriptors").launches

    def assert_equal(self, other):
        """Compare all tables."""
        for ours, theirs in (
            (self.group.weights, other.group.weights),
            (self.tables.changed, other.tables.changed),
        ):
            for one, two in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, two)
        for one, two in zip(self.group.hash_tables, other.group.hash_tables, strict=True):
            assert one.size.item() == two.size.item()


def twins():
    """Return two equal groups; a test runs the second one on the CPU."""
    rows = next(ROWS)
    return Steps(rows), Steps(rows)


def forms():
    """Yield lookups that together need more copies than are kept."""
    group = group_of(1, next(ROWS))
    for asked in range(34):
        for t, feature in enumerate(group.features):
            feature[3] = int(t < asked)
        yield group.find


def test_only_what_changes_is_sent():
    steps = Steps(next(ROWS))
    first = steps.descriptors()
    steady = steps.descriptors()
    assert steady == 1  # of pooling: features, whose outputs change
    assert first >= steady + 3
    steps.ask(3)
    assert steps.descriptors() > steady
    steps.ask(2)
    assert steps.descriptors() == steady  # earlier copies are still there


@pytest.mark.parametrize("moved", [0, 1, TABLES - 1])
def test_tables_that_move(moved):
    ours, plain = twins()
    for step in range(3):
        if step == 2:
            ours.move(moved)
        ours.descriptors()
        plain.run()
    ours.assert_equal(plain)


def test_batches_of_several_sizes():
    ours, plain = twins()
    for bags in (2, 3, 1, 2, 1):
        for steps in (ours, plain):
            steps.ask(bags)
        ours.descriptors()
        plain.run()
    ours.assert_equal(plain)


def test_copies_that_have_been_dropped():
    ours, plain = twins()
    for _ in range(2):
        assert ours.descriptors() > 1
        plain.run()
        with counted():
            for find in forms():
                find()
    ours.assert_equal(plain)


@pytest.mark.parametrize("warm", [True, False])
def test_a_graph(warm):
    """A graph keeps the copies that it uses, and makes those that no earlier step has made."""
    ours, plain = twins()
    graph = HostGraph(torch.device("cpu"))
    with host_graphs():
        if warm:
            graph.warm_up(ours.run)
        graph.capture(ours.run)
        ours.run()
        for find in forms():
            find()
        for _ in range(2):
            graph.replay()
    for _ in range(4 if warm else 3):
        plain.run()
    ours.assert_equal(plain)


def test_copies_of_graphs_leave_room_for_others():
    steps = Steps(next(ROWS))
    with host_graphs():
        for find in forms():
            graph = HostGraph(torch.device("cpu"))
            graph.warm_up(find)
            graph.capture(find)
    assert steps.descriptors() > 1
    assert steps.descriptors() == 1


def test_a_step_after_one_that_was_only_planned():
    ours, plain = twins()
    with counted(plan=True):
        ours.group.find_or_insert()
    ours.descriptors()
    plain.run()
    ours.assert_equal(plain)
