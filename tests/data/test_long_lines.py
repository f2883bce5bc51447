"""Lines longer than a block are read; lines longer than the limit are skipped or raise an error."""

import tracemalloc

import pytest

from sparsekit.data import CsvReader
from sparsekit.errors import DataFormatError

from .written import one, write, xxh


def test_a_line_longer_than_blocks_is_skipped_whole(tmp_path):
    for compress in (False, True):
        text = "a,b\n1,x\n2," + "y" * 100_000 + "\n3,z\n"
        path = write(tmp_path / "x.csv", text, compress)
        settings = {"dense": ["a"], "sparse": ["b"], "on_error": "skip", "max_line_bytes": 99}
        for block_bytes in (7, 5000, 1 << 20):
            reader = CsvReader(path, 10, block_bytes=block_bytes, **settings)
            (batch,) = reader
            assert batch.dense.view(-1).tolist() == [1, 3]
            assert reader.skipped == 1
        settings["max_line_bytes"] = 1 << 20
        batch = one(path, block_bytes=64, **settings)
        assert batch.sparse.values().tolist() == [xxh("x"), xxh("y" * 100_000), xxh("z")]


@pytest.mark.parametrize("compress", [False, True])
def test_a_long_line_with_a_return_where_it_is_cut(tmp_path, compress):
    # If the line were cut right after "\r", it would seem to have exactly the allowed size.
    path = write(tmp_path / "x", "a,b\n1," + "y" * 97 + "\r" + "z" * 100_000 + "\n", compress)
    for block_bytes in (50, 104, 105, 106):
        settings = {"dense": ["a"], "max_line_bytes": 99, "block_bytes": block_bytes}
        with pytest.raises(DataFormatError, match="too long a line"):
            list(CsvReader(path, 10, **settings))
    whole = "a,b\n1," + "y" * 97 + "\r"
    path = write(tmp_path / "y", whole + "z" * (200 - len(whole)) + "\n2,x\n", compress)
    for block_bytes in range(1, 120):
        reader = CsvReader(path, 10, sparse=["b"], max_line_bytes=99, block_bytes=block_bytes)
        with pytest.raises(DataFormatError, match="too long a line"):
            list(reader)


def test_memory_is_bounded_by_blocks_and_lines(tmp_path):
    rows = "".join(f"{row},{'z' * 90}\n" for row in range(100_000))
    for compress in (False, True):
        for text in ("a,b\n" + rows, "a,b\n1," + "y" * 10_000_000 + "\n"):
            path = write(tmp_path / "x", text, compress)
            settings = {"dense": ["a"], "sparse": ["b"], "on_error": "skip"}
            reader = CsvReader(path, 100, block_bytes=50_000, max_line_bytes=1000, **settings)
            tracemalloc.start()
            for _ in reader:
                pass
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
            tracemalloc.stop()


def test_no_more_of_the_names_is_read_than_a_line_may_have(tmp_path):
    path = write(tmp_path / "x", "a" * 5_000_000 + "\n1\n")
    tracemalloc.start()
    with pytest.raises(DataFormatError, match="line 1: longer than max_line_bytes=1000"):
        CsvReader(path, 10, dense=["a"], max_line_bytes=1000)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("compress", [False, True])
def test_lines_are_counted_within_names_and_long_lines(tmp_path, compress):
    text = 'a,"b\nb"\n1,"x\nx"\n2,"' + "y\n" * 100 + '"\n3,"u\n'
    path = write(tmp_path / "x.csv", text, compress)
    for block_bytes in (5, 150, 8 << 20):
        reader = CsvReader(
            path, 9, dense=["a"], on_error="skip", max_line_bytes=99, block_bytes=block_bytes
        )
        with pytest.raises(DataFormatError, match=r"x\.csv, line 106, .* quote that is not closed"):
            list(reader)
        assert reader.skipped == 1


@pytest.mark.parametrize("quotes", [150, 151])
def test_the_end_of_a_long_line_is_found_piece_by_piece(tmp_path, quotes):
    text = "a,b\n1,x\n2," + 'y"' * quotes + ',"u""\n3,v"\n4,z\n'
    path = write(tmp_path / "x.csv", text, compress=True)
    for block_bytes in range(1, 9):
        reader = CsvReader(
            path, 9, dense=["a"], on_error="skip", max_line_bytes=99, block_bytes=block_bytes
        )
        (batch,) = reader
        assert batch.dense.view(-1).tolist() == [1, 4]
        assert reader.skipped == 1


def test_a_long_field_with_newlines_is_skipped_whole(tmp_path):
    field = '"' + 'not,a row\n""' * 5000 + '"'
    for compress in (False, True):
        path = write(tmp_path / "x.csv", f"a,b\n1,x\n2,{field}\n3,y\n", compress)
        settings = {"dense": ["a"], "sparse": ["b"], "on_error": "skip", "max_line_bytes": 99}
        for block_bytes in (300, 5000, 1 << 20):
            reader = CsvReader(path, 10, block_bytes=block_bytes, **settings)
            assert reader.count_rows() == 3
            (batch,) = reader
            assert batch.dense.view(-1).tolist() == [1, 3]
            assert reader.skipped == 1
        settings["max_line_bytes"] = 1 << 20
        batch = one(path, block_bytes=300, **settings)
        assert batch.sparse.values()[1] == xxh('not,a row\n"' * 5000)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("quote", ['"', None])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_around_one_that_blocks_begin_within(tmp_path, compress, quote, end):
    """Each line is read once with the right line number, wherever the long line is."""
    settings = {"dense": ["a"], "sparse": ["b"], "quote": quote}
    long = "y" * 300
    for texts in (["u", long, "v"], ["u", "v", long]):
        rows = [f"{number},{text}" for number, text in enumerate(texts, 2)]
        for last in ("", end):
            path = write(tmp_path / "x.csv", end.join(["a,b", *rows]) + last, compress)
            for block_bytes in (1, 2, 7, 100, 150, 299, 8 << 20):
                batch = one(path, block_bytes=block_bytes, **settings)
                assert batch.dense.view(-1).tolist() == [2, 3, 4]
                assert batch.sparse.values().tolist() == [xxh(text) for text in texts]
        for bad in (2, 3, 4):
            wrong = [row.replace(",", ",z,") if row[0] == str(bad) else row for row in rows]
            path = write(tmp_path / "x.csv", end.join(["a,b", *wrong]), compress)
            for block_bytes in (1, 100, 8 << 20):
                with pytest.raises(DataFormatError, match=rf"line {bad}, column 3: too many field"):
                    one(path, block_bytes=block_bytes, **settings)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("most", [4091, 4094, 5000])
def test_names_may_be_as_long_as_a_line(tmp_path, mark, end, most):
    """The limit for a line may fall on the end of a piece that is read from the file."""
    path = write(tmp_path / "x", mark + b"a" * most + end + b"1" + end)
    assert one(path, dense=["a" * most], max_line_bytes=most).dense.tolist() == [[1]]
    path = write(tmp_path / "x", mark + b"a" * 9000 + end + b"1" + end)
    with pytest.raises(DataFormatError, match=f"line 1: longer than max_line_bytes={most}$"):
        one(path, dense=["a"], max_line_bytes=most)
