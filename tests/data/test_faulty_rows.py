"""Faulty rows are skipped or raise an error that names the row."""

import math

import pytest

from sparsekit.data import CsvReader, ParquetReader
from sparsekit.errors import DataFormatError

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402


@pytest.mark.parametrize("format", ["text", "parquet"])
def test_labels_outside_a_range_are_found_beside_malformed_rows(tmp_path, format):
    path = tmp_path / f"x.{format}"
    table = {"label": [0, 5, 1, 1, -1], "a": [1.0, 2.0, float("inf"), 3.0, 4.0]}
    if format == "parquet":
        parquet.write_table(pa.table(table), path)
    else:
        rows = zip(table["label"], table["a"], strict=True)
        path.write_text("label,a\n" + "".join(f"{label},{a}\n" for label, a in rows))
    make = ParquetReader if format == "parquet" else CsvReader
    skipping = make(path, 10, label="label", dense=["a"], on_error="skip")
    skipping.limit_labels(0, 1)
    (batch,) = skipping
    assert (batch.label.tolist(), batch.dense.tolist()) == ([0, 1], [[1], [3]])
    assert skipping.skipped == 3


def test_a_row_with_several_faults_is_skipped_once(tmp_path):
    """A row with several faults is skipped once; numbers beyond float32 are infinite."""
    columns = {"label": [0.0, None, 2.0], "a": [1.0, math.inf, 3.0], "b": [1.0, -math.inf, 1e39]}
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table(columns), path)
    settings = {"label": "label", "dense": ["a", "b"]}
    reader = ParquetReader(path, 4, on_error="skip", **settings)
    (batch,) = reader
    assert (batch.label.tolist(), batch.dense.tolist(), reader.skipped) == ([0], [[1, 1]], 2)
    with pytest.raises(DataFormatError, match=r"x\.parquet, row 3, column 'b': an infinite"):
        list(ParquetReader(path, 1, rank=2, world_size=3, **settings))
