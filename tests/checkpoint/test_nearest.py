"""Equal and nearly equal vectors are found among those that are drawn."""

import pytest
import torch

from sparsekit.checkpoint.nearest import MOST_COMPARED, Drawn


def test_equal_vectors_of_a_large_table_are_drawn_together(tmp_path):
    """A table of 100,000 rows has 20,000 pairs; both rows of a pair are drawn, or none."""
    torch.manual_seed(0)
    pairs = torch.randn(20_000, 8)
    vectors = torch.cat([pairs, torch.randn(60_000, 8), pairs])
    drawn = Drawn(8, torch.float32)
    for begin in range(0, 100_000, 3000):
        part = vectors[begin : begin + 3000]
        drawn.add(torch.arange(begin, begin + len(part)), part)
    found = drawn.alike()
    assert (found.compared, found.of) == (MOST_COMPARED, 100_000)
    # The true fraction is 0.4; the last vector may have lost its twin.
    assert found.equal / found.compared == pytest.approx(0.4, abs=0.03)
    assert all(b - a == 80_000 or a - b == 80_000 for a, b, _ in found.pairs)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1, 1e160, 1e300])
def test_directions_of_tiny_and_huge_vectors(scale):
    vectors = torch.tensor([[1.0, 2, 2], [2, 4, 4], [-2, -1, 0.0]], dtype=torch.float64)
    drawn = Drawn(3, torch.float64)
    drawn.add(torch.tensor([7, 8, 9]), vectors * scale)
    found = drawn.alike()
    assert (found.equal, found.near) == (0, 2)
    assert sorted(found.pairs[0][:2]) == [7, 8]
    assert found.pairs[0][2] == pytest.approx(1)
    assert len(found.pairs) == 3


def test_vectors_of_one_element_are_compared_for_equality_alone():
    drawn = Drawn(1, torch.float32)
    drawn.add(torch.arange(4), torch.tensor([[1.0], [2.0], [2.0], [3.0]]))
    found = drawn.alike()
    assert (found.equal, found.near, found.pairs) == (2, 0, [])
