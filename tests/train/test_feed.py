"""The number of samples of a batch is found in every form of batch."""

import pytest
import torch

from sparsekit.data import Batch, KeyedJaggedTensor
from sparsekit.train.feed import rows_of


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(3, 2), 3),
        ((torch.zeros(4), "x"), 4),
        ([torch.zeros(0)], 0),
        ({"a": torch.zeros(5), "b": None}, 5),
        (KeyedJaggedTensor(["a", "b"], torch.arange(3), torch.tensor([0, 1, 1, 2, 3])), 2),
        (Batch(None, torch.zeros(6, 0), None), 6),
    ],
)
def test_samples_of_a_batch(batch, rows):
    assert rows_of(batch) == rows
