"""diff reports each kind of difference between two checkpoints, in both directions."""

import pytest
import torch

import sparsekit
from sparsekit import checkpoint, cli, optim
from sparsekit.checkpoint import CheckpointError, Checkpoints
from sparsekit.checkpoint.diff import Difference, TableDifference

from .models import made, train


@pytest.mark.parametrize(
    "fields", [{"only_a": 1}, {"only_b": 1}, {"changed": {"vectors": (1, 0.5)}}, {"shape": "dim"}]
)
def test_each_difference_of_a_table_is_one(fields):
    assert TableDifference(**fields)
    assert not TableDifference(same=5)
    assert Difference([], [], {"a": TableDifference(same=5), "b": TableDifference(**fields)}, [])


@pytest.mark.parametrize("name", ["only_a", "only_b", "dense"])
def test_each_difference_of_a_checkpoint_is_one(name):
    nothing = {"only_a": [], "only_b": [], "tables": {"t": TableDifference(same=1)}, "dense": []}
    assert not Difference(**nothing)
    assert Difference(**nothing | {name: ["x"]})


def saved(path, dim=2, dtype=torch.float32, stepped=False, buffer=None, name="t"):
    model = torch.nn.ModuleDict({name: sparsekit.Embedding(9, dim, name="t", dtype=dtype)})
    model[name].assign(torch.arange(3), torch.ones(3, dim, dtype=dtype))
    optimizer = optim.SGD(model[name].parameters(), lr=0.1, momentum=0.9) if stepped else None
    if stepped:
        model[name](torch.arange(3)).sum().backward()
        optimizer.step()
    if buffer is not None:
        model.register_buffer("buffer", buffer)
    return checkpoint.save(model, path, optimizer)


SHAPES = {
    "dim 2 and 4": {"dim": 4},
    "dtype float32 and float64": {"dtype": torch.float64},
    "states {} and {'momentum_buffer'": {"stepped": True},
}


@pytest.mark.parametrize("text", SHAPES)
def test_tables_that_differ_as_such(tmp_path, capsys, text):
    one, other = saved(tmp_path / "a"), saved(tmp_path / "b", **SHAPES[text])
    found = checkpoint.diff(one, other)
    assert found.tables["t"].shape.startswith(text)
    assert found.tables["t"].same == 0
    assert cli.main(["checkpoint", "diff", str(one), str(other)]) == 1
    assert f"t: {text}" in capsys.readouterr().out


def test_dense_tensors_of_the_same_bits(tmp_path):
    """Tensors with equal bytes differ if their dtype or shape does."""
    tensors = [torch.zeros(6), torch.zeros(6, dtype=torch.int32), torch.zeros(2, 3)]
    paths = [saved(tmp_path / str(i), buffer=each) for i, each in enumerate(tensors)]
    for one in paths:
        for other in paths:
            found = checkpoint.diff(one, other)
            assert found.dense == (["module.buffer"] if one != other else [])
            assert bool(found) == (one != other)
    without = saved(tmp_path / "without")
    assert checkpoint.diff(paths[0], without).only_a == ["module.buffer"]
    assert checkpoint.diff(without, paths[0]).only_b == ["module.buffer"]


def test_tables_are_those_of_the_newest_of_a_chain(tmp_path):
    """A chain has the tables of its newest checkpoint, changed or not, and no others."""
    keep = Checkpoints(tmp_path, complete_every=3)
    layers = {name: sparsekit.Embedding(9, 2, name=name) for name in "abc"}
    paths = []
    for step, names in enumerate(("ab", "bc")):
        model = torch.nn.ModuleDict({name: layers[name] for name in names})
        model["b"].assign(torch.tensor([step]), torch.ones(1, 2))
        paths.append(keep.save(step, model))
    keep.close()
    assert set(checkpoint.diff(paths[1], paths[1]).tables) == {"b", "c"}
    for pair, only in ((paths, "ac"), (paths[::-1], "ca")):
        found = checkpoint.diff(*pair)
        assert (found.only_a, found.only_b) == ([only[0]], [only[1]])
        assert set(found.tables) == {"b"}


def test_states_of_optimizers_are_named_by_optimizer_and_parameter(tmp_path):
    model, optimizers = made()
    train(model, optimizers, 0, 1)
    one = checkpoint.save(model, tmp_path / "a", optimizers)
    optimizers[1].state[model.out.bias]["exp_avg"] += 1
    other = checkpoint.save(model, tmp_path / "b", optimizers)
    assert checkpoint.diff(one, other).dense == ["optimizers.1.state.out.bias.exp_avg"]


def test_names_in_words(tmp_path, capsys):
    one, other = saved(tmp_path / "a", name="u"), saved(tmp_path / "b", name="v")
    assert cli.main(["checkpoint", "diff", str(one), str(other)]) == 1
    said = capsys.readouterr().out
    assert f"only in {one}: u\n" in said
    assert f"only in {other}: v\n" in said


@pytest.mark.parametrize("odd", [0, 3, 5])
def test_a_difference_that_is_nan_stays_so(tmp_path, monkeypatch, odd):
    """A NaN in any piece is reported; without a NaN, the largest difference is reported."""
    monkeypatch.setitem(checkpoint.reshard.__globals__, "PIECE", 16)  # two rows per piece
    values = torch.zeros(6, 2)
    for number in (0, 1):
        layer = sparsekit.Embedding(9, 2, name="t")
        layer.assign(torch.arange(6), values)
        checkpoint.save(layer, tmp_path / str(number))
        values[:, 1] = torch.tensor([1.0, -7.0, 2.0, 3.0, 4.0, 5.0])
    assert checkpoint.diff(tmp_path / "0", tmp_path / "1").tables["table"].changed == {
        "vectors": (6, 7.0)
    }
    values[odd, 0] = float("nan")
    layer.assign(torch.arange(6), values)
    checkpoint.save(layer, tmp_path / "2")
    count, most = checkpoint.diff(tmp_path / "0", tmp_path / "2").tables["table"].changed["vectors"]
    assert count == 6
    assert most != most


def test_a_file_that_goes_while_it_is_compared(tmp_path, monkeypatch):
    one, other = saved(tmp_path / "a"), saved(tmp_path / "b", buffer=torch.ones(1))
    gather = checkpoint.diff.__globals__["_Rows"].gather

    def vanish(*arguments):
        (one / "table-0000-rank-0000.safetensors").unlink()
        return gather(*arguments)

    monkeypatch.setattr(checkpoint.diff.__globals__["_Rows"], "gather", vanish)
    with pytest.raises(CheckpointError, match=r"table-0000-rank-0000\.safetensors: cannot be read"):
        checkpoint.diff(one, other)


def test_tables_without_a_common_key(tmp_path):
    for number, keys in enumerate(([1], [5, 6])):
        layer = sparsekit.Embedding(9, 2, name="t")
        layer.assign(torch.tensor(keys), torch.ones(len(keys), 2))
        checkpoint.save(layer, tmp_path / str(number))
    found = checkpoint.diff(tmp_path / "0", tmp_path / "1").tables["table"]
    assert (found.same, found.only_a, found.only_b) == (0, 1, 2)
