"""A profile adds up ranks and ops."""

import re
from collections import Counter

import pytest

from sparsekit.train.profile import Op, Profile, _ops


def rows(table):
    """Return the cells of each line but the first."""
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines()[1:]]


def test_a_table_adds_up_what_it_does_not_show():
    """The last line sums all ops; ops that move bytes have lines of their own."""
    name = "a" * 50
    ops = [Op(name, 2, 0.5, 0.5, 0), Op("b", 1500, 0.3, 0.3, 0), Op("c", 3, 0.1, 0.1, 0)]
    ops += [Op("sent", 4, 0.06, 0.06, 1000), Op("sent too", 5, 0.04, 0.04, 24)]
    profile = Profile(ops, ranks=2)
    assert profile.bytes_moved == 1024
    assert profile.seconds == pytest.approx(1.0)
    first = [f"{name[:41]}…", "2", "500.0 ms", "50.0%", "0"]
    sent = [["sent", "4", "60.0 ms", "6.0%", "1,000"], ["sent too", "5", "40.0 ms", "4.0%", "24"]]
    everything = ["all", "1,514", "1,000.0 ms", "100.0%", "1,024"]
    others = ["2 others", "1,503", "400.0 ms", "40.0%", "0"]
    assert rows(profile.table(1)) == [first, *sent, others, everything]
    b, c = ["b", "1,500", "300.0 ms", "30.0%", "0"], ["c", "3", "100.0 ms", "10.0%", "0"]
    assert rows(profile.table()) == [first, b, c, *sent, everything]
    assert str(profile) == profile.table()


@pytest.mark.parametrize("gpu", [False, True])
def test_ops_of_ranks_are_added_up(gpu):
    """GPU time counts if a GPU has worked; the longest op comes first."""
    device = (2e6, 6e6) if gpu else (0.0, 0.0)
    here = [("x", 2, 3e6, device[0]), ("y", 1, 1e6, 0.0)]
    there = [("x", 3, 4e6, device[1]), ("z", 7, 8e6, 0.0)]
    found = _ops([(here, Counter(sent=5)), (there, Counter(sent=6, x=1))])
    if gpu:
        expected = [Op("x", 5, 8.0, 1.0, 1), Op("sent", 0, 0.0, 0.0, 11)]
        expected += [Op("y", 1, 0.0, 0.0, 0), Op("z", 7, 0.0, 0.0, 0)]
    else:
        expected = [Op("z", 7, 8.0, 0.5, 0), Op("x", 5, 7.0, 7 / 16, 1)]
        expected += [Op("y", 1, 1.0, 1 / 16, 0), Op("sent", 0, 0.0, 0.0, 11)]
    assert found == expected
