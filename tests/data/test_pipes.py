"""Readers accept pipes, which can be read only once, and files that return few bytes per read."""

import contextlib
import gzip
import io
import os
import pickle
import threading

import pytest
import torch

from sparsekit.data import CsvReader, text_file
from sparsekit.errors import DataFormatError

from .written import write, xxh

ROWS = "".join(f"{row},key {row}\n" for row in range(3000))


@pytest.fixture
def pipe(tmp_path):
    """Return a function that creates a pipe; a thread writes the content to it once."""
    path, threads = tmp_path / "pipe", []

    def make(content):
        os.mkfifo(path)
        threads.append(threading.Thread(target=path.write_bytes, args=(content,)))
        threads[-1].start()
        return path

    yield make
    # Read what a failed test may have left in the pipe.
    rest = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    while threads[0].is_alive():
        with contextlib.suppress(BlockingIOError):
            os.read(rest, 1 << 16)
        threads[0].join(0.01)
    os.close(rest)


@pytest.mark.time_limit(30)
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("begin", [b"a,b\n", b"\xef\xbb\xbfa,b\n", b"\xef\xbb\xbf", b""])
def test_all_rows_of_a_pipe_are_read_once(pipe, compress, begin):
    content = begin + ROWS.encode()
    path = pipe(gzip.compress(content) if compress else content)
    columns = None if b"a" in begin else ["a", "b"]
    settings = {"columns": columns, "dense": ["a"], "sparse": ["b"], "block_bytes": 1000}
    reader = CsvReader(path, 10_000, **settings)
    assert not reader.counts_fast
    with pytest.raises(DataFormatError, match="pipe: is a pipe, whose rows cannot be counted"):
        reader.count_rows()
    copied = pickle.loads(pickle.dumps(reader))  # copied as for a worker
    (batch,) = reader
    assert batch.dense[:, 0].equal(torch.arange(3000.0))
    assert batch.sparse.values().equal(torch.tensor([xxh(f"key {row}") for row in range(3000)]))
    for each in (reader, copied):
        with pytest.raises(DataFormatError, match="pipe: is a pipe, read once already; write it"):
            list(each)


@pytest.mark.time_limit(30)
def test_lines_of_a_pipe_are_counted_from_its_first(pipe):
    path = pipe(b'\xef\xbb\xbf"a\nb",c\n' + b"1,2\n" * 2000 + b"x,2\n")
    reader = CsvReader(path, 10, dense=["a\nb"], block_bytes=100)
    with pytest.raises(DataFormatError, match=r"pipe, line 2003, column 1 \('a\\nb'\): not a fin"):
        list(reader)


@pytest.mark.time_limit(30)
@pytest.mark.parametrize("quote", ['"', None])
def test_short_reads_are_continued(tmp_path, monkeypatch, quote):
    class ShortFile(io.FileIO):
        def readinto(self, room):
            return super().readinto(memoryview(room)[:7])

    def open_short(path, mode):
        return io.BufferedReader(ShortFile(path, mode))

    path = write(tmp_path / "x.csv", "a,b\n" + ROWS)
    monkeypatch.setattr(text_file, "open", open_short, raising=False)
    for block_bytes in (400, 5000):
        settings = {"dense": ["a"], "quote": quote, "block_bytes": block_bytes}
        (batch,) = CsvReader(path, 10_000, **settings)
        assert batch.dense[:, 0].equal(torch.arange(3000.0))


@pytest.mark.parametrize("left", [4, 10, 5000])
def test_a_file_that_got_shorter_is_named(tmp_path, left):
    path = write(tmp_path / "x.csv", "a,b\n" + ROWS)
    size = path.stat().st_size
    reader = CsvReader(path, 10, dense=["a"], block_bytes=3000)
    os.truncate(path, left)
    with pytest.raises(DataFormatError, match=rf"x\.csv: it had {size} bytes, and now it ends bef"):
        list(reader)
