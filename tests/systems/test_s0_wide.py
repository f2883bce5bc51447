"""S0, a wide network on a huge sparse matrix of hashed features, meets its requirements.

Layers and optimizers have separate test suites.
"""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from peak_memory import forget_peak, peak
from split_hash import columns_of, expected_columns
from xxh64_oracle import oracle, unsigned

import sparsekit
from sparsekit import optim
from sparsekit.hashing import SplitHashEncoder
from sparsekit.models import WideModel
from sparsekit.recipes.wide.model import select_rows
from sparsekit.train import Trainer
from sparsekit.train.metrics import gather

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")

LENGTHS = {"day": 7, "city": 1000, "item": 100_000}


def some_data(n):
    draw = np.random.default_rng(0)
    return {name: draw.integers(0, high, n) for name, high in LENGTHS.items()}


@pytest.mark.parametrize(
    ("value", "length", "w", "chunks"),
    [
        ("3", 7, 8, (6, 2, 6, 4)),
        ("item_42", 100_000, 317, (309, 155, 125, 5)),
        ("", 7, 8, (6, 7, 0, 1)),
    ],
)
def test_the_known_answers(value, length, w, chunks):
    encoder = SplitHashEncoder({"a": length})
    assert encoder.width == 4 * w
    expected = [k * w + chunk for k, chunk in enumerate(chunks)]
    assert columns_of(encoder, {"a": [value]}).tolist() == [expected]
    one_hot = columns_of(SplitHashEncoder({"a": length}, 1), {"a": [value]})
    assert one_hot.item() == unsigned(value) % (4 * w)


@pytest.mark.parametrize(("length", "lost"), [(64, 1), (10_000, 1), (100_000, 0), (1_000_000, 2)])
def test_the_known_numbers_of_distinct_tuples(length, lost):
    (found,) = SplitHashEncoder({"a": length}).collisions({"a": pa.array(map(str, range(length)))})
    assert (found.values, found.codes, found.observed) == (length, length - lost, lost)
    assert found.expected == pytest.approx(0.5, rel=0.03)


def test_a_code_does_not_depend_on_neighbours_or_frame():
    encoder = SplitHashEncoder({"a": 1000})
    alone = columns_of(encoder, {"a": ["x"]})[0]
    for frame in (["x", "y"], ["a"] * 5 + ["x"], [None, 7, "x", b"\xff"], np.array(["x", "yz"])):
        row = columns_of(encoder, {"a": frame, "b": [0.5]})[list(frame).index("x")]
        assert torch.equal(row, alone)


def test_a_code_does_not_depend_on_pythonhashseed():
    values = ["3", 3, "item_42", "é", b"\xff", None, 2**80]
    program = (
        "from sparsekit.hashing import SplitHashEncoder as E, xxh64; "
        "encoder = E({'a': 50, 'b': 9000}); "
        "print(encoder.encode({'b': ['x', 3], 'a': [None, b'y']}, to='bags')[0].tolist()); "
        f"print(xxh64({values!r}).tolist())"
    )
    path = [str(Path(sparsekit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [("x", None), (3, b"y")]
    expected = [
        column
        for b, a in rows
        for column in expected_columns(a, 50) + [32 + c for c in expected_columns(b, 9000)]
    ]
    columns, codes = map(json.loads, run.stdout.splitlines())
    assert columns == expected
    assert codes == [oracle(value) for value in values]


def test_int_str_bytes_and_none_follow_the_rules():
    columns = columns_of(SplitHashEncoder({"a": 10_000}), {"a": [3, "3", b"3", None, "", "None"]})
    assert columns[0].equal(columns[1])
    assert columns[0].equal(columns[2])
    assert columns[3].equal(columns[4])
    assert not columns[3].equal(columns[5])


@pytest.mark.parametrize("splits", [4, 1])
@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("signed", [False, True])
def test_csr_has_exactly_its_ones_in_each_row_and_sorted_indices(n, splits, signed):
    encoder = SplitHashEncoder(LENGTHS, splits, signed=signed)
    matrix = encoder.encode(some_data(n), to="scipy")
    assert matrix.shape == (n, encoder.width)
    assert np.diff(matrix.indptr).tolist() == [3 * splits] * n
    assert matrix.data.dtype == np.float32
    assert (abs(matrix.data) == 1).all()
    assert signed or (matrix.data == 1).all()
    assert (np.diff(matrix.indices.reshape(n, 3 * splits)) > 0).all()
    matrix.check_format(full_check=True)
    tensor = encoder.encode(some_data(n), to="torch")
    parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    torch.sparse_csr_tensor(*parts, tensor.shape, check_invariants=True)
    for part, of_scipy in zip(parts, (matrix.indptr, matrix.indices, matrix.data), strict=True):
        assert part.tolist() == of_scipy.tolist()
    assert tensor.shape == matrix.shape


# The matrix and the layer


@pytest.mark.parametrize("to", ["torch", "scipy"])
@pytest.mark.parametrize("signed", [False, True])
def test_csr_goes_straight_into_the_layer_and_equals_the_dense_product(to, signed):
    encoder = SplitHashEncoder(LENGTHS, signed=signed)
    model = WideModel(encoder)
    matrix = encoder.encode(some_data(50), to=to)
    dense = torch.from_numpy(encoder.encode(some_data(50), to="scipy").toarray()).double()
    table = model.weights().double()
    assert (model.embedding(matrix)[:, 0] - dense @ table).abs().max() < 1e-6
    expected = torch.nn.functional.linear(dense @ table, *(p.double() for p in head_of(model)))
    assert (model(matrix) - expected[:, 0]).abs().max() < 1e-6


def head_of(model):
    return model.head.weight, model.head.bias


@pytest.mark.parametrize("optimizer", ["adam", "ftrl"])
def test_no_dense_matrix_is_ever_made(optimizer):
    """No dense matrix is made between the values and a step of the optimizer.

    A dense 4,000 x 262,144 matrix would take 4.2 GB, or 1 GB as bool. The weights and their states
    take 165 MB.
    """
    model = WideModel(SplitHashEncoder({"a": 2**32}))
    steps = model.optimizer(optimizer, 4000)

    def step(values, labels):
        steps.zero_grad()
        matrix = select_rows(model.encode({"a": values}), torch.arange(len(values)))
        model.losses(matrix, labels).mean().backward()
        steps.step()

    assert model.encoder.width == 262_144
    step(np.arange(2), torch.ones(2))  # creates the optimizer's states
    before = forget_peak()
    step(np.arange(4000), torch.ones(4000))
    assert peak() - before < 100 * 2**20


# Ranks


def scores_and_steps(rank, batch, optimizer):
    """Return a batch's scores before and after 3 steps on it; the batch is split among ranks."""
    columns = some_data(batch)
    labels = torch.arange(batch) % 2.0
    model = WideModel(SplitHashEncoder(LENGTHS), seed=4)
    matrix = model.encode(columns)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    mine = torch.arange(batch).tensor_split(ranks)[rank]

    def scores():
        with torch.no_grad():
            return gather(model(select_rows(matrix, mine)))

    before = scores()
    trainer = Trainer(
        model,
        lambda _, part: (model.losses(select_rows(matrix, part[0]), part[1]), 0.0),
        [model.optimizer(optimizer, batch)],
        stream=io.StringIO(),
    )
    trainer.fit((torch.arange(batch), labels), epochs=3, batch_size=batch)
    return before, scores(), model.weights().detach()


@pytest.mark.parametrize("optimizer", ["adam", "ftrl"])
@pytest.mark.parametrize("batch", [1, 2, 31, 32])
def test_any_batch_on_ranks_gives_that_many_finite_rows_equal_to_one_ranks(ranks, batch, optimizer):
    one = scores_and_steps(0, batch, optimizer)
    assert not torch.equal(one[0], one[1])
    for results in ranks(scores_and_steps, batch, optimizer):
        for found, expected in zip(results, one, strict=True):
            assert found.isfinite().all()
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
        assert results[0].shape == results[1].shape == (batch,)


# FTRL


class DenseFtrl:
    """FTRL on all weights in each step, in numpy: McMahan et al. 2013 with TensorFlow's l2."""

    def __init__(self, weights, lr, l1, l2, accumulator=0.1):
        self.w = weights.double().numpy().copy()
        self.lr, self.l1, self.l2 = lr, l1, l2
        self.n, self.z = np.full_like(self.w, accumulator), np.zeros_like(self.w)

    def step(self, gradient):
        g = gradient.double().numpy()
        n = self.n + g * g
        self.z += g - (np.sqrt(n) - np.sqrt(self.n)) / self.lr * self.w
        self.n = n
        shrunk = np.sign(self.z) * self.l1 - self.z
        moved = shrunk / (np.sqrt(n) / self.lr + 2 * self.l2)
        self.w = np.where(np.abs(self.z) <= self.l1, 0.0, moved)


def ftrl_case(initializer):
    """Return a layer, a matrix of 400 rows, and 50 batches: rows and gradients of the output."""
    encoder = SplitHashEncoder({"day": 7, "item": 5000})
    draw = np.random.default_rng(3)
    columns = {"day": draw.integers(0, 7, 400), "item": draw.integers(0, 60, 400)}
    matrix = encoder.encode(columns)
    layer = sparsekit.DistributedEmbedding(
        "sum", encoder.width, 3, 1, use_hashtable=False, embedding_initializer=initializer, seed=1
    )
    generator = torch.Generator().manual_seed(5)
    # The first two output columns have gradients of opposite signs, and the last has only noise.
    pull = torch.tensor([0.5, -0.5, 0.0])
    steps = []
    for _ in range(50):
        rows = torch.randint(0, 400, (8,), generator=generator)
        steps.append((rows, 0.3 * torch.randn(8, 3, generator=generator) + pull))
    return layer, matrix, steps


def weights_of(layer, matrix):
    return layer.vectors(torch.arange(matrix.shape[1])).detach()


def test_sparse_ftrl_equals_a_dense_reference_over_50_steps():
    # Start from zeros, since the dense method zeroes weights that have had no gradient yet.
    layer, matrix, steps = ftrl_case(sparsekit.nn.Constant(0.0))
    optimizer = optim.Ftrl(layer.parameters(), lr=0.2, l1=1.0, l2=1.0)
    expected = DenseFtrl(weights_of(layer, matrix), 0.2, 1.0, 1.0)
    dense = matrix.to_dense()
    for rows, gradient in steps:
        optimizer.zero_grad()
        layer(select_rows(matrix, rows))[:, 0].backward(gradient)
        optimizer.step()
        expected.step(dense[rows].T @ gradient)
        found = weights_of(layer, matrix)
        torch.testing.assert_close(found.double(), torch.from_numpy(expected.w), rtol=0, atol=1e-5)
    assert len(steps) == 50
    assert (found != 0).any()


def test_ftrl_leaves_untouched_rows_bit_identical():
    layer, matrix, steps = ftrl_case(sparsekit.nn.Uniform(-0.5, 0.5))
    optimizer = optim.Ftrl(layer.parameters(), lr=0.2, l1=1.0, l2=1.0)
    for rows, gradient in steps:
        before = weights_of(layer, matrix)
        batch = select_rows(matrix, rows)
        optimizer.zero_grad()
        layer(batch)[:, 0].backward(gradient)
        optimizer.step()
        touched = torch.zeros(matrix.shape[1], dtype=torch.bool)
        touched[batch.col_indices()] = True
        after = weights_of(layer, matrix)
        assert torch.equal(after[~touched].view(torch.int32), before[~touched].view(torch.int32))
        assert (after[touched] != before[touched]).any()


def test_l1_of_ftrl_gives_exact_zeros():
    zeros = {}
    for l1 in (0.0, 1.0):
        layer, matrix, steps = ftrl_case(sparsekit.nn.Uniform(-0.5, 0.5))
        optimizer = optim.Ftrl(layer.parameters(), lr=0.2, l1=l1, l2=1.0)
        for rows, gradient in steps:
            optimizer.zero_grad()
            layer(select_rows(matrix, rows))[:, 0].backward(gradient)
            optimizer.step()
        touched = torch.cat([select_rows(matrix, rows).col_indices() for rows, _ in steps])
        zeros[l1] = (weights_of(layer, matrix)[touched.unique()] == 0).double().mean(0).tolist()
    assert zeros[0.0] == [0, 0, 0]
    # The first two columns have a signal, and the third only noise.
    assert min(zeros[1.0]) > 0
    assert zeros[1.0][2] > max(0.5, 1.5 * max(zeros[1.0][:2]))


# Files


def test_save_and_load_round_trips(tmp_path):
    lengths = {"day": 7, "ïtem": 1000}
    encoder = SplitHashEncoder(lengths, 1, salts={"ïtem": 2**64 - 1}, signed=True)
    encoder.save(tmp_path / "encoder.json")
    loaded = SplitHashEncoder.load(tmp_path / "encoder.json", lengths)
    assert vars(loaded) == vars(encoder)
    assert json.loads((tmp_path / "encoder.json").read_text())["splits"] == 1


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"day": 7, "item": 1001}, "feature 'item' was saved with length 1000, but .* has 1001"),
        ({"item": 1000, "day": 7}, r"features \['day', 'item'\], in this order, but"),
        ({}, r"feature_lengths has \[\]"),
        ({"day": 7}, r"feature_lengths has \['day'\]"),
    ],
)
def test_changed_feature_lengths_give_a_clear_error(tmp_path, lengths, message):
    SplitHashEncoder({"day": 7, "item": 1000}).save(tmp_path / "encoder.json")
    with pytest.raises(ValueError, match=rf"encoder\.json: .*{message}"):
        SplitHashEncoder.load(tmp_path / "encoder.json", lengths)
