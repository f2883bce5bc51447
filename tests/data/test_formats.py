"""Each format, chosen by its name, opens a file to find the columns, and reads it."""

import os

import pytest

from sparsekit.data.formats import FORMATS
from sparsekit.errors import DataFormatError

from .written import write, xxh

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402


def test_suffixes_and_kinds_of_keys():
    assert {name: each.suffix for name, each in FORMATS.items()} == {
        "csv": ".csv", "tsv": ".tsv", "criteo": None, "parquet": ".parquet",
    }  # fmt: skip
    assert {name for name, each in FORMATS.items() if each.keys == "hex"} == {"criteo"}
    assert FORMATS["criteo"].open is None


@pytest.mark.parametrize("name", ["csv", "tsv", "parquet"])
def test_a_file_is_opened_for_its_columns_and_read(tmp_path, name):
    """Columns are found and read; in text, a quoted name or value may contain the separator."""
    path, names = tmp_path / "file", ["b,\nc", "a", "long"]
    if name == "parquet":
        large = pa.array([["x"]], pa.large_list(pa.string()))
        parquet.write_table(pa.table({"b,\nc": [1.5], "a": [["x"]], "long": large}), path)
    else:
        mark = {"csv": ",", "tsv": "\t"}[name]
        write(path, mark.join(['"b,\nc"', '"a"', "long"]) + "\n" + mark.join(["1.5", '"x"', "x\n"]))
    opened, found, lists = FORMATS[name].open(str(path))
    assert list(found) == names
    assert set(lists) == ({"a", "long"} if name == "parquet" else set())
    (batch,) = FORMATS[name].reader(opened, 5, dense=["b,\nc"], sparse=["a", "long"])
    assert batch.dense.tolist() == [[1.5]]
    assert batch.sparse.values().tolist() == [xxh("x")] * 2


@pytest.mark.time_limit(30)
def test_a_pipe_is_not_opened_as_parquet(tmp_path):
    """Opening a pipe as a file would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataFormatError, match=f"^{tmp_path}/pipe: is no regular file, from which"):
        FORMATS["parquet"].open(str(tmp_path / "pipe"))
    with pytest.raises(DataFormatError, match=r"none: .*No such file"):
        FORMATS["parquet"].open(str(tmp_path / "none"))
