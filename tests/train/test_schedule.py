"""Learning rate schedules for large batches follow their closed form."""

import pytest
import torch

from sparsekit.train import linear_warmup


def rates(steps, *settings):
    """Return the learning rate of each step, for an optimizer with the rate 0.5."""
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.5)
    scheduler = linear_warmup(sgd, *settings)
    found = []
    for _ in range(steps):
        found.append(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((4, 3), [0.5, 1.0, 1.5, 2.0, 2.0]),
        ((4, 0), [2.0, 2.0]),
        ((4, 2, 5), [0.5, 1.25, 2.0, 4 / 3, 2 / 3, 0.0, 0.0]),
        ((4, 0, 2), [2.0, 1.0, 0.0, 0.0]),
        ((0.5, 2), [0.5, 0.375, 0.25]),
        ((2, 1, 2), [0.5, 1.0, 0.0]),
    ],
)
def test_rates_rise_and_fall_linearly(settings, expected):
    assert rates(len(expected), *settings) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0, 3), "scale must be a number > 0, got 0"),
        ((-1.0, 3), "scale must be a number > 0, got -1.0"),
        ((float("inf"), 3), "scale must be a number > 0, got inf"),
        ((float("nan"), 3), "scale must be a number > 0, got nan"),
        ((2, -1), r"warmup_steps must be in \[0, .*, got -1"),
        ((2, 3, 3), r"total_steps must be in \[4, .*, got 3"),
    ],
)
def test_numbers_out_of_range(settings, message):
    with pytest.raises(ValueError, match=f"^linear_warmup: {message}"):
        rates(1, *settings)
