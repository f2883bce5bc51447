"""Settings of optimizers are checked against their type annotations."""

from typing import Annotated

import numpy as np
import pytest
import torch

from sparsekit.optim import SGD, RMSProp, settings
from sparsekit.optim.settings import allowed_values, given, one_of


def allowed(kind):
    return kind.__metadata__[0]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("NotNegative", [0, 0.0, 5, np.float32(1), torch.tensor(0.5), float("inf")]),
        ("LearningRate", [0, 0.5, torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64)]),
        ("NotPositive", [0, -0.5, -3]),
        ("Fraction", [0, 0.5, 1 - 1e-9]),
        ("Betas", [(0, 0.999), [0.5, 0.5], (np.float64(0.1), 0)]),
        ("BiasCorrection", ["global", "per_row"]),
        ("EpsConvention", ["torch", "tensorflow"]),
    ],
)
def test_values_that_are_allowed(kind, values):
    for value in values:
        allowed(getattr(settings, kind)).check("Adam", "x", value)


@pytest.mark.parametrize(
    ("kind", "words", "values"),
    [
        ("NotNegative", ">= 0", [-1e-9, float("nan"), torch.tensor(-1.0)]),
        ("NotPositive", "<= 0", [1e-9, float("nan")]),
        ("Fraction", "in [0, 1)", [-1e-9, 1, 2, float("nan")]),
        (
            "Betas", "two numbers in [0, 1)",
            [(0.5, 1), (1, 0.5), (-0.1, 0.5), (0.5,), (0.5, 0.5, 0.5), 0.5, ("a", "b"), None],
        ),
        ("BiasCorrection", "'global' or 'per_row'", ["row", None, 1]),
        ("EpsConvention", "'torch' or 'tensorflow'", ["tf", ""]),
    ],
)  # fmt: skip
def test_values_that_are_not(kind, words, values):
    for value in values:
        with pytest.raises(ValueError, match=r"^Adam: x must be ") as caught:
            allowed(getattr(settings, kind)).check("Adam", "x", value)
        shown = value if kind in ("NotNegative", "NotPositive", "Fraction") else repr(value)
        assert str(caught.value) == f"Adam: x must be {words}, got {shown}"


def test_none_is_a_value_where_the_annotation_says_so():
    noted = Annotated[int, "a note"]

    def constructor(self, params, a: settings.Fraction, b: settings.Fraction | None, c: noted, d=3):
        pass

    found = allowed_values(constructor)
    assert list(found) == ["a", "b"]
    assert (found["a"].or_none, found["b"].or_none) == (False, True)
    assert repr(found["a"]) == "in [0, 1)"
    found["b"].check("Adam", "b", None)
    with pytest.raises(TypeError, match=r"^Adam: a must be a number, got None$"):
        found["a"].check("Adam", "a", None)


def test_a_subclass_with_other_arguments_keeps_the_checks():
    class Heavy(SGD):
        def __init__(self, params, momentum: settings.Fraction = 0.9):
            super().__init__(params, momentum=momentum)

    weight = torch.nn.Parameter(torch.zeros(1, 1))
    for name, value in (("lr", -1.0), ("momentum", 1.0)):
        with pytest.raises(ValueError, match=f"^Heavy: {name} must be .*, got {value}$"):
            Heavy([{"params": [weight], name: value}])


META = torch.empty((), device="meta")  # stands in for a tensor on a GPU
RATE = torch.tensor([0.5])


@pytest.mark.parametrize(
    ("lr", "device", "expected"),
    [
        (0.5, "cpu", (0.5, None)),
        (np.float32(0.5), "meta", (0.5, None)),
        (RATE, "cpu", (0.0, RATE)),
        (RATE, "meta", (0.5, None)),
        (META, "meta", (0.0, META)),
    ],
)
def test_a_rate_is_a_tensor_on_the_device_of_the_parameters_only(lr, device, expected):
    number, tensor = settings.rate_on(torch.device(device), "Adam", lr)
    assert (number, type(number)) == (expected[0], float)
    assert tensor is expected[1]


def test_rates_on_another_device_are_not_read():
    allowed(settings.LearningRate).check("Adam", "lr", META)
    with pytest.raises(ValueError, match=r"^Adam: lr is on meta, but its parameters are on cpu$"):
        settings.rate_on(torch.device("cpu"), "Adam", META)
    with pytest.raises(TypeError, match=r"^Adam: lr must be .*, got one of torch\.int64$"):
        allowed(settings.LearningRate).check("Adam", "lr", META.long())


def test_rates_in_float64():
    wide = settings.in_float64(RATE)
    assert (wide.dtype, wide.shape, wide.item()) == (torch.float64, (), 0.5)
    assert type(settings.in_float64(np.float32(0.5))) is float


def test_choices_are_named():
    mark = one_of("a", "b")
    assert (mark.words, mark.is_number, mark.or_none) == ("'a' or 'b'", False, False)


def test_settings_are_the_other_arguments_in_order():
    arguments = {"self": 1, "params": 2, "lr": 3, "__class__": 4, "eps": 5}
    assert list(given(arguments).items()) == [("lr", 3), ("eps", 5)]


@pytest.mark.parametrize("zero", ["alpha", "eps", "initial_accumulator_value"])
def test_a_given_zero_is_not_the_default(zero):
    """A zero overrides the default of `form`. eps is close to the squared gradient, to matter."""
    values = {"alpha": 0.5, "eps": 2.5e-11, "initial_accumulator_value": 5e-11, zero: 0.0}
    weight = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    weight.grad = torch.full((1, 1), 1e-5, dtype=torch.float64)
    RMSProp([weight], lr=1, form="tensorflow", **values).step()
    alpha, eps, initial = values.values()
    mean_square = alpha * initial + (1 - alpha) * 1e-10
    assert weight.item() == pytest.approx(-1e-5 / (mean_square + eps) ** 0.5)


def test_steps_that_rows_catch_up_with_cannot_be_rounded_at_random():
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"^SGD: stochastic_rounding does not go .*, got True$"):
        SGD([weight], momentum=0.9, mode="catch_up", stochastic_rounding=True)
