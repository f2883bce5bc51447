"""Tests of ``sparsekit hash`` and ``sparsekit data``."""

import gzip
import re

import pytest

from sparsekit import cli
from sparsekit._extras import MissingPackageError
from sparsekit.cli import columns, data
from sparsekit.cli import hash as hash_command
from sparsekit.cli.common import UsageError
from sparsekit.data import CriteoReader, ParquetReader
from sparsekit.hashing import xxh64
from sparsekit.train.progress import Progress

parquet = pytest.importorskip("pyarrow.parquet")


def hashed(folder, content, *options, name="x.csv"):
    """Run `sparsekit hash` on a file; return the output as columns of Python objects."""
    path, out = folder / name, folder / "out.parquet"
    path.write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    assert cli.main(["hash", str(path), "--out", str(out), *options]) == 0
    assert not list(folder.glob("*.part"))
    return parquet.read_table(out).to_pydict()


def code(text, seed=0):
    return xxh64([text], seed).item()


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
def test_hash_of_csv(tmp_path, capsys, name):
    text = "user,item,tag,price,click\nann,3,ff,1.5,1\n,,,,0\n"
    options = ["--label", "click", "--dense", "price", "--int", "item", "--hex", "tag"]
    assert hashed(tmp_path, text, *options, name=name) == {
        "click": [1, 0],
        "price": [1.5, 0],
        "user": [code("ann"), None],
        "item": [3, None],
        "tag": [255, None],
    }
    assert re.fullmatch(
        r".*out\.parquet 2 rows in \d+\.\d s, [\d,]+ rows/s\n", capsys.readouterr().out
    )


def test_hash_of_named_columns_only(tmp_path):
    assert hashed(tmp_path, "a\tb\nx\ty\n", "--hash", "b", "--seed", "7", name="x.tsv") == {
        "b": [code("y", 7)]
    }


@pytest.mark.parametrize(("delimiter", "name"), [(",", "x.csv"), ("\t", "x.tsv")])
def test_names_of_columns_may_be_quoted_and_have_newlines(tmp_path, delimiter, name):
    text = delimiter.join(('"a\nb"', "c")) + "\n" + delimiter.join("xy") + "\n"
    assert hashed(tmp_path, text, name=name) == {"a\nb": [code("x")], "c": [code("y")]}


def test_several_values_in_a_field_are_a_list(tmp_path):
    text = "a,b\nx|y,1\n,2\n"
    columns = hashed(tmp_path, text, "--separator", "|", "--int", "b")
    assert columns == {"a": [[code("x"), code("y")], []], "b": [[1], [2]]}
    kinds = [str(kind) for kind in parquet.read_schema(tmp_path / "out.parquet").types]
    assert all(kind.startswith("large_list<") for kind in kinds)  # offsets may exceed 31 bits


def test_hash_of_parquet(tmp_path):
    import pyarrow

    path, out = tmp_path / "x.parquet", tmp_path / "out.parquet"
    table = pyarrow.table({"a": ["x", None], "b": [[1, 2], []], "c": [0.5, 1.5]})
    parquet.write_table(table, path)
    assert cli.main(["hash", str(path), "--out", str(out), "--dense", "c", "--int", "b"]) == 0
    assert parquet.read_table(out).to_pydict() == {
        "a": [code("x"), None],
        "b": [[1, 2], []],
        "c": [0.5, 1.5],
    }


def test_malformed_lines(tmp_path, capsys):
    text = "a,b\nx,1\ny\nz,2\n"
    path = tmp_path / "x.csv"
    path.write_text(text)
    assert cli.main(["hash", str(path), "--out", str(tmp_path / "o")]) == 2
    assert f"sparsekit: {path}, line 3, column 2 ('b'): too few fields" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]
    columns = hashed(tmp_path, text, "--skip-malformed", "--int", "b")
    assert columns == {"a": [code("x"), code("z")], "b": [1, 2]}
    assert "2 rows, 1 malformed left out" in capsys.readouterr().out


def test_a_file_stays_as_it_was_if_another_cannot_be_written_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sparsekit.cli.hash._BATCH", 1)  # so that rows are written before the error
    hashed(tmp_path, "a,b\nx,1\nz,2\n")
    assert "out.parquet 2 rows in" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    malformed = tmp_path / "y.csv"
    malformed.write_text("a,b\nx,1\ny\n")
    assert cli.main(["hash", str(malformed), "--out", str(tmp_path / "out.parquet")]) == 2
    malformed.unlink()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/none.csv", "--out", "{}/o"], "none.csv"),
        (["{}/x.csv", "--out", "{}/no/o"], "--out .*/no/o: cannot write into"),
        (["{}/x.csv", "--out", "{}"], "--out .*: is a folder"),
        (["{}/x.txt", "--out", "{}/o"], r"x\.txt: --format says what it is"),
        (["{}/x.csv", "--out", "{}/o", "--int", "c"], r"x\.csv has no column 'c'"),
        (["{}/x.csv", "--out", "{}/o", "--format", "parquet"], r"x\.csv"),
        (["{}/empty.csv", "--out", "{}/o"], r"empty\.csv: no rows"),
    ],
)
def test_what_the_user_can_put_right(tmp_path, capsys, arguments, message):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    (tmp_path / "x.txt").write_text("a,b\n1,2\n")
    (tmp_path / "empty.csv").write_text("a,b\n")
    assert cli.main(["hash", *(argument.format(tmp_path) for argument in arguments)]) == 2
    output = capsys.readouterr()
    assert re.match(f"sparsekit: .*{message}", output.err), output.err
    assert output.err.count("\n") == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ""])
def test_the_format_is_that_of_the_name(suffix):
    found = [columns.format_of(f"a.b/x{form}{suffix}") for form in (".csv", ".tsv")]
    assert found == ["csv", "tsv"]
    for name in (f"x{suffix}", f"x.txt{suffix}", f"x.csv.old{suffix}", f"x.csv{suffix}.zip"):
        with pytest.raises(UsageError, match="--format says what it is"):
            columns.format_of(name)


def test_an_empty_list_of_columns_is_empty(tmp_path):
    assert hashed(tmp_path, "a,b\nx,1\n", "--hash", "", "--int", "b") == {"b": [1]}


@pytest.fixture
def bars(monkeypatch):
    """Record the arguments and the counts of progress bars."""
    made = []

    class Bar(Progress):
        def __init__(self, title, total, stream, unit):
            super().__init__(title, total, stream, unit)
            made.append((title, total, unit, []))

        def update(self, samples):
            made[-1][-1].append(samples)

    monkeypatch.setattr(hash_command, "Progress", Bar)
    monkeypatch.setattr(data, "Progress", Bar)
    return made


def test_bars_count_rows(tmp_path, monkeypatch, bars):
    monkeypatch.setattr(hash_command, "_BATCH", 3)
    out = str(tmp_path / "out")
    # The rows of a compressed file cannot be counted without reading it.
    for name, total in (("day", 5), ("day.gz", 0)):
        path = str(tmp_path / name)
        assert cli.main(["data", "criteo-sample", "--rows", "5", "--out", path]) == 0
        assert bars.pop() == (path, 5, "rows", [5])
        assert cli.main(["hash", path, "--format", "criteo", "--out", out]) == 0
        assert bars.pop() == (out, total, "rows", [3, 2])


def test_hash_without_pyarrow(monkeypatch, capsys):
    def missing(module, user):
        raise MissingPackageError(f"{user} needs {module}")

    monkeypatch.setattr(hash_command, "needed", missing)
    assert cli.main(["hash", "x.csv", "--out", "y"]) == 2
    assert capsys.readouterr().err == "sparsekit: hash needs pyarrow\n"


@pytest.mark.parametrize("error", [OSError("odd"), OSError(5, "odd", "part")])
def test_a_file_that_cannot_be_opened_is_named_where_it_is_known(monkeypatch, capsys, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(columns, "_open", fail)
    assert cli.main(["hash", "x.csv", "--out", "y"]) == 2
    assert capsys.readouterr().err == f"sparsekit: {'x.csv: ' if error.filename else ''}odd\n"


def test_all_batches_are_in_one_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hash_command, "_BATCH", 2)
    found = hashed(tmp_path, "a\n" + "1\n2\n" * 3, "--int", "a", "--skip-malformed")
    assert found == {"a": [1, 2] * 3}
    assert " 6 rows, 0 malformed left out in " in capsys.readouterr().out


def test_texts_of_criteo_may_be_hashed_and_be_several(tmp_path):
    day = "\t".join(["1", *["2"] * 13, "ff,ee", *["ff"] * 25]) + "\n"
    several = ["--format", "criteo", "--separator", ","]
    assert hashed(tmp_path, day, *several, name="day")["C1"] == [[255, 238]]
    found = hashed(tmp_path, day, *several, "--hash", "all", "--seed", "3", name="day")
    assert found["C26"] == [[code("ff", 3)]]


@pytest.mark.parametrize("method", ["write_table", "close"])
@pytest.mark.parametrize("error", [OSError(28, "full"), OSError("full")])
def test_a_disk_that_is_full(tmp_path, monkeypatch, capsys, method, error):
    def fail(*_):
        raise error

    path, out = tmp_path / "x.csv", tmp_path / "out"
    path.write_text("a\nx\n")
    monkeypatch.setattr(parquet.ParquetWriter, method, fail)
    assert cli.main(["hash", str(path), "--out", str(out)]) == 2
    assert capsys.readouterr().err.endswith(f"sparsekit: {path} to {out}: full\n")
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(data, "write_criteo_sample", lambda *_, **__: fail())
    assert cli.main(["data", "criteo-sample", "--rows", "5", "--out", str(out)]) == 2
    assert capsys.readouterr().err.endswith(f"sparsekit: --out {out}: full\n")


def test_a_sample_may_be_empty(tmp_path):
    assert cli.main(["data", "criteo-sample", "--rows", "0", "--out", str(tmp_path / "day")]) == 0
    assert (tmp_path / "day").read_bytes() == b""


@pytest.mark.parametrize("name", ["day", "day.gz"])
def test_criteo_sample_and_its_hash(tmp_path, capsys, name):
    path, out = tmp_path / name, tmp_path / "o.parquet"
    assert cli.main(["data", "criteo-sample", "--rows", "500", "--out", str(path)]) == 0
    assert re.search(r"500 rows in \d+\.\d s, [\d,]+ rows/s", capsys.readouterr().out)
    assert cli.main(["hash", str(path), "--format", "criteo", "--out", str(out)]) == 0
    (direct,) = CriteoReader(path, 1000)
    settings = {
        "label": "label",
        "dense": [f"I{i}" for i in range(1, 14)],
        "sparse": {f"C{i}": "int" for i in range(1, 27)},
    }
    (again,) = ParquetReader(out, 1000, **settings)
    assert again.label.equal(direct.label)
    assert again.dense.equal(direct.dense)
    assert again.sparse.values().equal(direct.sparse.values())
    assert again.sparse.offsets().equal(direct.sparse.offsets())
    assert cli.main(["data", "criteo-sample", "--rows", "5", "--out", str(tmp_path / "n/o")]) == 2
    assert f"--out {tmp_path}/n/o: cannot write into {tmp_path}/n\n" in capsys.readouterr().err
