"""Invalid input changes nothing and raises an error with the layer, the argument and its value."""

import re
import warnings

import numpy as np
import pytest
import torch

import sparsekit
from sparsekit import All2AllDenseEmbedding, DistributedEmbedding, TableFullError
from sparsekit.lookup.explain import explain_refusal

from .bags import KeyedJagged, flat

T = torch.tensor
VALUES, OFFSETS = T([4, 5, 4, 90]), T([0, 2, 2, 3, 4])
DENSE = T([[[1, 2], [3, 95]]])


def pooled(combiner="sum", **changes):
    arguments = {
        "max_vocabulary_size_per_gpu": 100,
        "embedding_vec_size": 4,
        "slot_num": 2,
        "max_nnz": 3,
        "name": "movies",
    }
    return DistributedEmbedding(combiner, **{**arguments, **changes})


def dense(**changes):
    arguments = {
        "max_vocabulary_size_per_gpu": 100,
        "embedding_vec_size": 4,
        "slot_num": 2,
        "nnz_per_slot": 2,
        "name": "movies",
    }
    return All2AllDenseEmbedding(**{**arguments, **changes})


def coo(values, columns=(0, 1, 0, 0), shape=(4, 3)):
    indices = T([[0, 0, 2, 3], list(columns)])
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def csr(values, offsets=OFFSETS, columns=(0, 1, 0, 0)):
    # torch warns that compressed layouts are in beta; the cases are made at import, outside any
    # filter.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        columns = T(list(columns))
        return torch.sparse_csr_tensor(offsets, columns, values, (4, 3), check_invariants=True)


def csc():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(4, dtype=torch.int64).to_sparse_csc()


def jagged(values, offsets=OFFSETS):
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def keyed(slots, weights=None):
    bags = KeyedJagged([[]] * 6, weights)
    bags.keys = lambda: ["key"] * slots
    return bags


def two_slots(by_slot):
    bags = keyed(2)
    bags._values, bags._offsets = flat(by_slot)
    return bags


def with_strides(strides, inverse_indices=None):
    """Return a KeyedJaggedTensor with the given number of samples for each key."""
    bags = two_slots([[1], [2], [3], [4]])
    bags.variable_stride_per_key = lambda: True
    bags.stride_per_key = lambda: strides
    bags.inverse_indices_or_none = lambda: inverse_indices
    return bags


def on_meta(tensor):
    return tensor.to("meta")


ONES = torch.ones(4)

# name: (call, error, parts of its message besides the layer's name)
CONSTRUCTION = {
    "combiner": (lambda: pooled("min"), ValueError, ["combiner", "'min'", "sqrtn"]),
    "combiner no str": (lambda: pooled(["sum"]), ValueError, ["combiner", "['sum']"]),
    "on_full": (lambda: pooled(on_full="shrink"), ValueError, ["on_full", "'shrink'"]),
    "gradient_reduction": (
        lambda: dense(gradient_reduction="max"),
        ValueError,
        ["gradient_reduction", "'max'", "mean"],
    ),
    "dtype": (lambda: pooled(dtype=torch.float16), ValueError, ["dtype", "torch.float16"]),
    "key_dtype": (lambda: dense(key_dtype=torch.int16), ValueError, ["key_dtype", "torch.int16"]),
    "capacity 0": (
        lambda: pooled(max_vocabulary_size_per_gpu=0),
        ValueError,
        ["max_vocabulary_size_per_gpu", "got 0"],
    ),
    "capacity 2^31": (
        lambda: dense(max_vocabulary_size_per_gpu=2**31),
        ValueError,
        ["max_vocabulary_size_per_gpu", "2147483647", "got 2147483648"],
    ),
    "dim negative": (
        lambda: pooled(embedding_vec_size=-4),
        ValueError,
        ["embedding_vec_size", "got -4"],
    ),
    "dim float": (lambda: dense(embedding_vec_size=4.0), TypeError, ["embedding_vec_size", "4.0"]),
    "slot_num bool": (lambda: pooled(slot_num=True), TypeError, ["slot_num", "True"]),
    "slot_num None": (lambda: dense(slot_num=None), TypeError, ["slot_num", "None"]),
    "max_nnz 0": (lambda: pooled(max_nnz=0), ValueError, ["max_nnz", "got 0"]),
    "nnz_per_slot": (lambda: dense(nnz_per_slot="2"), TypeError, ["nnz_per_slot", "'2'"]),
    "max_feature_num": (lambda: pooled(max_feature_num=0), ValueError, ["max_feature_num", "0"]),
    "padding_key": (lambda: dense(padding_key=0.0), TypeError, ["padding_key", "0.0"]),
    "padding_key 2^63": (lambda: pooled(padding_key=2**63), ValueError, ["padding_key", "775808"]),
    "seed": (lambda: pooled(seed=1.5), TypeError, ["seed", "1.5"]),
    "seed 2^64": (lambda: pooled(seed=2**64), ValueError, ["seed", str(2**64)]),
    "initializer": (
        lambda: pooled(embedding_initializer="normal"),
        TypeError,
        ["embedding_initializer", "torch.nn.init", "got 'normal'"],
    ),
    "initializer class": (
        lambda: dense(embedding_initializer=sparsekit.nn.Normal),
        TypeError,
        ["embedding_initializer", "class", "Normal"],
    ),
    "device": (lambda: pooled(device="mps"), NotImplementedError, ["device", "mps"]),
}

# name: (layer, its inputs and optional weights, error, parts of its message)
CALLS = {
    # unknown forms
    "no form": (pooled, ["abc"], TypeError, ["inputs", "sparse COO", "got str"]),
    "a list of 3": (pooled, [[1, 2, 3]], TypeError, ["inputs", "got a list of 3"]),
    "CSC": (pooled, [csc()], TypeError, ["inputs", "torch.sparse_csc"]),
    "values a list": (pooled, [([1], T([0, 1]))], TypeError, ["values", "list"]),
    # dtypes
    "keys float": (pooled, [(ONES, OFFSETS)], TypeError, ["keys", "torch.float32"]),
    "keys int16": (dense, [DENSE.short()], TypeError, ["keys", "torch.int16"]),
    "keys bool in COO": (pooled, [coo(ONES.bool())], TypeError, ["keys", "torch.bool"]),
    "int64 keys for int32": (
        lambda: pooled(key_dtype=torch.int32),
        [(VALUES, OFFSETS)],
        TypeError,
        ["keys", "torch.int32", "torch.int64"],
    ),
    "offsets float": (pooled, [(VALUES, OFFSETS.float())], TypeError, ["offsets", "float32"]),
    # shapes
    "values 2-D": (pooled, [(DENSE[0], OFFSETS)], ValueError, ["values", "(2, 2)"]),
    "values 0-D": (pooled, [(T(3), OFFSETS)], ValueError, ["values must be 1-D", "()"]),
    "offsets 0-D": (pooled, [(VALUES, T(0))], ValueError, ["offsets must be 1-D", "()"]),
    "offsets 2-D": (pooled, [(VALUES, OFFSETS[None])], ValueError, ["offsets", "(1, 5)"]),
    "dense 2-D": (pooled, [DENSE[0]], ValueError, ["dense", "(2, 2)"]),
    "as for EmbeddingBag": (pooled, [VALUES, OFFSETS], ValueError, ["dense", "(4,)", "tuple"]),
    "dense slots": (pooled, [DENSE.expand(2, 2, 2)[:, :1]], ValueError, ["1 slots", "slot_num=2"]),
    "COO 3-D": (pooled, [DENSE.to_sparse_coo()], ValueError, ["sparse", "(1, 2, 2)"]),
    "COO dense_dim": (pooled, [DENSE[0].to_sparse(1)], ValueError, ["sparse", "(2, 2)", "1"]),
    "nested with holes": (
        pooled,
        [torch.nested.nested_tensor_from_jagged(VALUES, OFFSETS, lengths=T([1, 0, 1, 1]))],
        ValueError,
        ["nested", "no holes"],
    ),
    "nested 3-D": (pooled, [jagged(DENSE.view(-1, 1))], ValueError, ["nested", "3 dimensions"]),
    "KJT strides": (pooled, [with_strides([3, 1])], ValueError, ["[3, 1] samples", "expand"]),
    "KJT inverse": (
        pooled,
        [with_strides([2, 2], (["a", "b"], T([[0, 1, 1]] * 2)))],
        ValueError,
        ["[2, 2] samples", "inverse_indices"],
    ),
    "KJT slots": (pooled, [keyed(3)], ValueError, ["3 slots", "slot_num=2"]),
    "keys 2-D": (dense, [DENSE[0]], ValueError, ["keys", "slot_num=2", "(2, 2)"]),
    "keys slots": (dense, [DENSE[:, :1]], ValueError, ["keys", "slot_num=2", "(1, 1, 2)"]),
    "dynamic 2-D": (lambda: dense(dynamic_input=True), [DENSE[0]], ValueError, ["keys", "(2, 2)"]),
    "keys a list": (dense, [[1, 2]], TypeError, ["keys", "list"]),
    # offsets
    "offsets from 1": (pooled, [(VALUES, OFFSETS + 1)], ValueError, ["offsets[0] is 1"]),
    "offsets empty": (pooled, [(VALUES, VALUES[:0])], ValueError, ["offsets", "missing"]),
    "offsets decrease": (
        pooled,
        [(VALUES, T([0, 3, 2, 4, 4]))],
        ValueError,
        ["offsets[1] is 3", "offsets[2] is 2"],
    ),
    "offsets too short": (
        pooled,
        [(VALUES, T([0, 2, 3]))],
        ValueError,
        ["offsets[-1] is 3", "len(values)=4"],
    ),
    "offsets too far": (
        pooled,
        [(VALUES, T([0, 2, 5]))],
        ValueError,
        ["offsets[-1] is 5", "len(values)=4"],
    ),
    "bags": (pooled, [(VALUES, T([0, 2, 2, 4]))], ValueError, ["slot_num=2", "got 3"]),
    # sizes
    "max_nnz": (pooled, [(VALUES, T([0, 0, 4]))], ValueError, ["bag 1", "4 keys", "max_nnz=3"]),
    "max_nnz dense": (pooled, [DENSE.repeat(1, 1, 2)], ValueError, ["bag 0", "max_nnz=3"]),
    "max_feature_num": (
        lambda: pooled(max_feature_num=2),
        [(VALUES, T([0, 1, 1, 2, 4]))],
        ValueError,
        ["sample 1", "3 keys", "max_feature_num=2"],
    ),
    "max_feature_num KJT": (
        lambda: pooled(max_feature_num=2),
        [two_slots([[1, 1], [], [3], [4]])],  # sample 0 is [1, 1] and [3], sample 1 is [] and [4]
        ValueError,
        ["sample 0", "3 keys", "max_feature_num=2"],
    ),
    "max_feature_num dense": (
        lambda: pooled(max_feature_num=3),
        [DENSE],
        ValueError,
        ["sample 0", "4 keys", "max_feature_num=3"],
    ),
    # keys of layers without a hash table
    "key too large": (
        lambda: pooled(use_hashtable=False, max_vocabulary_size_per_gpu=90),
        [(VALUES, OFFSETS)],
        IndexError,
        ["key 90", "position 3", "[0, 90)"],
    ),
    "key -1": (
        lambda: dense(use_hashtable=False, padding_key=1),
        [T([[[1, 5], [-1, -2]]])],
        IndexError,
        ["key -1", "position 2", "[0, 100)"],
    ),
    "key in COO": (
        lambda: pooled(use_hashtable=False),
        [torch.sparse_coo_tensor(T([[3, 0], [0, 0]]), T([5, 100]), (4, 3), check_invariants=True)],
        IndexError,
        ["key 100", "position 1", "[0, 100)"],
    ),
    # devices
    "values on meta": (pooled, [(on_meta(VALUES), OFFSETS)], ValueError, ["values", "meta", "cpu"]),
    "offsets on meta": (pooled, [(VALUES, on_meta(OFFSETS))], ValueError, ["offsets", "meta"]),
    "dense on meta": (pooled, [on_meta(DENSE)], ValueError, ["inputs", "meta", "cpu"]),
    "keys on meta": (lambda: dense(padding_key=0), [on_meta(DENSE)], ValueError, ["keys", "meta"]),
    "weights on meta": (
        pooled,
        [(VALUES, OFFSETS), on_meta(ONES)],
        ValueError,
        ["sample_weights", "meta"],
    ),
    "KJT's weights on meta": (
        pooled,
        [keyed(2, on_meta(ONES[:0]))],
        ValueError,
        ["sample_weights", "meta"],
    ),
    # sample_weights
    "weights short": (
        pooled,
        [(VALUES, OFFSETS), ONES[:3]],
        ValueError,
        ["sample_weights", "4 keys", "(3,)"],
    ),
    "weights 2-D": (pooled, [(VALUES, OFFSETS), ONES[None]], ValueError, ["weights", "(1, 4)"]),
    "weights int": (pooled, [(VALUES, OFFSETS), VALUES], TypeError, ["sample_weights", "int64"]),
    "weights a list": (pooled, [DENSE, [1.0]], TypeError, ["sample_weights", "a list of 1"]),
    "weights of another form": (
        pooled,
        [csr(VALUES), coo(ONES)],
        TypeError,
        ["sample_weights", "torch.sparse_coo"],
    ),
    "weights elsewhere in COO": (
        pooled,
        [coo(VALUES), coo(ONES, (0, 1, 0, 2))],
        ValueError,
        ["sample_weights", "indices", "position 3", "[3, 2] and [3, 0]"],
    ),
    "weights elsewhere in CSR": (
        pooled,
        [csr(VALUES), csr(ONES, T([0, 2, 3, 3, 4]))],
        ValueError,
        ["sample_weights", "crow_indices", "position 2", "3 and 2"],
    ),
    "weights in other columns of CSR": (
        pooled,
        [csr(VALUES), csr(ONES, columns=(0, 2, 0, 2))],
        ValueError,
        ["sample_weights", "col_indices", "position 1", "2 and 1"],
    ),
    "weights elsewhere in nested": (
        pooled,
        [jagged(VALUES), jagged(ONES, T([0, 2, 4]))],
        ValueError,
        ["sample_weights", "offsets", "(3,) and (5,)"],
    ),
    "weights that would lose their gradient": (
        pooled,
        [coo(VALUES), coo(ONES).requires_grad_()],
        ValueError,
        ["sample_weights", "gradient", "(4,)"],
    ),
    "weights twice": (pooled, [keyed(2, ONES[:0]), ONES[:0]], ValueError, ["weights of its own"]),
    # the layer itself
    "half": (lambda: pooled().half(), [(VALUES, OFFSETS)], TypeError, ["weight", "float16"]),
    "full": (
        lambda: pooled(max_vocabulary_size_per_gpu=5),
        [(VALUES, OFFSETS)],
        TableFullError,
        ["rank 0", "3 of 5", "brought 3 new keys"],
    ),
}


def trained(make):
    """Make a layer and an optimizer, train one step on three keys, and return them."""
    layer = make()
    optimizer = sparsekit.optim.LazyAdam(layer.parameters())
    if layer.weight.dtype == torch.float16:
        return layer, optimizer
    keys = T([1, 2, 1, 3], dtype=layer.key_dtype)
    if isinstance(layer, DistributedEmbedding):
        out = layer((keys, OFFSETS))
    else:
        out = layer(keys if layer.dynamic_input else keys.view(1, 2, 2))
    out.sum().backward()
    optimizer.step()
    return layer, optimizer


def state_bytes(layer, optimizer):
    tensors = {**layer.state_dict(), "grad": layer.weight.grad}
    for moments in optimizer.state.values():
        tensors.update(moments)
    return {
        name: tensor.detach().to_dense().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
        if tensor is not None
    }


@pytest.mark.parametrize("case", [*CONSTRUCTION, *CALLS])
def test_bad_input(case):
    if case in CONSTRUCTION:
        call, error, parts = CONSTRUCTION[case]
        states = {}
    else:
        make, inputs, error, parts = CALLS[case]
        layer, optimizer = trained(make)
        states = state_bytes(layer, optimizer)

        def call():
            layer(*inputs)

    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert message.startswith("movies: ")
    assert [part for part in parts if part not in message] == [], message
    assert type(caught.value) is error
    if states:
        assert state_bytes(layer, optimizer) == states
        assert layer.training


def test_good_input_of_the_same_kind_is_taken():
    """The same inputs without the fault are accepted, so only the fault can cause the error."""
    for inputs in [
        [(VALUES, OFFSETS)],
        [(VALUES, OFFSETS), ONES],
        [DENSE],
        [coo(VALUES), coo(ONES)],
        [csr(VALUES), csr(ONES)],
        [jagged(VALUES), jagged(ONES)],
        [with_strides([2, 2])],
    ]:
        assert pooled()(*inputs).shape[1:] == (2, 4)
    assert dense()(DENSE).shape == (1, 2, 2, 4)


def test_numpy_sizes_are_ints():
    size = np.int64(3)
    layer = pooled(max_vocabulary_size_per_gpu=size, embedding_vec_size=size, slot_num=size)
    assert (type(layer.capacity), layer.weight.shape, layer.slot_num) == (int, (3, 3), 3)


@pytest.mark.parametrize(
    "weight", [torch.zeros(2, 2), torch.zeros(100, 3), torch.zeros(4, 100).t()]
)
def test_a_weight_that_does_not_fit_is_refused_before_keys_are_inserted(weight):
    layer = pooled()
    layer.weight = sparsekit.nn.EmbeddingWeight(weight)
    with pytest.raises(ValueError, match=r"movies: weight must be contiguous and of shape \(100"):
        layer((VALUES, OFFSETS))
    assert len(layer.table) == 0


def test_a_layer_without_a_name_is_called_by_its_size():
    """Errors identify an unnamed layer by its size, and a named layer by its name."""
    layer = sparsekit.Embedding(2, 4)
    with pytest.raises(TableFullError, match=r"^Embedding_\d+ \(2 rows of 4\): the table on"):
        layer(torch.tensor([1, 2, 3]))
    with pytest.raises(TypeError, match=r"^Embedding_\d+ \(2 rows of 4\): "):
        layer(torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"^EmbeddingBag_\d+ \(3 rows of 5\): on_full must be"):
        sparsekit.EmbeddingBag(3, 5, on_full="shrink")
    assert re.match(r"name='Embedding_\d+', capacity=2, ", layer.extra_repr())
    assert sparsekit.Embedding(2, 4, name="a (b)").name == "a (b)"


def test_threads_that_insert_at_a_time_are_told_into_which_layers():
    refusal = RuntimeError("group_find_or_insert_: another thread is inserting into this table")
    layers = [sparsekit.Embedding(2, 4, name=name) for name in ("users", "movies")]
    with pytest.raises(RuntimeError, match=r"^users, movies: group_find.* another thread"):
        explain_refusal(refusal, [], layers)
    other = RuntimeError("out of memory")
    with pytest.raises(RuntimeError) as raised:
        explain_refusal(other, [], [])
    assert raised.value is other
