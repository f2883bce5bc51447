"""Losses gives the mean loss of an epoch, and the first of its steps that diverged."""

import pytest
import torch

from sparsekit.errors import DataFormatError, DivergedError
from sparsekit.train.losses import Losses


def losses(*sums, expected=0, rows=2):
    made = Losses(torch.device("cpu"), None, expected)
    for each in sums:
        made.add(torch.tensor(each, dtype=torch.float64), rows)
    return made


def test_means_are_over_samples():
    made = losses(4.0, 6.0)
    made.add(torch.tensor(0.0, dtype=torch.float64), 1)
    assert made.steps == 3
    assert made.so_far() == made.mean("epoch") == 2.0


def test_no_sample_yet():
    assert losses().so_far() == 0.0
    with pytest.raises(DataFormatError, match=r"^epoch 3/4: the data have no sample"):
        losses().mean("epoch 3/4")
    with pytest.raises(DataFormatError):
        losses(0.0, rows=0).mean("epoch")


def test_sums_keep_the_digits_of_small_losses():
    assert losses(1e9, 1e-6, rows=1).mean("epoch") == (1e9 + 1e-6) / 2


def test_records_are_of_the_steps_since_the_last_one():
    made = losses(4.0, 6.0)
    assert made.since_last("epoch", 1.5) == (2.5, 4, 2, 1.5)
    made.add(torch.tensor(3.0, dtype=torch.float64), 3)
    assert made.since_last("epoch", 4.0) == (1.0, 3, 1, 2.5)
    made.add(torch.tensor(0.0, dtype=torch.float64), 0)
    assert made.since_last("epoch", 5.0) == (0.0, 0, 1, 1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("expected", "of"), [(0, ""), (9, " of 9")])
@pytest.mark.parametrize("what", ["mean", "state", "since_last"])
def test_a_step_that_diverged_is_named(value, expected, of, what):
    made = losses(1.0, 2.0, value, 3.0, expected=expected)
    said = f"^epoch: the loss is infinite or NaN from step 3{of} on: training has diverged$"
    with pytest.raises(DivergedError, match=said):
        getattr(made, what)(*["epoch", 2.0][: 1 + (what == "since_last")])


def test_a_state_goes_on():
    made = losses(4.0, 6.0)
    made.since_last("epoch", 1.5)
    made.add(torch.tensor(2.0, dtype=torch.float64), 1)
    state = made.state("epoch")
    assert state == {"total": 12.0, "samples": 5, "steps": 3, "last": [10.0, 4, 2, 1.5]}
    again = losses(7.0)  # restore replaces this loss
    again.restore(state)
    assert again.state("epoch") == state
    assert again.since_last("epoch", 2.5) == made.since_last("epoch", 2.5) == (2.0, 1, 1, 1.0)
    again.add(torch.tensor(float("nan"), dtype=torch.float64), 1)
    with pytest.raises(DivergedError, match="from step 4 on"):
        again.mean("epoch")
