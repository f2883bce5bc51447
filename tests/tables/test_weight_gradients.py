"""The gradient of a weight is delivered, coalesced and marked."""

import gc
import weakref

import pytest
import torch

from sparsekit.distributed.shard_gradient import ShardGradient
from sparsekit.tables import weight as weight_module
from sparsekit.tables.weight import (
    EmbeddingWeight,
    deliver_gradients,
    update_of,
    update_of_all,
)

T = torch.tensor
CPU = torch.device("cpu")


class Updater:
    def __init__(self):
        self.calls = []

    def update(self, weights, updates, scale):
        self.calls.append((weights, updates(), scale))

    def tie(self, *weights):
        reference = weakref.WeakMethod(self.update)
        for weight in weights:
            weight.update_in_backward = reference
        return self


def test_the_update_in_backward_of_one_and_of_all():
    one, other, third = (EmbeddingWeight(torch.zeros(2, 2)) for _ in range(3))
    plain = torch.nn.Parameter(torch.zeros(2, 2))
    plain.update_in_backward = lambda: 3
    updater, second = Updater().tie(one, other), Updater().tie(third)
    assert update_of(one) == updater.update
    assert update_of(third) == second.update
    assert update_of(plain) is None
    assert update_of(EmbeddingWeight(torch.zeros(2, 2))) is None
    assert update_of_all([one]) == update_of_all([one, other, one]) == updater.update
    for weights in ([one, third], [one, other, third], [third, one]):
        assert update_of_all(weights) is None
    free = EmbeddingWeight(torch.zeros(2, 2))
    for weights in ([free], [free, one], [one, free], [torch.zeros(2), one], [one, torch.ones(1)]):
        assert update_of_all(weights) is None
    del updater
    gc.collect()
    assert update_of(one) is update_of_all([one, other]) is None


def update_for(weight, *rows):
    return weight, T(rows), torch.arange(2.0 * len(rows)).view(-1, 2) + 1


def test_gradients_are_delivered_or_used_up():
    free, one, other, third, plain = (EmbeddingWeight(torch.zeros(6, 2)) for _ in range(5))
    plain = torch.nn.Parameter(torch.zeros(6, 2))
    updater, second = Updater().tie(one, third), Updater().tie(other)
    updates = [
        update_for(weight, *rows)
        for weight, rows in ((one, [0, 4]), (free, [1]), (other, [2]), (plain, [5]), (third, [3]))
    ]
    with torch.device("meta"):  # nothing may be made on the default device
        gradients = deliver_gradients(updates, ["a", "b", None, None, "e"])
    assert [gradient is None for gradient in gradients] == [True, False, True, False, True]
    for gradient, (weight, rows, values) in (
        (gradients[1], updates[1]),
        (gradients[3], updates[3]),
    ):
        assert gradient.is_coalesced()
        assert (gradient.shape, gradient.dtype) == (weight.shape, values.dtype)
        assert gradient.indices().tolist() == [rows.tolist()]
        assert gradient.indices().data_ptr() == rows.data_ptr()
        assert gradient.values().tolist() == values.tolist()
    (call,), (of_second,) = updater.calls, second.calls
    assert all(mine is theirs for mine, theirs in zip(call[0], [one, third], strict=True))
    assert call[1] == [updates[0], updates[4]]
    assert call[2] is None
    assert [each is other for each in of_second[0]] == [True]
    assert (free._shard_of, one._shard_of, other._shard_of) == ("b", None, None)
    assert free._on_its_way == (updates[1][1].data_ptr(), 1)
    again = update_for(free, 2, 3)
    deliver_gradients([again], ["b"])
    assert free._on_its_way == (again[1].data_ptr(), 2)
    with pytest.raises(ValueError, match="zip"):
        deliver_gradients(updates[:1], [])
    assert deliver_gradients([], []) == []


def of_dtype(weight, dtype):
    return weight, T([1, 2]), torch.ones(2, 2, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_gradient_has_its_own_dtype(dtype):
    (gradient,) = deliver_gradients([of_dtype(EmbeddingWeight(torch.zeros(6, 2)), dtype)], [None])
    assert gradient.dtype == dtype


def test_a_gradient_is_on_the_device_of_its_values():
    with torch.device("meta"):
        update = EmbeddingWeight(torch.zeros(6, 2)), torch.arange(2), torch.zeros(2, 2)
    (gradient,) = deliver_gradients([update], [None])
    assert gradient.is_meta


class Deliver(torch.autograd.Function):
    """Function whose backward returns the gradients that `deliver_gradients` delivers."""

    @staticmethod
    def forward(ctx, weight, rows, shard_of):
        ctx.given = weight, rows, shard_of
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        weight, rows, shard_of = ctx.given
        values = torch.ones(len(rows), weight.shape[1], dtype=weight.dtype)
        return *deliver_gradients([(weight, rows, values)], [shard_of]), None, None


@pytest.mark.parametrize("kind", [EmbeddingWeight, torch.nn.Parameter])
@pytest.mark.parametrize("shard_of", [None, "n"])
def test_a_gradient_is_coalesced_and_marked_as_that_of_a_shard(shard_of, kind):
    weight = kind(torch.zeros(6, 2))
    marked = kind is EmbeddingWeight and shard_of is not None
    for count in (1, 2, 3):
        Deliver.apply(weight, T([1, 4]), shard_of).backward()
        grad = weight.grad
        assert type(grad) is (ShardGradient if marked else torch.Tensor)
        assert not marked or grad.layer == "n"
        assert grad.is_coalesced()
        assert grad.to_dense()[:, 0].tolist() == [0, count, 0, 0, count, 0]
        assert getattr(weight, "_on_its_way", None) is None
        assert list(weight._post_accumulate_grad_hooks.values()) == [weight_module._mark]
    Deliver.apply(weight, T([0]), shard_of).backward()  # other rows
    assert weight.grad.is_coalesced()
    assert weight.grad.indices().tolist() == [[0, 1, 4]]
    weight.grad = None
    weight.sum().backward()  # a dense gradient by other hands has the rows of one rank, too
    assert type(weight.grad) is (ShardGradient if marked else torch.Tensor)
    weight.grad = None
    Deliver.apply(weight, T([1, 4]), None).backward()
    assert type(weight.grad) is torch.Tensor


def test_a_dense_gradient_of_a_shard_is_marked_and_a_differentiable_one_is_not():
    weight = EmbeddingWeight(torch.zeros(6, 2))
    weight._shard_of = "n"
    weight.grad = torch.ones(6, 2)
    weight_module._mark(weight)
    assert type(weight.grad) is ShardGradient
    marked = weight.grad
    weight_module._mark(weight)
    assert weight.grad is marked
    weight.grad = torch.ones(6, 2, requires_grad=True) * 1
    weight_module._mark(weight)
    assert type(weight.grad) is torch.Tensor
    weight.grad = None
    weight_module._mark(weight)
    assert weight.grad is None


@pytest.mark.parametrize(
    ("rows", "way", "coalesced_in_place"),
    [
        ([1, 4], None, True),  # ascending rows
        ([4, 1], None, False),
        ([1, 1], None, False),
        ([4], None, True),
        ([], None, True),
        ([4, 1], (0, 0), True),  # the memory that is on its way is known to be coalesced
        ([4, 1], (8, 0), False),
        ([4, 1], (0, 1), False),
        ([4, 1], (0, -1), False),
    ],
)
def test_a_gradient_is_looked_at_unless_it_is_the_one_on_its_way(rows, way, coalesced_in_place):
    weight = EmbeddingWeight(torch.zeros(6, 2))
    indices = torch.tensor([rows], dtype=torch.int64)
    values = torch.ones(len(rows), 2)
    weight.grad = torch.sparse_coo_tensor(indices, values, (6, 2), is_coalesced=False)
    given = weight.grad
    if way is not None:
        own = given._indices()
        weight._on_its_way = own.data_ptr() + way[0], own.shape[1] + way[1]
    weight_module._mark_coalesced(weight)
    assert weight._on_its_way is None
    assert weight.grad.is_coalesced()
    assert (weight.grad is given) == coalesced_in_place
    dense = torch.zeros(6, 2)
    for row in rows:
        dense[row] += 1
    assert torch.equal(weight.grad.to_dense(), dense)


def test_a_gradient_that_is_coalesced_or_dense_is_left():
    weight = EmbeddingWeight(torch.zeros(6, 2))
    for grad in (torch.eye(6)[:, :2].to_sparse(1), torch.ones(6, 2), None):
        weight.grad, weight._on_its_way = grad, (1, 2)
        weight_module._mark_coalesced(weight)
        assert weight.grad is grad
        assert weight._on_its_way is None


@pytest.mark.parametrize(("leaf", "requires_grad"), [(True, True), (True, False), (False, True)])
def test_the_hook_is_registered_once_where_there_will_be_a_gradient(leaf, requires_grad):
    weight = torch.nn.Parameter(torch.zeros(6, 2), requires_grad=requires_grad)
    weight = weight if leaf else weight * 1
    others = 0
    if leaf and requires_grad:
        weight.register_post_accumulate_grad_hook(print)
        others = 1
    for _ in range(2):
        weight_module._watch_gradient(weight)
    hooks = list((weight._post_accumulate_grad_hooks or {}).values())
    assert hooks.count(weight_module._mark) == int(leaf and requires_grad)
    assert len(hooks) == others + int(leaf and requires_grad)


def test_marks_of_weights_are_those_of_the_weight_alone():
    weight, other = EmbeddingWeight(torch.zeros(2, 2)), EmbeddingWeight(torch.zeros(2, 2))
    weight.moved, weight._shard_of, weight._on_its_way = True, "n", (1, 2)
    weight.is_stepped_by(torch.optim.SGD([weight]))
    for name in ("moved", "_shard_of", "_on_its_way", "_optimizers", "noted_version"):
        assert getattr(other, name) == getattr(EmbeddingWeight, name)
    assert (other.moved, other._shard_of, other.noted_version) == (False, None, None)
