"""Tests of the output, files and errors of ``sparsekit table``."""

import json
import math
import re

import pytest
import torch

import sparsekit
from sparsekit import checkpoint, cli, optim
from sparsekit.checkpoint.table_figures import table_figures

ODD = ["a b", " c", "tab\there", "$x_1$", "ü"]


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Save two trained tables, one of them with scores, and rows without an update."""
    monkeypatch.chdir(tmp_path)
    users = sparsekit.Embedding(500, 4, name="users", on_full="evict", score="lfu")
    films = sparsekit.Embedding(9, 2, name="films", use_hashtable=False)
    model = torch.nn.ModuleDict({"users": users, "films": films})
    optimizer = optim.LazyAdam(model.parameters())
    for last in (20, 10, 10, 1):
        loss = users(torch.arange(last)).square().sum() + films(torch.arange(6)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    users(torch.tensor([-1]))
    with torch.no_grad():
        users.weight[3] = math.nan
    checkpoint.save(model, "a", optimizer, step=4)
    return tmp_path


def run(capsys, *arguments):
    assert cli.main(["table", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def error_of(capsys, *arguments):
    try:
        status = cli.main(["table", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    return error


def test_output(saved, capsys):
    lines = run(capsys, "a")
    assert lines[:15] == [
        "table  rows   of    load  dead  zero  nan, inf  median norm  in files",
        "users    21  500    4.2%     1     0         1        1.523   1.3 KiB",
        "films     9    9  100.0%     3     0         0        1.324     288 B",
        "",
        "users: dim 4, float32, hash table",
        "  rows    21 of 500",
        "  keys    from -1 to 19",
        "  norms   lowest 0.7709, 1% 0.7709, 10% 0.7729, median 1.523, 90% 2.102, 99% 2.113, "
        "highest 2.54",
        "  ages    lowest 0, 1% 0, 10% 2, median 2, 90% 4, 99% 4, highest 4 (lookups; clock 5)",
        "  scores  lowest 1, 1% 1, 10% 1, median 1, 90% 3, 99% 3, highest 4 "
        "(LFU: counts before halving)",
        "  nan     1 vector(s): 3",
        "  dead    1 row(s) never updated, 4.8%: -1",
        "  alike   0 of 19 compared vectors are equal to another, 0 have a cosine of 0.999 or more "
        "with another",
        "          cosine 0.957017: 19 and 8",
        "          cosine 0.924097: 10 and 19",
    ]
    assert lines[18:26] == [
        "  bytes         in files  of rows in use  reserved",
        "    index          168 B        10.5 KiB  10.5 KiB",
        "    vectors        336 B           336 B   7.8 KiB",
        "    scores         168 B           168 B   3.9 KiB",
        "    exp_avg        336 B           336 B   7.8 KiB",
        "    exp_avg_sq     336 B           336 B   7.8 KiB",
        "  ! 1 vector(s) with nan or inf: 3",
        "",
    ]


def test_run_folders_of_training_commands(tmp_path, capsys, monkeypatch):
    """The folder of --checkpoint stands for its newest checkpoint, that of --save for its model."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{i % 9}\t{i % 7}\t{i % 2}\n" for i in range(40)]
    (tmp_path / "clicks").write_text("user\titem\tclick\n" + "".join(lines))
    options = ["--data.format=tsv", "--data.label=click", "--data.sparse=user,item"]
    command = ["train", "dlrm", "--data=clicks", *options, "--ranks=1", "--epochs=2"]
    assert cli.main([*command, "--checkpoint=run", "--save=model"]) == 0
    capsys.readouterr()
    ran, model = run(capsys, "run"), run(capsys, "model")
    (tmp_path / "model/extra").mkdir()
    newest = checkpoint.latest(tmp_path / "run")
    assert ran == run(capsys, str(newest))
    assert [line.split()[:3] for line in ran[:3]] == [line.split()[:3] for line in model[:3]]
    assert "LazyAdam" not in "".join(ran)
    assert any(line.startswith("    exp_avg") for line in ran)
    assert not any(line.startswith("    exp_avg") for line in model)


def test_expected_collisions_of_hashed_keys(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    layer = sparsekit.Embedding(3000, 1, name="words")
    layer(torch.as_tensor(sparsekit.hashing.xxh64([f"word {i}" for i in range(3000)])))
    checkpoint.save(layer, "a")
    (line,) = [line for line in run(capsys, "a") if line.startswith("  keys")]
    assert line.endswith("; if 64-bit hashes, 2.4e-13 pairs of ids with one key are expected")


def test_json_has_all_figures(saved, capsys):
    run(capsys, "a", "--json", "f.json", "--table", "users")
    found = json.loads((saved / "f.json").read_text(), parse_constant=pytest.fail)
    assert list(found) == ["users"]
    (figures,) = table_figures("a", ["users"])
    users = found["users"]
    assert users["rows"] == figures.rows == 21
    assert users["load"] == 21 / 500
    assert users["dead"] == {"rows": 1, "keys": [-1]}
    assert users["nan"] == {"rows": 1, "keys": [3]}
    assert users["norms"]["quantiles"]["0.5"] == figures.norms.quantiles[0.5]
    assert users["scores"]["quantiles"] == {
        "0.0": 1, "0.01": 1, "0.1": 1, "0.5": 1, "0.9": 3, "0.99": 3, "1.0": 4,
    }  # fmt: skip
    assert users["ages"]["quantiles"]["1.0"] == 4
    assert users["parts"]["vectors"] == {"in_files": 21 * 16, "in_memory": [21 * 16, 500 * 16]}
    assert users["findings"] == ["1 vector(s) with nan or inf: 3"]


def test_tables_are_chosen_by_name(saved, capsys):
    lines = run(capsys, "a", "--table", "films", "--table", "users")
    assert [line.split()[0] for line in lines[1:3]] == ["films", "users"]
    lines = run(capsys, "a", "--table", "films", "--modulo", "10")
    assert "  keys    from 0 to 8; if hashes modulo N, 88.89% of the ids share a key" in lines


@pytest.mark.parametrize("tables", [["users"], ["films"], None])
def test_plot_is_a_picture(saved, capsys, tables):
    pytest.importorskip("matplotlib")
    chosen = [word for name in tables or () for word in ("--table", name)]
    run(capsys, "a", "--plot", "a.png", *chosen)
    content = (saved / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    # Norms, ages and scores of each table; films has norms alone.
    assert (width > 1500) == (tables != ["films"])
    assert (height > 500) == (tables is None)


def test_odd_names_and_tables_without_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    layers = torch.nn.ModuleDict({name: sparsekit.Embedding(9, 3, name=name) for name in ODD})
    layers[" c"](torch.tensor([1]))
    checkpoint.save(layers, "odd")
    lines = run(capsys, "odd", "--json", "f.json")
    assert lines[1].startswith("a b ")
    assert lines[2].startswith("' c' ")
    assert lines[3].startswith(r"'tab\there' ")
    assert list(json.loads((tmp_path / "f.json").read_text())) == ODD
    pytest.importorskip("matplotlib")
    run(capsys, "odd", "--plot", "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_errors_are_one_line(saved, capsys):
    assert "aa: No such file or directory; did you mean a?" in error_of(capsys, "aa")
    error = error_of(capsys, "a", "--table", "user")
    assert error == "sparsekit: a: no table named user; did you mean users?; tables: users, films\n"
    error = error_of(capsys, "a", "--modulo", "15")
    assert error == "sparsekit: a: modulo 15: table users has the key -1\n"
    error = error_of(capsys, "a", "--modulo", "1")
    assert "--modulo: 1 is not in [2, " in error
    (saved / "empty").mkdir()
    assert "sparsekit: empty: is neither a checkpoint nor a folder that" in error_of(
        capsys, "empty"
    )
    for option in ("--json", "--plot"):
        assert f"{option} no/f: cannot write into" in error_of(capsys, "a", option, "no/f")
    error = error_of(capsys, "a", "--json", "f", "--plot", "./f")
    assert "--plot ./f: is the file of --json" in error


def test_damaged_files_are_named(saved, capsys):
    file = saved / "a/table-0001-rank-0000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"\x99")
    assert re.search(r"a/table-0001-rank-0000\.safetensors: is damaged: ", error_of(capsys, "a"))
    file.unlink()
    assert re.search(r"a/table-0001-rank-0000\.safetensors: ", error_of(capsys, "a"))
    (saved / "a/manifest.crc32").write_text("00000000")
    assert "manifest" in error_of(capsys, "a")
    assert "a/manifest.json: " in error_of(capsys, "a/manifest.json")
