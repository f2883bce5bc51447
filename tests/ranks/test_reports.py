"""Errors from other ranks keep their types, and long messages are shortened."""

import pytest

from sparsekit import TableFullError
from sparsekit.distributed import RemoteError
from sparsekit.distributed.reports import brief, of_rank, where_they_differ

KEPT = [ValueError, TypeError, IndexError, RuntimeError, NotImplementedError]


@pytest.mark.parametrize("kind", KEPT)
def test_an_error_of_another_rank_has_its_type(kind):
    found = of_rank(3, kind("what is wrong"))
    assert type(found) is kind
    assert str(found) == "on rank 3: what is wrong"


def test_errors_of_another_rank_that_are_told_otherwise():
    full = TableFullError("users", 1, 4, 4, 2)
    assert of_rank(0, full) is full
    found = of_rank(2, KeyError("k"))
    assert type(found) is RemoteError
    assert str(found) == "on rank 2: KeyError: 'k'"


def test_a_long_plan_is_cut_in_the_middle():
    assert brief("a" * 800) == "a" * 800
    assert brief("a" * 500 + "b" * 500) == "a" * 400 + " ... " + "b" * 400


@pytest.mark.parametrize("at", [0, 100, 5000, 9999])
def test_plans_are_shown_where_they_differ(at):
    plan = "".join(f"{i:05}" for i in range(2000))
    other = f"{plan[:at]}x{plan[at + 1 :]}"
    shown = where_they_differ([plan, other])
    for text, whole in zip(shown, (plan, other), strict=True):
        assert len(text) < 1000
        assert text.startswith(whole[:200])
        # The text around the difference is shown as well, since it names the table.
        assert whole[max(200, at - 150) : at + 350] in text
    assert where_they_differ(["ab", "abc"]) == ["ab", "abc"]
    # One plan is the beginning of the other.
    assert where_they_differ([plan, plan + "more"])[1].endswith("more ...")
