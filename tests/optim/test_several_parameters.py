"""A step of several parameters is one call of the op, with the results of separate steps."""

import pytest
import torch
from conftest import generator, same_bits
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekit.nn import EmbeddingWeight

from .cases import OPTIMIZERS, make, sparse

pytestmark = pytest.mark.usefixtures("engine")

# Shapes of parameters; the ones with two dimensions are weights of embedding layers.
SHAPES = [(12, 5), (30, 8), (1, 1), (20, 16), (7,), (), (6, 2, 3), (0, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


class Calls(TorchDispatchMode):
    """Mode that records the number of tables in each call of update_rows_."""

    def __init__(self):
        super().__init__()
        self.tables = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.endswith("::update_rows_"):
            self.tables.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def values(shape, dtype, seed):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def parameters(dtypes):
    """Return parameters of all shapes, in alternating dtypes."""
    made = []
    for i, shape in enumerate(SHAPES):
        dtype = dtypes[i // 2 % len(dtypes)]
        kind = EmbeddingWeight if len(shape) == 2 else torch.nn.Parameter
        made.append(kind(values(shape, dtype, i)))
    return made


def set_gradients(weights, step):
    """Set gradients: dense, or for embedding weights sparse, some empty or with repeated rows."""
    for i, weight in enumerate(weights):
        seed = 100 * step + i
        if (step + i) % 5 == 4:
            weight.grad = None
        elif isinstance(weight, EmbeddingWeight) and i % 4 != 3:
            count = (step + i) % 4 if len(weight) else 0
            rows = torch.randint(0, max(len(weight), 1), (count,), generator=generator(seed))
            rows = rows.unique() if i % 2 else rows
            grad = sparse(
                rows, values((len(rows), weight.shape[1]), weight.dtype, seed), len(weight)
            )
            weight.grad = grad.coalesce() if i % 2 else grad
        else:
            weight.grad = values(weight.shape, weight.dtype, seed)


def tensors(optimizer, weights):
    """Yield all tensors that steps change."""
    for weight in weights:
        state = optimizer.state[weight]
        yield weight.detach()
        yield from (state[name] for name in sorted(state))


@pytest.mark.pairs
@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_a_step_of_each(name, rounding):
    settings = {"stochastic_rounding": True, "seed": 5} if rounding else {}
    try:
        weights, twins = parameters(DTYPES), parameters(DTYPES)
        optimizer = make(name, weights, **settings)
        alone = [make(name, [twin], **settings) for twin in twins]
    except (TypeError, ValueError):
        assert rounding  # some optimizers lack this setting
        return
    tables = [weight for weight in weights if isinstance(weight, EmbeddingWeight)]
    for step in range(6):
        set_gradients(weights, step)
        set_gradients(twins, step)
        for table in tables:
            table.note_version()
        optimizer.step()
        # A step is not a manual write, after which a table would check its free rows.
        assert not any(table.written() for table in tables)
        for one in alone:
            one.step()
    for optimizer_of_twin in (optimizer, *alone):
        optimizer_of_twin.state_dict()  # all late rows catch up
    for weight, twin, of_twin in zip(weights, twins, alone, strict=True):
        both = tensors(optimizer, [weight]), tensors(of_twin, [twin])
        for now, expected in zip(*both, strict=True):
            assert same_bits(now, expected)


@pytest.mark.parametrize(
    "name", ["LazyAdam", "RowWiseAdagrad", "PartialRowWiseAdam", "Adam", "SGD"]
)
def test_one_call_for_all(name):
    weights = [EmbeddingWeight(values((9, 4 + i % 3), torch.float32, i)) for i in range(40)]
    optimizer = make(name, weights)
    for step in range(2):
        for i, weight in enumerate(weights):
            grad = values((2, weight.shape[1]), weight.dtype, i)
            weight.grad = sparse([i % 9, step], grad, len(weight))
        with Calls() as calls:
            optimizer.step()
        assert calls.tables == [40]


def test_calls_are_of_one_group_and_dtype():
    weights = parameters(DTYPES[:2])
    optimizer = make("LazyAdam", [{"params": weights[:6]}, {"params": weights[6:], "lr": 0.5}])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    weights[0].grad = sparse([0], torch.ones(1, 5), 12)
    with Calls() as calls:
        optimizer.step()
    # There is a call each for sparse gradients, dense ones, the other dtype, and the second group.
    assert sorted(calls.tables) == [1, 2, 2, 3]


def test_calls_are_of_one_device(engine):
    if engine != "cpu":
        return  # the host runner takes tensors of the CPU only
    weights = [torch.nn.Parameter(torch.empty(3, 2, device=device)) for device in ("cpu", "meta")]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    with Calls() as calls:
        make("LazyAdam", weights).step()
    assert calls.tables == [1, 1]


def test_a_refused_step_changes_no_parameter(engine):
    weights = [EmbeddingWeight(values((9, 4), torch.float32, i)) for i in range(4)]
    optimizer = make("LazyAdam", weights)
    for weight in weights:
        weight.grad = sparse([3, 5], torch.ones(2, 4), 9)
    optimizer.step()
    before = [tensor.clone() for tensor in tensors(optimizer, weights)]
    weights[2].grad._indices()[0, 1] = 9
    with pytest.raises(IndexError, match=r"table 2: rows\[1\] is 9, but weight has 9 rows"):
        optimizer.step()
    assert all(optimizer.state[weight]["step"] == 1 for weight in weights)
    if engine != "cpu":
        return  # kernels have updated the valid rows
    for now, then in zip(tensors(optimizer, weights), before, strict=True):
        assert same_bits(now, then)
