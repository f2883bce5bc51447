"""``sparsekit capacity`` predicts what tables hit, and divides memory among them."""

import json
import os
import re
import threading

import pytest
import torch

import sparsekit
from sparsekit import cli
from sparsekit.capacity.report import plot
from sparsekit.data import write_criteo_sample


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Create a folder with a file of users and films, in which commands run."""
    keys = torch.randint(400, (3000, 2), generator=torch.Generator().manual_seed(0)).square() // 400
    lines = [f"{user},{film} {film + 1},{film % 9},{user % 2}" for user, film in keys.tolist()]
    (tmp_path / "seen.csv").write_text("\n".join(["user,films,price,click", *lines]) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys, command):
    """Run a command, and return what it has printed."""
    assert cli.main(["capacity", *command.split()]) == 0
    return capsys.readouterr().out


READ = "seen.csv --label click --dense price --int user --batch-size 64"


def test_json_beside_measured(folder, capsys):
    out = said(capsys, f"{READ} --rows 150,250 --ttl 2,9 --measure --ranks 2 --json x.json")
    found = json.loads((folder / "x.json").read_text())
    assert list(found) == ["ranks", "features"]
    assert list(found["features"]) == ["user", "films"]
    user = found["features"]["user"]
    assert (user["lookups"], user["rate"], user["distinct"]) == (47, 1, user["distinct"])
    assert user["row_bytes"] == pytest.approx(213 + 8, abs=1)
    assert len(user["points"]) == 4 * 3 + 2
    for point in user["points"]:
        assert point["hit_rate"] == pytest.approx(point["measured"], abs=1e-9)
        rows_per_rank = -(-point["rows"] * 10 // 9) / 2
        assert point["bytes"] == pytest.approx(2 * rows_per_rank * user["row_bytes"], abs=2 * 222)
    first = user["points"][0]
    assert (first["score"], first["admission"], first["ttl"], first["rows"]) == (
        "lru",
        1,
        None,
        150,
    )
    assert user["points"][-1]["ttl"] == 9
    title = r"^user: 47 lookups, [\d,]+ keys, \d+ distinct, at most \d+ in a lookup; exact$"
    assert re.search(title, out, re.MULTILINE)
    assert re.search(r"^policy +rows +of keys +memory +hit rate +measured$", out, re.MULTILINE)
    assert re.search(rf"^lru +150 .* {first['hit_rate']:.4f} +{first['measured']:.4f}$", out, re.M)


def test_a_budget(folder, capsys):
    out = said(capsys, f"{READ} --budget 60KiB --json x.json --dim 32 --optimizer SGD")
    budget = json.loads((folder / "x.json").read_text())["budget"]
    assert budget["bytes"] == 60 * 1024
    used = sum(table["bytes"] for table in budget["tables"].values())
    assert 0.95 * budget["bytes"] < used <= budget["bytes"]
    assert 0 < budget["hit_rate"] < 1
    for table in budget["tables"].values():
        assert table["rows_per_rank"] * 0.9 >= table["max_rows"] - 1
    assert "60.0 KiB over 1 rank(s):" in out
    assert re.search(rf"^all +[\d.]+ KiB +{budget['hit_rate']:.4f}$", out, re.MULTILINE)
    more = said(capsys, f"{READ} --budget 1MiB")
    assert float(more.split()[-1]) > budget["hit_rate"]


def test_the_rows_of_a_budget_hit_as_predicted(folder, capsys):
    said(capsys, f"{READ} --rows 100,200 --policy lru --admission 1 --budget 80KiB --json x.json")
    found = json.loads((folder / "x.json").read_text())["budget"]["tables"]["user"]
    rows = found["max_rows"]
    out = said(capsys, f"{READ} --rows {rows} --policy lru --admission 1 --measure --json x.json")
    point = json.loads((folder / "x.json").read_text())["features"]["user"]["points"][0]
    assert (point["rows"], point["score"]) == (rows, "lru")
    assert point["measured"] == pytest.approx(found["hit_rate"], abs=0.03)
    assert "lfu" not in out
    assert "ttl" not in out


def test_kinds_of_keys(tmp_path, capsys):
    (tmp_path / "x.csv").write_text("a,b,c,d\n1,ff,x y,5\n01,0ff,y x,6\n1,fe,y,7\n")
    read = f"{tmp_path / 'x.csv'} --batch-size 1 --int a --hex b --hash c --seed 3 --separator +"
    distinct = dict(re.findall(r"^(\w): .* (\d+) distinct", said(capsys, read), re.MULTILINE))
    assert distinct == {"a": "1", "b": "2", "c": "3"}
    words = said(capsys, f"{tmp_path / 'x.csv'} --hash c --separator x --batch-size 3")
    assert "c: 1 lookups, 3 keys, 3 distinct, at most 3 in a lookup" in words


def test_a_small_sample(folder, capsys):
    said(capsys, f"{READ} --sample 64 --json x.json")
    for feature in json.loads((folder / "x.json").read_text())["features"].values():
        assert feature["rate"] <= 0.5
        assert feature["distinct"] > 128


def test_a_source_of_several_files(folder, capsys):
    out = said(capsys, f"{READ.replace('seen.csv', 'seen.csv seen.csv')} --policy lru")
    assert "user: 94 lookups" in out


@pytest.mark.parametrize("name", ["day", "day.gz"])
def test_other_formats(tmp_path, capsys, name):
    write_criteo_sample(tmp_path / name, rows=300)
    out = said(capsys, f"{tmp_path / name} {tmp_path / name} --format criteo --batch-size 100")
    assert len(re.findall("^C[0-9]+: 6 lookups", out, re.MULTILINE)) == 26


def test_a_pipe_is_read_once(tmp_path, capsys):
    path = tmp_path / "x.csv"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("a\n1\n2\n1\n",))
    writer.start()
    out = said(capsys, f"{path} --batch-size 1 --policy lru --admission 1")
    writer.join()
    assert "a: 3 lookups, 3 keys, 2 distinct, at most 1 in a lookup; exact" in out


def test_broken_lines(tmp_path, capsys):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n3\n1,2\n")
    out = said(capsys, f"{tmp_path / 'x.csv'} --skip-malformed --batch-size 1 --epochs 2")
    assert "a: 6 lookups, 4 keys, 1 distinct" in out


def test_a_run(folder, capsys):
    pytest.importorskip("yaml")
    train = "train deepfm --data seen.csv --epochs 2 --ranks 1 --log-to run --set model.dim=7"
    settings = ["sparse=user,films", "label=click", "dense=price", "separator= "]
    options = [word for setting in settings for word in ("--set", f"data.{setting}")]
    table = [
        "--set",
        "table.on_full=evict",
        "--set",
        "table.max_rows=200",
        "--set",
        "model.rows=999",
    ]
    batch = ["--set", "trainer.global_batch_size=50"]
    assert cli.main([*train.split(), *options, *table, *batch]) == 0
    capsys.readouterr()
    said(capsys, "run --json x.json --rows 200 --policy lru --admission 1")
    user, films = json.loads((folder / "x.json").read_text())["features"].values()
    assert user["lookups"] == films["lookups"] == 2 * 60
    # DeepFM has a number more for each key than its dim; the run has trained with LazyAdam.
    assert user["row_bytes"] == pytest.approx(3 * 4 * 8 + 21.3 + 8, abs=1)
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    hits = sum(record["tables"]["user"]["hit_rate"] for record in steps) / len(steps)
    assert user["points"][0]["hit_rate"] == pytest.approx(hits, abs=0.02)
    said(capsys, "run --json x.json --batch-size 100 --epochs 1 --dim 8 --optimizer SGD")
    user = json.loads((folder / "x.json").read_text())["features"]["user"]
    assert user["lookups"] == 30
    assert user["row_bytes"] == pytest.approx(4 * 8 + 21.3 + 8, abs=1)


def test_a_plot(folder, capsys):
    pytest.importorskip("matplotlib")
    said(capsys, f"{READ} --plot x.png --budget 1MiB --measure")
    assert (folder / "x.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(each.name for each in folder.iterdir()) == ["seen.csv", "x.png"]


def test_a_plot_of_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    plot({}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 100


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sen.csv", r"sen\.csv: No such file or directory; did you mean seen\.csv\?$"),
        ("seen", r"seen: --format says what it is, if its name does not$"),
        ("empty.csv", r"empty\.csv is empty"),
        ("header.csv", r"header\.csv: no rows$"),
        ("seen.csv --int films", r"films"),
        ("seen.csv --int usr", r"no column 'usr'; did you mean user\?"),
        ("seen.csv broken.csv", r"broken\.csv"),
        ("gone", r"gone/config\.yaml: No such file or directory"),
        ("gone seen.csv", r"gone seen\.csv: a run is read alone$"),
        ("run --label click", r"--label: run/config\.yaml says what is read$"),
        ("run", r"config\.yaml: .*nowhere\.csv"),
        ("adult", r"config\.yaml: names no files in data\.train$"),
        ("odd", r"config\.yaml: .*epochs"),
        ("seen.csv --budget 2GB", r"--budget: '2GB' is no size in bytes, such as 2GiB"),
        ("seen.csv --budget 0", r"--budget: '0' is no size in bytes"),
        ("seen.csv --budget 1KiB", r"--budget 1\.0 KiB: a budget of 1,024 bytes is .* too small"),
        ("seen.csv --budget 1MiB --policy ttl", r"--budget: needs a --policy other than ttl"),
        ("seen.csv --policy mru", r"--policy: 'mru' is none of lru, lfu, ttl"),
        ("seen.csv --rows 0", r"--rows: 0 is not in \[1, "),
        ("seen.csv --rows 1,x", r"--rows: invalid list of int value: '1,x'"),
        ("seen.csv --admission 0", r"--admission: 0 is not in"),
        ("seen.csv --optimizer Adm", r"--optimizer: invalid choice: 'Adm'.*; did you mean Adam\?"),
        ("seen.csv --json nowhere/x", r"--json nowhere/x: cannot write into"),
        ("seen.csv --plot x --json x", r"--plot x: is the file of --json; choose another$"),
        ("seen.csv --json seen.csv", r"--json seen\.csv: is the file that is read, seen\.csv"),
        ("pipe.csv --measure", r"--measure reads again, and a pipe can be read once$"),
        ("pipe.csv --epochs 2", r"--epochs 2 reads again, and a pipe can be read once$"),
    ],
)
def test_errors_are_one_line(folder, capsys, command, message):
    pytest.importorskip("yaml")
    (folder / "empty.csv").touch()
    (folder / "header.csv").write_text("a,b\n")
    (folder / "seen").write_text("a\n1\n")
    (folder / "broken.csv").write_text("user,films,click\n1\n")
    os.mkfifo(folder / "pipe.csv")
    for name, text in {
        "run": "data: {train: [nowhere.csv], sparse: [user]}",
        "adult": "data: {label: income}",
        "odd": "trainer: {epochs: many}",
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.yaml").write_text(text)
    (folder / "gone").mkdir()
    try:
        code = cli.main(["capacity", *command.split()])
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.count("\n") == 1, error
    assert re.search(message, error.partition(" (see ")[0].strip()), error


def test_the_policies_are_those_of_the_library():
    layers = [
        sparsekit.Embedding(10, 1, **sparsekit.capacity.Policy(*options).options())
        for options in (("lru",), ("lfu",), ("lfu", 3), (None, 1, 5))
    ]
    assert [str(layer.life.score) for layer in layers][1] == str(sparsekit.LFU())
    assert [layer.life.admission for layer in layers][2] == sparsekit.MinCount(3)
    assert [layer.life.ttl for layer in layers] == [None, None, None, 5]
