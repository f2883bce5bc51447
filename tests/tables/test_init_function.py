"""Functions as initializers give the distribution that they draw from, or fill a table."""

import functools
import math

import pytest
import torch

from sparsekit.tables.init_function import Filled, resolve
from sparsekit.tables.initializers import Constant, Normal, Uniform

init = torch.nn.init


def test_a_function_sees_zeros_on_the_cpu_without_grad():
    seen = []

    def function(tensor):
        seen.append((tensor.clone(), tensor.device.type, torch.is_grad_enabled()))
        tensor[:, 0] = torch.arange(len(tensor)).to(tensor.dtype)

    weight = torch.ones(3, 2, dtype=torch.bfloat16)
    place = weight.data_ptr()
    Filled(function).fill_(weight, 1, 2, seed=3)
    assert weight.data_ptr() == place
    assert weight.tolist() == [[1, 0], [3, 0], [5, 0]]
    assert seen[0][0].dtype == torch.bfloat16
    assert torch.equal(seen[0][0], torch.zeros(6, 2, dtype=torch.bfloat16))
    assert seen[0][1:] == ("cpu", False)


@pytest.mark.parametrize("seed", [3, -3, 2**63 - 1, -(2**63)])
def test_a_function_draws_by_the_seed(seed):
    weight, state = torch.zeros(2, 3), torch.get_rng_state()
    Filled(init.normal_).fill_(weight, 1, 2, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    expected = torch.zeros(4, 3).normal_(generator=torch.Generator().manual_seed(seed))
    assert torch.equal(weight, expected[1::2])


def test_a_function_that_returns_another_tensor_fills_nothing():
    with pytest.raises(TypeError, match="<lambda> returns another tensor than the one that it is"):
        Filled(lambda tensor: tensor + 1).fill_(torch.zeros(3, 2), 0, 1, seed=3)


def test_texts_of_functions_have_no_address():
    class Fills:
        def __call__(self, tensor):
            return init.eye_(tensor)

    assert repr(Filled(init.eye_)) == "Filled(eye_)"
    assert repr(Filled(functools.partial(init.dirac_, groups=2))) == "Filled(dirac_)"
    assert repr(Filled(Fills())) == f"Filled({Fills.__qualname__})"


def resolved(initializer, use_hashtable=True, shape=(40, 10)):
    return resolve("layer", initializer, shape, use_hashtable)


def test_initializers_are_taken_as_they_are():
    own = Normal(3.0)
    assert resolved(own) is own
    assert resolved(None) == Uniform()
    for use_hashtable in (True, False):
        for bad in (3, "normal", Uniform, torch.zeros(3)):
            with pytest.raises(
                TypeError, match=r"^layer: embedding_initializer must be a sparsekit"
            ):
                resolved(bad, use_hashtable)


OTHER = torch.ones(40, 10)
TOO_FAR = math.sqrt(64 * math.log(2))


@pytest.mark.parametrize(
    ("keywords", "fits"),
    [
        ({"std": 1.999 / TOO_FAR}, True),
        ({"std": 2.001 / TOO_FAR}, False),
        ({"std": 1 / TOO_FAR, "mean": 0.999}, True),
        ({"std": 1 / TOO_FAR, "mean": 1.001}, False),
        ({"std": 1 / TOO_FAR, "mean": -1.001}, False),
        ({"std": 0.999 / TOO_FAR, "a": -1, "b": 1}, True),
        ({"std": 0.5, "a": -9, "b": 9, "mean": 1}, True),
        ({"a": -9}, False),
        ({"b": 9}, False),
        ({"a": -7, "b": 7}, True),
        ({"std": 0.01, "a": 1, "b": -1}, False),
        ({"std": 0.01, "a": 1, "b": 9}, False),
    ],
    ids=str,
)
def test_a_cut_that_no_draw_reaches_is_a_normal_distribution(keywords, fits):
    function = functools.partial(init.trunc_normal_, **keywords)
    if fits:
        assert resolved(function) == Normal(keywords.get("mean", 0.0), keywords.get("std", 1.0))
        return
    mean, std, a, b = (
        keywords.get(*each) for each in (("mean", 0.0), ("std", 1.0), ("a", -2.0), ("b", 2.0))
    )
    said = f"normal draws with mean={mean} and std={std} are not cut off at {a} and {b}, and do"
    with pytest.raises(TypeError) as raised:
        resolved(function)
    assert said in str(raised.value)
    assert type(raised.value.__cause__) is ValueError


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda t: t.normal_().normal_(), "it calls normal_, normal_"),
        (lambda t: t.log_normal_(), "it calls log_normal_"),
        (lambda t: None, "it calls no op that can be seen"),
        (lambda t: t.uniform_(generator=torch.Generator()), "it has a generator, and vectors"),
        (functools.partial(init.trunc_normal_, std=0.01, generator=torch.Generator()),
         "it has a generator, and vectors depend on the layer's seed alone"),
        (lambda t: t[:9].uniform_(), "it calls "),
        (lambda t: [torch.zero_(OTHER), t][1], "it calls zero_"),
        (lambda t: t.uniform_(3, 1), "Uniform|from"),
        (lambda t: torch.zeros(40, 10), "returns another tensor than the one that it is to fill"),
    ],
)  # fmt: skip
def test_functions_without_one_distribution(function, said):
    for use_hashtable in (True, False):
        if not use_hashtable:
            assert resolved(function, False) == Filled(function)
            continue
        with pytest.raises(TypeError, match=rf"^layer: embedding_initializer .* does .*(?:{said})"):
            resolved(function)


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda t: t.uniform_(), Uniform(0.0, 1.0)),
        (lambda t: t.uniform_(-1, 2), Uniform(-1, 2)),
        (lambda t: t.normal_(), Normal(0.0, 1.0)),
        (lambda t: t.normal_(3), Normal(3, 1.0)),
        (lambda t: t.detach().normal_(std=2), Normal(0.0, 2)),
        (lambda t: t.fill_(2), Constant(2)),
        (lambda t: t.zero_(), Constant(0.0)),
        (init.kaiming_uniform_, Uniform(-math.sqrt(0.6), math.sqrt(0.6))),
        (functools.partial(init.kaiming_uniform_, mode="fan_out"),
         Uniform(-math.sqrt(6 / 40), math.sqrt(6 / 40))),
    ],
)  # fmt: skip
def test_functions_with_one_distribution(function, expected, use_hashtable):
    state = torch.get_rng_state()
    found = resolved(function, use_hashtable)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(found) is type(expected)
    assert found.numbers == pytest.approx(expected.numbers)
