"""Quantiles and bins of counted numbers are those of the numbers themselves."""

import math

import pytest
import torch

from sparsekit.checkpoint.histogram import Histogram


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("scale", [1, 1000, 10**9])
def test_quantiles_and_bins(whole, scale):
    numbers = (torch.rand(10_000, generator=torch.Generator().manual_seed(0)) ** 8 * scale).double()
    numbers = numbers.long() if whole else numbers
    histogram = Histogram(whole)
    for part in numbers.split(999):
        histogram.add(part)
    spread = histogram.spread()
    ordered = numbers.sort().values
    for at, value in spread.quantiles.items():
        true = ordered[math.floor(at * 9999)].item()
        assert true * (1 - 2**-11) <= value <= true, at
        if whole and true <= 8192:
            assert value == true
    assert spread.quantiles[0] == ordered[0]
    assert spread.quantiles[1] == ordered[-1]
    assert sum(spread.counts) == 10_000
    assert len(spread.edges) == len(spread.counts) + 1 <= 130
    assert all(a < b for a, b in zip(spread.edges, spread.edges[1:], strict=False))
    assert spread.edges[0] <= ordered[0]
    assert ordered[-1] <= spread.edges[-1]


@pytest.mark.parametrize("numbers", [[0.0], [5.0, 5.0], [1e300], [2.0**62]])
@pytest.mark.parametrize("whole", [True, False])
def test_bins_of_a_single_number(numbers, whole):
    histogram = Histogram(whole)
    histogram.add(torch.tensor(numbers, dtype=torch.float64))
    spread = histogram.spread()
    assert sum(spread.counts) == len(numbers)
    assert len(spread.edges) == len(spread.counts) + 1
