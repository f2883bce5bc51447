"""Bucket edges are quantiles of the numbers, and numbers fall into the right bucket."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparsekit.models import QuantileBuckets


def test_where_numbers_fall():
    buckets = QuantileBuckets({"a": [-1, 0, 2.5]})
    values = ["-1.5", -1, "-0.5", "0", 2.4, 2.5, "1e9", math.inf, -math.inf, math.nan]
    values += [None, "", "?"]
    found = buckets({"a": values, "b": ["other"]})
    assert found["a"].dtype == torch.int64
    assert found["a"].tolist() == [0, 1, 1, 2, 2, 3, 3, 3, 0, -1, -1, -1, -1]
    assert list(found) == ["a"]


def test_all_forms_of_a_column_fall_alike():
    buckets = QuantileBuckets({"a": [2, 4]})
    for column in (
        [1, 2, 5],
        ["1", "2", "5"],
        np.array([1, 2, 5], np.int8),
        np.array(["1", "2", "5"]),
        np.array(["1", "2", "5"], object),
        np.array([1, 2, 5], np.float32),
        torch.tensor([1, 2, 5]),
        pa.array(["1", "2", "5"]),
        pa.chunked_array([[1.0], [2.0, 5.0]]),
    ):
        assert buckets({"a": column})["a"].tolist() == [0, 1, 2]
    for column in (pa.array([1, None, 5]), pa.chunked_array([["1", None], ["5"]])):
        assert buckets({"a": column})["a"].tolist() == [0, -1, 2]


def test_few_distinct_numbers_have_a_bucket_each():
    column = [7, 3, 3, None, "11", math.nan, math.inf]
    buckets = QuantileBuckets.fit({"a": column}, ["a"], 3)
    assert buckets.edges["a"].tolist() == [7, 11]
    assert QuantileBuckets.fit({"a": [5, 5]}, ["a"]).edges["a"].tolist() == []
    assert QuantileBuckets.fit({"a": [None, "?"]}, ["a"]).edges["a"].tolist() == []


def test_many_distinct_numbers_are_cut_into_equal_parts():
    numbers = np.random.default_rng(0).permutation(1000)
    buckets = QuantileBuckets.fit({"a": numbers, "b": numbers * 0.5}, ["a", "b"], 10)
    assert buckets({"a": numbers, "b": numbers})["a"].bincount().tolist() == [100] * 10
    assert buckets.edges["b"].tolist() == (buckets.edges["a"] / 2).tolist()


def test_a_frequent_number_is_alone_and_takes_no_part_of_the_others():
    rare = np.arange(1, 101) * 10
    column = np.concatenate([np.zeros(900, int), rare, np.full(500, 333)])
    buckets = QuantileBuckets.fit({"a": column}, ["a"], 10)
    found = buckets({"a": column})["a"]
    for frequent in (0, 333):
        assert len(set(found[column == frequent].tolist())) == 1
        assert (found == found[column == frequent][0]).sum() == (column == frequent).sum()
    of_rare = found[900:1000].bincount()
    assert of_rare[of_rare > 0].max() == 10
    assert len(buckets.edges["a"]) <= 30
    # A number that occurs at least 4 times is frequent.
    column = np.concatenate([np.arange(12), np.full(4, 5.5)])
    found = QuantileBuckets.fit({"a": column}, ["a"], 4)({"a": column})["a"].tolist()
    assert found.count(found[-1]) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantileBuckets({"a": [1, 1]}), r"edges\['a'\] must be finite and rise"),
        (lambda: QuantileBuckets({"a": [1, math.inf]}), r"edges\['a'\] must be finite and rise"),
        (lambda: QuantileBuckets.fit({"a": [1]}, ["a"], 0), "count must be >= 1, got 0"),
        (lambda: QuantileBuckets.fit({"a": [1, "x"]}, ["a"]), r"a\[1\] is no number: 'x'"),
        (lambda: QuantileBuckets({"a": [1]})({"a": [b"\xff"]}), r"a\[0\] is no number"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=f"QuantileBuckets: {message}"):
        make()
