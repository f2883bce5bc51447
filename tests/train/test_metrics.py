"""AUC and log loss equal plain loops, and ranking metrics refuse bad input.

tests/systems/test_s1_autoencoder.py compares ranking metrics with loops.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.train.metrics import (
    auc,
    gather,
    log_loss,
    ndcg_at_k,
    precision_at_k,
    recall_at_k,
)


def pairs(scores, labels):
    """Return the share of (positive, negative) pairs in the right order; ties count half."""
    won = [
        (s > t) + 0.5 * (s == t)
        for s, positive in zip(scores, labels, strict=True)
        for t, other in zip(scores, labels, strict=True)
        if positive and not other
    ]
    return sum(won) / len(won)


@given(
    samples=st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int64]),
)
def test_auc_equals_a_double_loop(samples, dtype):
    samples += [(0, True), (1, False)]
    scores, labels = zip(*samples, strict=True)
    found = auc(torch.tensor(scores).to(dtype), torch.tensor(labels).float())
    assert found == pytest.approx(pairs(scores, labels), rel=0, abs=1e-12)


def test_auc_of_extremes():
    scores, labels = torch.tensor([-math.inf, 0.1, 0.2, math.inf]), torch.tensor([0, 0, 1, 1])
    assert auc(scores, labels) == 1
    assert auc(-scores, labels) == 0
    assert auc(torch.zeros(4), labels) == 0.5


def test_auc_of_millions_has_all_digits():
    """The AUC is exact for millions of samples, whose sums of ranks exceed float32."""
    n = 3_000_000
    labels = torch.arange(n) % 2
    assert auc(torch.arange(n), labels) == pytest.approx(0.5 + 1 / n, rel=0, abs=1e-12)


def test_log_loss_equals_a_plain_one():
    p, labels = [0.0, 0.25, 0.5, 1.0, 1.0], [0, 1, 0, 1, 0]
    cut = [min(max(x, 1e-7), 1 - 1e-7) for x in p]
    expected = [-math.log(x if y else 1 - x) for x, y in zip(cut, labels, strict=True)]
    assert log_loss(torch.tensor(p), torch.tensor(labels)) == pytest.approx(sum(expected) / 5)


@pytest.mark.parametrize("metric", [auc, log_loss])
@pytest.mark.parametrize(
    ("values", "labels", "message"),
    [
        ([0.5, 0.5], [1, 0, 1], r"shapes \(2,\) and \(3,\)"),
        ([[0.5]], [[1]], r"shapes \(1, 1\)"),
        ([0.5, math.nan], [1, 0], "^1 of 2 values are NaN"),
        ([0.5, 0.5], [1, 2], "labels must be 0 or 1"),
    ],
)
def test_what_is_refused(metric, values, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(torch.tensor(values), torch.tensor(labels))


def test_what_has_no_answer_is_refused():
    for labels in ([1, 1], []):
        with pytest.raises(ValueError, match="samples of both labels"):
            auc(torch.ones(len(labels)), torch.tensor(labels))
    for p in ([], [1.5], [-0.1]):
        with pytest.raises(ValueError, match="at least one sample, and probabilities"):
            log_loss(torch.tensor(p), torch.ones(len(p)))


def test_metrics_of_ranking_by_hand():
    """Only the first two items count: user 2 has no relevant item, and user 3 no hit."""
    hits = torch.tensor(
        [[False, True, True], [False] * 3, [False, False, True], [True, True, False]]
    )
    relevant = torch.tensor([4, 0, 1, 2])
    assert precision_at_k(hits, relevant, 2) == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert recall_at_k(hits, relevant, 2) == pytest.approx((1 / 4 + 0 + 1) / 3)
    second, best = 1 / math.log2(3), 1 + 1 / math.log2(3)
    assert ndcg_at_k(hits, relevant, 2) == pytest.approx((second / best + 0 + 1) / 3)
    assert ndcg_at_k(hits, relevant, 3) == pytest.approx(
        ((second + 1 / 2) / (best + 1 / 2) + 1 / 2 + 1) / 3
    )


def test_metrics_are_python_numbers_of_64_bits_whatever_the_default_device():
    hits, relevant = torch.tensor([[True, False, False]]), torch.tensor([3])
    scores, labels = torch.tensor([0.2, 0.4, 0.6]), torch.tensor([1, 0, 1])
    with torch.device("meta"):
        assert precision_at_k(hits, relevant, 3) == recall_at_k(hits, relevant, 3) == 1 / 3
        found = [ndcg_at_k(hits, relevant, 3), auc(scores, labels), log_loss(scores, labels)]
    assert [type(each) for each in found] == [float] * 3
    assert found[:2] == [1 / (1 + 1 / math.log2(3) + 1 / 2), 0.5]


def test_gather_on_one_process():
    tensor = torch.arange(3)
    assert gather(tensor) is tensor


@pytest.mark.parametrize("metric", [precision_at_k, recall_at_k, ndcg_at_k])
@pytest.mark.parametrize(
    ("hits", "relevant", "k", "message"),
    [
        ([[True]], [1, 1], 1, r"got torch.bool \(1, 1\) and \(2,\)"),
        ([[1]], [1], 1, r"got torch.int64 \(1, 1\) and \(1,\)"),
        ([True], [1], 1, r"got torch.bool \(1,\)"),
        ([[True, False]], [1], 0, r"k must be in \[1, 2\].* got 0"),
        ([[True, False]], [1], 3, r"k must be in \[1, 2\].* got 3"),
        ([[True, True]], [1], 2, "more hits than relevant"),
        ([[False], [False]], [0, 0], 1, "none of 2 users"),
    ],
)
def test_what_metrics_of_ranking_refuse(metric, hits, relevant, k, message):
    with pytest.raises(ValueError, match=message):
        metric(torch.tensor(hits), torch.tensor(relevant), k)
