"""Tests of the output, exit codes and options of ``sparsekit checkpoint``."""

import contextlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint.models import saved_chain

import sparsekit
from sparsekit import checkpoint, cli, optim
from sparsekit.cli import checkpoint as command
from sparsekit.cli.dispatch import make_parser


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Save a model with optimizers and a step, then without them and with one more key."""
    monkeypatch.chdir(tmp_path)
    users = sparsekit.Embedding(2000, 3, name="users")
    rows = sparsekit.Embedding(9, 2, name="rows", use_hashtable=False)
    model = torch.nn.ModuleDict({"users": users, "rows": rows})
    optimizers = [optim.Adagrad(users.parameters()), optim.SGD(rows.parameters())]
    (users(torch.tensor([5, 6])).sum() + rows(torch.tensor([1])).sum()).backward()
    for optimizer in optimizers:
        optimizer.step()
    checkpoint.save(model, "a", optimizers, step=1234)
    users(torch.tensor([8]))
    checkpoint.save(model, "b")
    users(torch.tensor([9]))
    checkpoint.save(model, "zero", step=0)
    return tmp_path


def run(capsys, *arguments, status=0):
    assert cli.main(["checkpoint", *arguments]) == status
    return capsys.readouterr().out.splitlines()


def test_inspect(saved, capsys):
    first, *lines = run(capsys, "inspect", "a")
    size = sum(file.stat().st_size for file in saved.glob("a/*.safetensors"))
    version = sparsekit.__version__
    assert first == f"a: step 1,234, 1 rank(s), {size:,} bytes, sparsekit {version}"
    assert lines == [
        "  users: 2 rows, dim 3, float32, hash table, placement hash, capacity 2,000",
        "    Adagrad: sum",
        "  rows: 9 rows, dim 2, float32, row numbers, placement modulo, capacity 9",
        "    SGD: nothing for each row",
    ]
    assert run(capsys, "inspect", "zero")[0].startswith("zero: step 0, 1 rank(s), ")
    first, *lines = run(capsys, "inspect", "b")
    assert first.startswith("b: no step, 1 rank(s), ")
    assert [line.split(", ")[0] for line in lines] == ["  users: 3 rows", "  rows: 9 rows"]


def test_files_that_are_made_are_named(saved, capsys):
    place = f"{saved}/"
    assert run(capsys, "verify", "b") == ["b: whole"]
    assert run(capsys, "reshard", "a", "c", "--world", "3") == [f"{place}c: for 3 rank(s)"]
    line = run(capsys, "inspect", "c")[1]
    assert re.fullmatch(r"  users: \d \+ \d \+ \d rows, dim 3, .* capacity 2,000", line)
    assert run(capsys, "compact", "c", "d") == [f"{place}d: for 3 rank(s)"]
    files = run(capsys, "export", "a", "e", "--format", "npz")
    made = [saved / "e/rows.npz", saved / "e/users.npz"]
    assert files == [f"{file}: {file.stat().st_size:,} bytes" for file in made]


def test_diff_ends_with_1_where_there_is_a_difference(saved, capsys):
    found = run(capsys, "diff", "a", "b", status=1)
    assert found[0].startswith("users: states {'sum': ")
    assert found[1:] == ["rows: 9 rows are the same"]
    found = run(capsys, "diff", "b", "zero", status=1)
    assert found[0] == "users: 3 rows are the same, 0 only in b, 1 only in zero"
    assert run(capsys, "diff", "a", "a") == [
        "users: 2 rows are the same", "rows: 9 rows are the same"
    ]  # fmt: skip


def test_forget_removes_keys_from_all_checkpoints_of_a_folder(tmp_path, capsys):
    layer = sparsekit.Embedding(9, 3, name="users")
    other = sparsekit.Embedding(9, 3, name="films")
    model = torch.nn.ModuleDict({"users": layer, "films": other})
    keep = checkpoint.Checkpoints(tmp_path, keep=9, complete_every=9)
    keys = torch.tensor([5, -6, 7, -(2**63)])
    for step in range(3):
        other(keys)
        layer(keys[: step + 2])
        keep.save(step, model)
    keep.close()
    traces = [row.numpy().tobytes() for row in layer.weight.detach()[:3]]

    def found():
        contents = b"".join(file.read_bytes() for file in tmp_path.rglob("*.safetensors"))
        return [trace in contents for trace in traces]

    assert found() == [True, True, True]
    options = ["--keys", "-6", "7", "8", "--table"]
    lines = run(capsys, "forget", str(tmp_path), *options, "users")
    assert lines == [f"{tmp_path}: 2 row(s) removed, from all files together"]
    assert found() == [True, False, False]
    for step, rows in enumerate((1, 1, 2)):
        model = torch.nn.ModuleDict(
            {name: sparsekit.Embedding(9, 3, name=name) for name in ("users", "films")}
        )
        checkpoint.load(model, tmp_path / f"step-{step:012d}")
        assert len(model["users"].table) == rows
        assert len(model["films"].table) == 4
    assert cli.main(["checkpoint", "forget", str(tmp_path), *options, "nobody"]) == 2
    assert "no table named nobody; tables: users, films" in capsys.readouterr().err


def test_a_bar_counts_all_bytes_that_are_read(saved, capsys, monkeypatch):
    bars, done = [], []

    @contextlib.contextmanager
    def progress(title, total, stream, unit):
        assert stream is sys.stderr
        bars.append((title, total, unit))
        done.append(0)

        def update(count):
            done[-1] += count

        yield type("Bar", (), {"update": staticmethod(update)})

    monkeypatch.setattr(command, "Progress", progress)
    a, b = (
        sum(file.stat().st_size for file in saved.glob(f"{name}/*.safetensors")) for name in "ab"
    )
    run(capsys, "verify", "a")
    run(capsys, "diff", "a", "b", status=1)
    run(capsys, "reshard", "a", "c", "--world", "1")
    run(capsys, "export", "a", "e", "--format", "npz")
    assert bars == [("verify", total, "bytes") for total in (a, a + b, a, a)]
    assert done == [total for _, total, _ in bars]
    saved_chain(saved / "run")
    run(capsys, "verify", "run")
    total = sum(file.stat().st_size for file in saved.glob("run/*/*.safetensors"))
    assert (bars.pop(), done.pop()) == (("verify", total, "bytes"), total)
    run(capsys, "import", "e", "f", "--from", "npz")
    assert bars[-1] == ("import", 4 * (2 * 3 + 9 * 2), "bytes")
    assert done[-1] == bars[-1][1]


def test_exported_files_are_listed_by_name(saved, capsys, monkeypatch):
    made = [Path(name) for name in ("b.npz", "a.npz", "c.npz")]
    for file in made:
        file.touch()
    monkeypatch.setattr(command, "export", lambda *_: SimpleNamespace(iterdir=lambda: made))
    lines = run(capsys, "export", "a", "e", "--format", "npz")
    assert lines == [f"{name}.npz: 0 bytes" for name in "abc"]


def test_import_says_what_it_has_made(saved, capsys):
    run(capsys, "export", "a", "e", "--format", "npz")
    lines = run(capsys, "import", "e", "f", "--from", "npz", "--rename", "users=u")
    assert lines[:-1] == ["rows: 9 rows, dim 2", "users: 2 rows, dim 3; left behind: sum"]
    assert lines[-1] == f"{saved}/f: load it with strict=False, and without optimizers"
    tables = [line.partition(",")[0] for line in run(capsys, "inspect", "f")[1:]]
    assert tables == ["  rows: 9 rows", "  u: 2 rows"]


def test_the_largest_number_of_ranks():
    args = make_parser().parse_args(["checkpoint", "reshard", "a", "b", "--world", "4096"])
    assert args.world == 4096


def test_dimensions_and_names_of_tables():
    assert command._dim("7") == ("", 7)
    assert command._dim("a=b=1") == ("a=b", 1)
    assert command._dim(str(2**24 - 1)) == ("", 2**24 - 1)
    assert command._rename("a=b=c") == ("a=b", "c")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--dim", value) for value in ("0", "-1", "a=", "a", "a=0", str(2**24), "1.5", "²")),
        *(("--rename", value) for value in ("a", "a=", "=b", "=")),
    ],
)
def test_odd_dimensions_and_names_are_refused(option, value, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["checkpoint", "import", "x", "y", "--from", "sok1", f"{option}={value}"])
    said = f"{value!r} is {'neither N nor TABLE=N' if option == '--dim' else 'not TABLE=LAYER'}"
    assert said in capsys.readouterr().err
