"""Rows that are left out, and how they are named."""

import pytest

from sparsekit.data import CsvReader, ParquetReader

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
