"""clip_grad_norm_ and clip_grad_value_ equal torch's on dense copies of the gradients."""

import copy
import functools
import math

import pytest
import torch
from conftest import assert_close, randn, same_bits, whole_numbers
from torch.utils._python_dispatch import TorchDispatchMode

import sparsekit
from sparsekit.optim.clip import clip_grad_norm_, clip_grad_value_

# True if torch computes norms of sparse tensors.
SPARSE_NORMS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
ROWS = {"coalesced": [0, 3, 4], "repeated": [4, 0, 4, 4], "no rows": []}


def parameter(grad, weight=torch.nn.Parameter):
    result = weight(torch.zeros(grad.shape, dtype=grad.dtype))
    result.grad = grad
    return result


def sparse(rows, dtype):
    """Return a sparse gradient of these rows, coalesced if they ascend; values add up exactly."""
    indices = torch.tensor([rows], dtype=torch.int64)
    values = whole_numbers(len(rows), 3, dtype=dtype)
    rise = rows == sorted(set(rows))
    return torch.sparse_coo_tensor(
        indices, values, (6, 3), is_coalesced=rise, check_invariants=True
    )


def every_kind(dtype, rows=ROWS["repeated"]):
    """Return a parameter for each kind of gradient: a table's, sparse, dense, none, a number."""
    return [
        parameter(sparse(rows, dtype), sparsekit.nn.EmbeddingWeight),
        parameter(sparse(rows[::2], dtype)),
        parameter(randn(4, 5, dtype=dtype)),
        torch.nn.Parameter(torch.ones(2)),
        parameter(randn(1, dtype=dtype).squeeze()),
    ]


def dense_copies(parameters):
    """Return copies of parameters whose gradients are dense and in float64, for torch to clip."""
    return [
        parameter(p.grad.to_dense().to(torch.float64, copy=True))
        if p.grad is not None
        else copy.deepcopy(p)
        for p in parameters
    ]


@pytest.mark.pairs
@pytest.mark.parametrize("max_norm", [0, 0.7, 1e4, math.inf])
@pytest.mark.parametrize("norm_type", [0.5, 1, 2.0, 3.5, math.inf, "inf"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_torch_on_dense_gradients(dtype, rows, norm_type, max_norm):
    parameters = every_kind(dtype, ROWS[rows])
    copies = dense_copies(parameters)
    before = [p.grad for p in parameters]
    norm = clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=True)
    expected = torch.nn.utils.clip_grad_norm_(copies, max_norm, norm_type)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # The norm of bfloat16 gradients is float32.
    assert norm.dtype == wide
    assert_close(norm, expected.to(wide))
    for p, q in zip(parameters, copies, strict=True):
        if p.grad is not None:
            assert p.grad.dtype == dtype
            assert_close(p.grad.to_dense(), q.grad.to(dtype))
    assert parameters[0].grad.is_coalesced()
    for p, grad in zip(parameters, before, strict=True):
        assert p.grad is grad or (grad.is_sparse and not grad.is_coalesced())


@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
def test_several_dtypes_together(norm_type):
    parameters = [p for dtype in DTYPES for p in every_kind(dtype)]
    copies = dense_copies(parameters)
    norm = clip_grad_norm_(parameters, 0.7, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(copies, 0.7, norm_type)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for p, q in zip(parameters, copies, strict=True):
        if p.grad is not None:
            rtol = 1e-2 if p.dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(p.grad.to_dense().double(), q.grad, rtol=rtol, atol=0)


def test_gradients_below_the_norm_keep_their_bits():
    parameters = every_kind(torch.float32)
    expected = [p.grad.to_dense() for p in parameters if p.grad is not None]
    clip_grad_norm_(parameters, 1e4)
    results = [p.grad.to_dense() for p in parameters if p.grad is not None]
    assert all(map(same_bits, results, expected))


@pytest.mark.parametrize("layer_type", ["DistributedEmbedding", "All2AllDenseEmbedding"])
def test_after_backward(layer_type):
    arguments = ("sum", 10, 3, 2, 2) if layer_type == "DistributedEmbedding" else (10, 3, 2, 2)
    layer = getattr(sparsekit, layer_type)(*arguments)
    model = torch.nn.Sequential(layer, torch.nn.Linear(3, 1))
    for _ in range(2):  # the second gradient is added to the first
        model(torch.tensor([[[7, 8], [7, 7]]])).sum().backward()
    copies = dense_copies(model.parameters())
    norm = clip_grad_norm_(model.parameters(), 0.5)
    assert_close(norm, torch.nn.utils.clip_grad_norm_(copies, 0.5).float())
    assert norm > 0.5
    assert layer.weight.grad.is_coalesced()
    for p, q in zip(model.parameters(), copies, strict=True):
        assert_close(p.grad.to_dense(), q.grad.float())


@pytest.mark.parametrize(
    "form", [lambda p: p, lambda p: [p], lambda p: (q for q in [p])], ids=["one", "list", "iter"]
)
def test_forms_of_parameters(form):
    weight = parameter(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(form(weight), 1) == 5
    assert_close(weight.grad, torch.tensor([0.6, 0.8]))


def test_gradients_that_have_a_graph():
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    (weight.grad,) = torch.autograd.grad(weight.square().sum() / 2, weight, create_graph=True)
    assert not clip_grad_norm_(weight, 1).requires_grad
    assert_close(weight.grad.detach(), torch.tensor([0.6, 0.8]))


def test_values_of_gradients_that_have_a_graph():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, -4.0], requires_grad=True)
    clip_grad_value_(weight, 1)
    assert weight.grad.tolist() == [1, -1]


@pytest.mark.parametrize("has_gradient", [False, True])
def test_the_norm_is_on_the_device_of_the_parameters(has_gradient):
    weight = torch.nn.Parameter(torch.empty(3, device="meta"))  # stands in for another device
    weight.grad = torch.empty_like(weight) if has_gradient else None
    assert clip_grad_norm_([weight], 1).device.type == "meta"


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize("nothing", [[], [torch.nn.Parameter(torch.ones(2))]], ids=["", "no grad"])
def test_nothing_to_clip(nothing, norm_type):
    norm = clip_grad_norm_(nothing, 1, norm_type)
    assert norm == 0
    assert norm.shape == ()


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 2])
def test_a_norm_that_is_not_finite(which, bad, norm_type):
    parameters = every_kind(torch.float32, ROWS["coalesced"])
    grad = parameters[which].grad
    (grad._values() if grad.is_sparse else grad)[1, 2] = bad
    before = [p.grad.to_dense() for p in parameters if p.grad is not None]
    message = f"^clip_grad_norm_: the norm of order {float(norm_type)} is {bad}.*error_if_nonfinite"
    with pytest.raises(RuntimeError, match=message):
        clip_grad_norm_(parameters, 1, norm_type, error_if_nonfinite=True)
    after = [p.grad.to_dense() for p in parameters if p.grad is not None]
    assert all(map(same_bits, after, before))

    copies = dense_copies(parameters)
    norm = clip_grad_norm_(parameters, 1, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(copies, 1, norm_type)
    torch.testing.assert_close(norm, expected.float(), equal_nan=True)
    for p, q in zip(parameters, copies, strict=True):
        if p.grad is not None and p.grad.is_sparse:  # other rows are NaN or 0
            p, q = p.grad, q.grad[p.grad._indices()[0]].float()
            torch.testing.assert_close(p._values(), q, equal_nan=True)
        elif p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad.float(), equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_norm": -1}, ValueError, r"max_norm must be >= 0, got -1\.0"),
        ({"max_norm": math.nan}, ValueError, "max_norm must be >= 0, got nan"),
        ({"max_norm": "much"}, TypeError, "max_norm must be a number, got 'much'"),
        ({"max_norm": None}, TypeError, "max_norm must be a number, got None"),
        ({"norm_type": 0}, ValueError, r"norm_type must be > 0, got 0\.0"),
        ({"norm_type": -math.inf}, ValueError, "norm_type must be > 0, got -inf"),
        ({"norm_type": math.nan}, ValueError, "norm_type must be > 0, got nan"),
        ({"norm_type": []}, TypeError, r"norm_type must be a number, got \[\]"),
        ({"parameters": {"a": 1}}, TypeError, "parameters must be tensors, but item 0 is a str"),
        ({"parameters": [torch.ones(2), 1]}, TypeError, "item 1 is a int"),
    ],
)
def test_errors(arguments, error, message):
    weight = parameter(torch.tensor([3.0, 4.0]))
    with pytest.raises(error, match=f"^clip_grad_norm_: .*{message}"):
        clip_grad_norm_(**{"parameters": [weight], "max_norm": 1, **arguments})
    assert torch.equal(weight.grad, torch.tensor([3.0, 4.0]))


class NothingRead(TorchDispatchMode):
    """Mode that raises if a tensor's value is read, as the host would then wait for a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_reads_nothing_unless_errors_are_wanted():
    parameters = every_kind(torch.float32, ROWS["coalesced"])
    with NothingRead():
        clip_grad_norm_(parameters, 0.7)
    with NothingRead(), pytest.raises(AssertionError):
        clip_grad_norm_(parameters, 0.7, error_if_nonfinite=True)


@pytest.mark.parametrize("function", [clip_grad_norm_, clip_grad_value_])
def test_compilers_end_their_graph_before_gradients_are_clipped(function):
    compiled = torch.compile(lambda weight: function(weight, 1.0), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="sparsekit"):
        compiled(parameter(torch.ones(2)))


@pytest.mark.pairs
@pytest.mark.parametrize("clip_value", [0.0, 0.7, 1e4, math.inf])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_as_torch_clips_dense_ones(dtype, rows, clip_value):
    parameters = every_kind(dtype, ROWS[rows])
    copies = dense_copies(parameters)
    clip_grad_value_(parameters, clip_value)
    torch.nn.utils.clip_grad_value_(copies, clip_value)
    for p, q in zip(parameters, copies, strict=True):
        if p.grad is not None:
            assert p.grad.dtype == dtype
            assert torch.equal(p.grad.to_dense(), q.grad.to(dtype))
    assert parameters[0].grad.is_coalesced()


@pytest.mark.pairs
@pytest.mark.parametrize("norm_type", [1, 2.0, math.inf])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_torch_clips_norms_as_ours_or_raises(foreach, rows, norm_type):
    """This covers one rank; tests/ranks/test_gradient_tools.py covers several."""
    parameters, copies = ([*every_kind(torch.float32, ROWS[rows])] for _ in range(2))
    for p, q in zip(parameters, copies, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    by_torch = functools.partial(torch.nn.utils.clip_grad_norm_, foreach=foreach)
    nothing = rows == "no rows" and norm_type == math.inf  # an empty gradient has no maximum
    if SPARSE_NORMS and not nothing:
        norm = clip_grad_norm_(parameters, 0.7, norm_type)
        torch.testing.assert_close(by_torch(copies, 0.7, norm_type), norm)
        for p, q in zip(parameters, copies, strict=True):
            if p.grad is not None:
                assert_close(q.grad.to_dense(), p.grad.to_dense())
    else:
        with pytest.raises(RuntimeError):  # NotImplementedError before torch 2.14
            by_torch(copies, 0.7, norm_type)


def test_torch_cannot_clip_values_of_sparse_gradients():
    """If torch can clip these values, our function is no longer needed."""
    with pytest.raises(NotImplementedError):
        torch.nn.utils.clip_grad_value_(every_kind(torch.float32), 1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"clip_value": -1}, ValueError, "clip_value must be >= 0, got -1"),
        ({"clip_value": math.nan}, ValueError, "clip_value must be >= 0, got nan"),
        ({"clip_value": None}, TypeError, "clip_value must be a number, got None"),
        ({"parameters": torch.nn.Linear(1, 1)}, TypeError, r"pass its parameters\(\)"),
        ({"parameters": [1]}, TypeError, "item 0 is a int"),
    ],
)
def test_values_that_cannot_be_clipped(arguments, error, message):
    weight = parameter(torch.full((2, 2), 5.0))
    with pytest.raises(error, match=f"^clip_grad_value_: .*{message}"):
        clip_grad_value_(**{"parameters": [weight], "clip_value": 1, **arguments})
    assert (weight.grad == 5).all()
