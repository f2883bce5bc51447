"""Layers insert keys, can be copied and saved, and accumulate gradients."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsekit

from .bags import (
    BAGS,
    INT64_MAX,
    INT64_MIN,
    KEYS,
    check_coalesced,
    flat,
    make_layer,
    random_weights,
    single,
    vectors,
)


def test_training_inserts_and_evaluation_reads_what_training_would_start_from():
    layer = single()
    known, unseen = [3, INT64_MIN, -1], [0, INT64_MAX, 12]
    first = vectors(layer, known)
    assert layer.table.keys().tolist() == known
    before = copy.deepcopy(layer.state_dict())

    layer.eval()
    read = vectors(layer, unseen + known + unseen[:1])
    assert torch.equal(read, torch.cat([read[:3], first, read[:1]]))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name

    layer.train()
    assert torch.equal(vectors(layer, unseen), read[:3])
    assert layer.table.keys().tolist() == known + unseen
    assert torch.equal(layer.weight[:6].detach(), torch.cat([first, read[:3]]))


@given(keys=st.lists(KEYS, min_size=1, max_size=40), size=st.integers(1, 40), shuffle=st.randoms())
def test_initial_vectors_do_not_depend_on_order_or_batches(keys, size, shuffle):
    at_once = vectors(single(), keys)
    order = list(range(len(keys)))
    shuffle.shuffle(order)
    in_batches = single()
    for begin in range(0, len(order), size):
        vectors(in_batches, [keys[i] for i in order[begin : begin + size]])
    assert torch.equal(vectors(in_batches.eval(), keys), at_once)


def test_layers_start_from_different_vectors_unless_told_to_share():
    default, other = single(name=None), single(name=None)
    keys = list(range(-20, 20))
    assert not (vectors(default, keys) == vectors(other, keys)).any()
    assert not (vectors(single(name="a"), keys) == vectors(single(name="b"), keys)).any()
    assert not (vectors(single(seed=1), keys) == vectors(single(seed=2), keys)).any()
    assert torch.equal(vectors(single(name="a"), keys), vectors(single(name="a"), keys))
    assert torch.equal(vectors(single(seed=-1), keys), vectors(single(seed=2**64 - 1), keys))


def through_state_dict(layer, assign=False):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = single(seed=99, name="another")
    other.load_state_dict(torch.load(file, weights_only=True), strict=True, assign=assign)
    return other


def through_torch_save(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "state_dict": through_state_dict,
    "state_dict_assign": lambda layer: through_state_dict(layer, assign=True),
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch_save": through_torch_save,
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_goes_on_as_the_original(way):
    layer = single()
    optimizer = sparsekit.optim.LazyAdam(layer.parameters(), lr=0.1)
    inputs = (torch.tensor([4, 0, -9]), torch.arange(4))
    layer(inputs).sum().backward()
    optimizer.step()
    twin = COPIES[way](layer)
    assert len(sparsekit.split_embedding_variable_from_others(twin)[0]) == 1

    keys = [-9, 77, 4, INT64_MAX]  # seen and unseen keys
    for training in (False, True):
        layer.train(training)
        twin.train(training)
        assert torch.equal(vectors(twin, keys), vectors(layer, keys))
    assert torch.equal(twin.table.keys(), layer.table.keys())
    # The layer and its copy have separate memory.
    twin(inputs).sum().backward()
    sparsekit.optim.LazyAdam(twin.parameters(), lr=0.1).step()
    vectors(twin, [123])
    assert len(layer.table) == len(twin.table) - 1
    assert not torch.equal(vectors(twin, [4]), vectors(layer, [4]))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch_save"])
def test_a_copy_is_as_frozen_as_the_original(way, frozen):
    twin = COPIES[way](single().requires_grad_(not frozen))
    assert twin.weight.requires_grad != frozen


@pytest.mark.parametrize("convert", [torch.nn.Module.double, torch.nn.Module.bfloat16])
def test_converted_layer(convert):
    layer, expected = single(dtype=torch.float32), single(dtype=torch.float32)
    vectors(layer, [1, 2])
    convert(layer)
    keys = [2, 5, 1]  # a known, a new and a known key
    found = vectors(layer, keys)
    assert found.dtype == layer.weight.dtype
    assert torch.equal(found, vectors(expected, keys).to(found.dtype))
    layer((torch.tensor([5]), torch.arange(2))).sum().backward()
    assert layer.weight.grad.dtype == layer.weight.dtype


# Gradients

GRADIENT = {
    "one call": lambda layer, call: call(layer).backward(),
    "two calls, one backward": lambda layer, call: (call(layer) + call(layer)).backward(),
    "two backwards": lambda layer, call: [call(layer).backward() for _ in range(2)],
}


@pytest.mark.parametrize("way", GRADIENT)
@pytest.mark.parametrize("copied", [None, *COPIES])
@pytest.mark.parametrize("hook", [False, True], ids=["", "user_hook"])
def test_gradient_is_coalesced_however_it_comes(way, copied, hook):
    layer = single()
    batches = iter([[5, 1, 5], [1, 8, 5]])
    vectors(layer, [1, 2, 8, 5])
    if copied is not None:
        vectors(layer, [1])
        layer = COPIES[copied](layer)
    if hook:
        layer.weight.register_post_accumulate_grad_hook(lambda weight: None)

    def call(layer):
        return layer((torch.tensor(next(batches)), torch.arange(4))).sum()

    GRADIENT[way](layer, call)
    check_coalesced(layer.weight.grad)
    # The keys are in rows 1, 2, 8 and 5.
    counts = torch.tensor([1, 0, 0, 2] if way == "one call" else [2, 0, 1, 3])
    expected = counts[:, None].expand(4, 5).to(torch.float64)
    assert torch.equal(layer.weight.grad.to_dense()[:4], expected)
    assert layer.weight.grad._nnz() == (counts > 0).sum()


def test_unseen_key_in_evaluation_has_no_gradient():
    layer = single()
    vectors(layer, [7, 8])
    layer.eval()((torch.tensor([5, 8, 6, 8]), torch.arange(5))).sum().backward()
    check_coalesced(layer.weight.grad)
    assert layer.weight.grad.indices().tolist() == [[1]]
    assert layer.weight.grad.values().tolist() == [[2.0] * 5]
    layer.zero_grad()
    layer((torch.tensor([5, 7]), torch.arange(3))).sum().backward()
    # Key 7 has a gradient; the unseen key does not.
    assert layer.weight.grad.indices().tolist() == [[0]]


@pytest.mark.parametrize("sparse", [True, False])
# Rows with repeats, once in no order and twice in ascending order.
@pytest.mark.parametrize("rows", [[3, 0, 3], [0, 0], [3, 3]])
def test_gradient_of_a_weight_that_is_used_otherwise_too(rows, sparse):
    layer = single()
    vectors(layer, [1, 2, 3, 4])
    other = torch.nn.functional.embedding(torch.tensor(rows), layer.weight, sparse=sparse)
    (layer((torch.tensor([4, 1, 2]), torch.arange(4))).sum() + other.sum()).backward()
    if sparse:
        check_coalesced(layer.weight.grad)
    counts = [1 + rows.count(0), 1, 0, 1 + rows.count(3), 0]
    assert layer.weight.grad.to_dense()[:5].tolist() == [[n] * 5 for n in counts]


def test_a_backward_that_saved_the_weight_before_rows_were_written_is_refused():
    layer = single()
    vectors(layer, [1])
    penalty = layer.weight.square().sum()
    vectors(layer, [2])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_a_penalty_on_the_weight_goes_with_keys_that_are_known():
    layer = single()
    vectors(layer, [1])
    penalty = layer.weight.square().sum()
    out = layer((torch.tensor([1, 1]), torch.arange(3)))
    (out.sum() + penalty).backward()
    expected = 2 * layer.weight.detach()
    expected[0] += 2
    torch.testing.assert_close(layer.weight.grad.to_dense(), expected)


def test_no_grad_and_frozen_weight():
    layer = make_layer()
    with torch.no_grad():
        assert not layer(flat(BAGS)).requires_grad
    layer.requires_grad_(False)
    assert not layer(flat(BAGS)).requires_grad
    weights = random_weights(sum(map(len, BAGS)))
    layer(flat(BAGS), weights).sum().backward()
    assert layer.weight.grad is None
    assert (weights.grad != 0).all()
    layer.requires_grad_(True)
    layer(flat(BAGS)).sum().backward()
    check_coalesced(layer.weight.grad)


# This is a DeprecationWarning in one torch version and a FutureWarning in the next.
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_trace_is_refused():
    layer = sparsekit.DistributedEmbedding("sum", 10, 4, slot_num=1, max_nnz=1, name="traced")
    with pytest.raises(NotImplementedError, match=r"traced: torch\.jit\.trace"):
        torch.jit.trace(layer, torch.arange(5).view(5, 1, 1))
    assert len(layer.table) == 0


def test_the_address_of_a_gradient_is_forgotten_with_it():
    """If the address were kept, a later gradient there would be mistaken for a coalesced one."""
    layer = single()
    for _ in range(2):
        layer((torch.tensor([3, 5]), torch.arange(3))).sum().backward()
        assert layer.weight._on_its_way is None
