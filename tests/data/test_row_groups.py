"""Row groups of Parquet: files are opened rarely, and small groups are read together."""

import itertools
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparsekit.data import ParquetReader, parquet_file
from sparsekit.data import parquet as ours
from sparsekit.errors import DataFormatError

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402


class Counts:
    """Counts the footers that pyarrow parses and the files it opens; lists the groups it reads."""

    def __init__(self):
        self.parsed = self.opened = 0
        self.reads = []


@pytest.fixture
def counts(monkeypatch):
    counts = Counts()
    init, read = parquet.ParquetFile.__init__, parquet.ParquetFile.read_row_groups

    def counted_init(self, *args, metadata=None, **settings):
        counts.opened += 1
        counts.parsed += metadata is None
        init(self, *args, metadata=metadata, **settings)

    def counted_read(self, groups, **settings):
        counts.reads.append(list(groups))
        return read(self, groups, **settings)

    monkeypatch.setattr(parquet.ParquetFile, "__init__", counted_init)
    monkeypatch.setattr(parquet.ParquetFile, "read_row_groups", counted_read)
    return counts


def write(path, rows, group, first=0):
    numbers = range(first, first + rows)
    table = pa.table({"a": numbers, "b": [[i] * (i % 3) for i in numbers]})
    parquet.write_table(table, path, row_group_size=group)
    return path


def rows_of(reader):
    return [row for batch in reader for row in batch.label.long().tolist()]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_footer_is_parsed_once_and_small_groups_are_read_together(tmp_path, counts, shuffle):
    path = write(tmp_path / "x.parquet", 3000, 10)
    reader = ParquetReader(path, 64, label="a", shuffle=shuffle)
    for _ in range(2):
        assert sorted(rows_of(reader)) == list(range(3000))
    assert len(rows_of(ParquetReader(path, 64, label="a", rank=1, world_size=3))) == 1000
    assert counts.parsed == 2  # each reader opens its file once
    assert counts.opened == 2 + 3
    assert [len(groups) for groups in counts.reads] == [300, 300, 100]


def test_workers_parse_their_own(tmp_path, counts):
    path = write(tmp_path / "x.parquet", 30, 10)
    reader = ParquetReader(path, 64, label="a")
    assert len(pickle.dumps(reader)) < len(pickle.dumps(parquet.read_metadata(path))) + 4000
    before = counts.parsed
    assert rows_of(pickle.loads(pickle.dumps(reader))) == list(range(30))
    assert counts.parsed == before + 1


def test_what_is_read_together_is_bounded(tmp_path, counts, monkeypatch):
    path = write(tmp_path / "x.parquet", 400, 10)
    with monkeypatch.context() as patch:
        patch.setattr(ours, "_ROWS_TOGETHER", 40)
        assert rows_of(ParquetReader(path, 64, label="a")) == list(range(400))
    assert {len(groups) for groups in counts.reads} == {4}
    counts.reads.clear()
    monkeypatch.setattr(ours, "_BYTES_TOGETHER", 2000)
    assert rows_of(ParquetReader(path, 64, label="a")) == list(range(400))
    footer = parquet.read_metadata(path)
    sizes = [[footer.row_group(i).total_byte_size for i in groups] for groups in counts.reads]
    assert len(sizes) > 2
    for groups, following in itertools.pairwise(sizes):
        assert len(groups) > 1
        assert sum(groups) <= 2000 < sum(groups) + following[0]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_same_batches_and_states_as_one_by_one(tmp_path, monkeypatch, shuffle, world_size):
    """Batches and states are the same across files, on several ranks and after a resume."""
    files = [write(tmp_path / f"{i}.parquet", 70, 3 + i, 70 * i) for i in range(3)]

    def batches(rank):
        settings = {"sparse": {"b": "int"}, "label": "a", "shuffle": shuffle, "seed": 3}
        reader = ParquetReader(files, 16, **settings, rank=rank, world_size=world_size)
        found = []
        for _ in range(2):
            epoch = []
            for step, batch in enumerate(reader):
                epoch.append((batch.label, *batch.sparse["b"]))
                if step == 1:
                    state = reader.state_dict()
            resumed = ParquetReader(files, 16, **settings, rank=rank, world_size=world_size)
            resumed.load_state_dict(state)
            rest = [(batch.label, *batch.sparse["b"]) for batch in resumed]
            same(rest, epoch[2:])
            found += epoch
        return found, state

    together = [batches(rank) for rank in range(world_size)]
    monkeypatch.setattr(ours, "_ROWS_TOGETHER", 0)
    for rank, (found, state) in enumerate(together):
        expected, expected_state = batches(rank)
        assert state == expected_state
        same(found, expected)


def same(batches, expected):
    assert len(batches) == len(expected)
    for one, other in zip(batches, expected, strict=True):
        assert all(map(torch.equal, one, other))


def test_groups_of_several_files(tmp_path, counts):
    """Row groups of one file are read together, even if another file has other groups."""
    files = [write(tmp_path / f"{i}.parquet", 70, 3 + i, 70 * i) for i in range(3)]
    assert rows_of(ParquetReader(files, 16, label="a")) == list(range(210))
    assert counts.reads == [list(range(24)), list(range(18)), list(range(14))]


def test_rows_before_a_damaged_group_are_read_and_it_is_named(tmp_path):
    table = pa.table({"a": range(4000)})
    path = tmp_path / "x.parquet"
    parquet.write_table(
        table, path, row_group_size=1000, compression="snappy", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    start = parquet.read_metadata(path).row_group(2).column(0).data_page_offset
    content[start + 5 : start + 400] = bytes(395)
    path.write_bytes(content)
    batches = iter(ParquetReader(path, 500, label="a"))
    for first in range(0, 2000, 500):
        assert next(batches).label.tolist() == list(range(first, first + 500))
    with pytest.raises(DataFormatError, match=r"x\.parquet, row group 2: "):
        next(batches)


def test_a_row_of_groups_read_together_is_named(tmp_path):
    path = tmp_path / "x.parquet"
    for row in (1, 7, 8, 15, 22, 24, 28, 30):  # the groups begin at rows 1, 8, 15, 22 and 29
        table = pa.table({"a": [0.0] * (row - 1) + [float("inf")] + [0.0] * (30 - row)})
        parquet.write_table(table, path, row_group_size=7)
        for shuffle in (False, True):
            with pytest.raises(
                DataFormatError, match=rf"x\.parquet, row {row}, column 'a': an inf"
            ):
                list(ParquetReader(path, 500, dense=["a"], shuffle=shuffle))


def test_a_kept_footer_belongs_to_its_file(tmp_path, counts):
    path = write(tmp_path / "x.parquet", 30, 10)
    reader = ParquetReader(path, 64, label="a")
    # The new file has the same shape and size, but other bytes.
    os.replace(write(tmp_path / "y.parquet", 30, 10, first=1000), path)
    assert rows_of(reader) == list(range(1000, 1030))
    os.replace(write(tmp_path / "y.parquet", 40, 10), path)
    with pytest.raises(DataFormatError, match=r"x\.parquet: written anew since the reader was"):
        rows_of(reader)
    parquet.write_table(pa.table({"a": ["text"] * 30, "b": [[1]] * 30}), path, row_group_size=10)
    with pytest.raises(DataFormatError, match=r"x\.parquet: written anew since the reader was"):
        rows_of(reader)
    path.unlink()
    with pytest.raises(DataFormatError, match=r"x\.parquet, row group 0: .*No such file"):
        rows_of(reader)


def test_a_file_written_anew_in_place_is_known_by_its_time(tmp_path):
    path = tmp_path / "x.parquet"
    table = pa.table({"a": range(30)})

    def write_groups(*parts):
        settings = {"use_dictionary": False, "compression": "none", "write_statistics": False}
        with open(path, "wb") as file, parquet.ParquetWriter(file, table.schema, **settings) as to:
            for first, rows in parts:
                to.write_table(table.slice(first, rows))
        return path.stat()

    before = write_groups((0, 10), (10, 20))
    reader = ParquetReader(path, 64, label="a")
    assert rows_of(reader) == list(range(30))
    after = write_groups((0, 20), (20, 10))
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    os.utime(path, ns=(0, before.st_mtime_ns + 1))
    with pytest.raises(DataFormatError, match=r"x\.parquet: written anew since the reader was"):
        rows_of(reader)


@pytest.mark.parametrize("bound", ["_KEPT_BYTES", "_KEPT_FILES"])
def test_few_footers_are_kept(tmp_path, counts, monkeypatch, bound):
    files = [write(tmp_path / f"{i}.parquet", 30, 10) for i in range(3)]
    size = parquet.read_metadata(files[0]).serialized_size
    monkeypatch.setattr(parquet_file, bound, 2 if bound == "_KEPT_FILES" else 2 * size)
    kept = parquet_file.ParquetFiles()
    for path in (files[0], files[1], files[0], files[2]):
        kept.shape(path)
    before = counts.parsed
    kept.shape(files[0])  # the file is one of the two used last
    assert counts.parsed == before
    kept.shape(files[1])
    assert counts.parsed == before + 1


@pytest.mark.parametrize("rows", [[3, -1], [3, 4], []])
def test_row_groups_that_do_not_add_up(rows):
    groups = [SimpleNamespace(num_rows=each, total_byte_size=-5) for each in rows]
    metadata = SimpleNamespace(num_rows=2, row_group=groups.__getitem__)
    file = SimpleNamespace(metadata=metadata, num_row_groups=len(rows), schema_arrow=None)
    files, path = parquet_file.ParquetFiles(), Path("x.parquet")
    with pytest.raises(DataFormatError, match=f"damaged: 2 rows, but its row .* {sum(rows)}$"):
        files._check(path, file)
    metadata.num_rows = 7
    if rows == [3, 4]:
        files._check(path, file)
        assert files._shapes[path] == (rows, [0, 0], None)


@pytest.mark.parametrize(
    "error",
    [OSError("bad"), pa.ArrowInvalid("bad"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")],
)
def test_errors_while_a_file_is_open_name_the_place(tmp_path, error):
    path = write(tmp_path / "x.parquet", 30, 10)
    for place in ("row group 3", ""):
        message = rf"x\.parquet{place and ', '}{place}: .*bad"
        with (
            pytest.raises(DataFormatError, match=message),
            parquet_file.ParquetFiles().open(path, place),
        ):
            raise error
