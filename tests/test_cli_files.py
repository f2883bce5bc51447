"""Every command reads real file layouts, or prints a one-line error.

The layouts are those of MovieLens, Amazon's reviews, UCI's Adult data and Criteo. Files may be
compressed, may be pipes, and may have quotes, byte-order marks and other line ends.
"""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import tarfile
import threading
import zipfile

import pytest
import torch

from sparsekit import cli
from sparsekit.data import CsvReader
from sparsekit.errors import DataFormatError
from sparsekit.hashing import xxh64

# Each row is (user, item, rating, time).
RATINGS = [
    (user, item, 1 + (user + item) % 5, 1000 * user + item)
    for user in range(1, 7)
    for item in range(1, 9)
]
ADULT = "{}, State-gov, {}, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male"
ADULT += ", 2174, 0, {}, United-States, {}"


def joined(mark, rows, header=()):
    return "".join(mark.join(map(str, row)) + "\n" for row in (*header, *rows))


def quoted(header, rows):
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def people(stop=""):
    rows = [(20 + i, 1000 + i, 30 + i % 9, (">50K", "<=50K")[i % 2] + stop) for i in range(40)]
    return "".join(ADULT.format(*row) + "\n" for row in rows) + "\n"


def reviews(**renamed):
    lines = []
    for user, item, rating, time in RATINGS:
        review = {
            "overall": float(rating),
            "reviewerID": f"A{user}",
            "asin": f"{item:010d}",
            "reviewText": f'word{rating} of {item},\n"quoted" é',
            "unixReviewTime": time,
        }
        lines.append({renamed.get(name, name): value for name, value in review.items()})
    del lines[3][renamed.get("reviewText", "reviewText")]
    lines[4][renamed.get("reviewText", "reviewText")] = None
    lines[5][renamed.get("unixReviewTime", "unixReviewTime")] = None
    return "".join(json.dumps(line) + "\n" for line in lines)


CLICK_NAMES = ["click", "user", "title", "price", "null"]
CLICKS = [
    (i % 2, f"u{i % 7}", (f"film, no {i % 5}", f'two\n{i},"lines"')[i % 3 == 0], i / 4, "")
    for i in range(40)
]
CRITEO = "".join(
    f"{i % 2}\t" + "\t".join(["5"] * 12) + "\t\t" + "\t".join(["68fd1e64"] * 25) + "\t\n"
    for i in range(40)
)

SMALL = ["--ranks", "1", "--epochs", "1"]
TABLES = ["--dim", "4", "--capacity", "100"]
DLRM = [f"--set={s}" for s in ("model.rows=99", "model.dim=4", "trainer.batch_size=9")]
COLUMNS = [f"--set=data.{s}" for s in ("label=click", "dense=price,null", "sparse=user,title")]
COMMANDS = {
    "ratings": ["train", "ratings", *SMALL, *TABLES, "--data"],
    "autoencoder": ["train", "autoencoder", *SMALL, "--dim", "4", "--data"],
    "wide": ["train", "wide", *SMALL, "--data"],
    "deepconn": ["train", "deepconn", *SMALL, "--length", "8", "--data"],
    "dlrm": ["train", "dlrm", *SMALL, *DLRM, *COLUMNS, "--data"],
    "deepfm": ["train", "deepfm", *SMALL, *DLRM, *COLUMNS, "--data"],
    "dlrm tsv": ["train", "dlrm", *SMALL, *DLRM, *COLUMNS, "--set=data.format=tsv", "--data"],
    "dlrm criteo": ["train", "dlrm", *SMALL, *DLRM, "--set=data.format=criteo", "--data"],
    "hash": ["hash", "--format=csv", "--label=click", "--dense=price"],
    "hash tsv": ["hash", "--format=tsv", "--label=click", "--dense=price"],
    "hash criteo": ["hash", "--format=criteo"],
}
HEADER = ("userId", "movieId", "rating", "timestamp")
AMAZON = [(f"A{user}", f"{item:010d}", float(r), t) for user, item, r, t in RATINGS]
NAMED = {"reviewerID": "user_id", "overall": "rating", "unixReviewTime": "timestamp"}
# For each layout: its text and the commands that read it.
LAYOUTS = {
    "u.data": (joined("\t", RATINGS), ["ratings", "autoencoder"]),
    "ratings.dat": (joined("::", RATINGS), ["ratings"]),
    "ratings.csv": (joined(",", RATINGS, [HEADER]), ["ratings"]),
    "amazon.csv": (joined(",", AMAZON), ["ratings", "autoencoder"]),
    "quoted.csv": (quoted(HEADER, RATINGS), ["ratings"]),
    "adult.data": (people(), ["wide"]),
    "adult.test": ("|1x3 Cross validator\n" + people("."), ["wide"]),
    "reviews.json": (reviews(), ["deepconn"]),
    "reviews2023.jsonl": (reviews(reviewText="text", **NAMED), ["deepconn"]),
    "clicks.csv": (quoted(CLICK_NAMES, CLICKS), ["dlrm", "deepfm", "hash"]),
    "clicks.tsv": (quoted(CLICK_NAMES, CLICKS).replace('","', '"\t"'), ["dlrm tsv", "hash tsv"]),
    "day_0": (CRITEO, ["dlrm criteo", "hash criteo"]),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(name, file):
    more = ["--out", "out.parquet"] if name.startswith("hash") else []
    return [*COMMANDS[name], str(file), *more]


def error_of(capfd, *arguments):
    """Run a command that must fail; return its error message."""
    capfd.readouterr()
    assert cli.main(list(arguments)) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1, error
    return error


class Pipe:
    """Named pipe to which a thread writes once."""

    def __init__(self, path, content):
        os.mkfifo(path)
        self.path = path
        self.thread = threading.Thread(target=self._write, args=(content,), daemon=True)
        self.thread.start()

    def _write(self, content):
        try:
            with open(self.path, "wb") as file:
                file.write(content)
        except BrokenPipeError:
            pass

    def done(self):
        """End the thread, even if nothing has opened the pipe or read all of its contents."""
        # Do not block here if the writer has ended already.
        os.close(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK))
        self.thread.join()


PAIRS = [(layout, name) for layout, (_, names) in LAYOUTS.items() for name in names]


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_layouts(layout, name, capfd, tmp_path):
    """Compression or other line ends do not change the figures of a layout."""
    content = LAYOUTS[layout][0].encode()
    variants = {"plain": content, "gzip": gzip.compress(content)}
    variants["BOM and CRLF"] = b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n")
    if layout in ("u.data", "ratings.csv", "adult.data", "reviews.json"):
        variants["CR"] = content.replace(b"\n", b"\r")
    if layout in ("u.data", "day_0"):
        variants |= {"bzip2": bz2.compress(content), "xz": lzma.compress(content)}
    found = {}
    for variant, content in variants.items():
        file = tmp_path / layout
        file.write_bytes(content)
        assert cli.main(command(name, file)) == 0, variant
        shown = capfd.readouterr().out
        found[variant] = re.findall(r"\d\.\d{4}\b", shown)[:2]
    if not name.startswith("hash") and "clicks" not in layout:  # other texts contain newlines
        assert found["plain"]
        assert len({tuple(x) for x in found.values()}) == 1, found


@pytest.mark.parametrize(("layout", "name"), [p for p in PAIRS if p[1] != "deepfm"])
def test_pipes(layout, name, capfd, tmp_path):
    pipe = Pipe(tmp_path / "pipe", gzip.compress(LAYOUTS[layout][0].encode()))
    try:
        if name.startswith("dlrm"):
            error = error_of(capfd, *command(name, pipe.path))
            assert (
                error == f"sparsekit: {pipe.path}: is a pipe, but each epoch reads anew; write it "
                "to a file\n"
            )
        else:
            assert cli.main(command(name, pipe.path)) == 0
    finally:
        pipe.done()


@pytest.mark.parametrize("name", ["ratings", "autoencoder", "wide", "deepconn", "dlrm"])
def test_each_command_computes_with_the_threads_that_were_asked_for(name, tmp_path, monkeypatch):
    def ask(threads):
        raise ZeroDivisionError(threads)  # no training is needed

    monkeypatch.setattr(torch, "set_num_threads", ask)
    file = tmp_path / "file"
    file.write_text(next(text for text, names in LAYOUTS.values() if name in names))
    with pytest.raises(ZeroDivisionError, match=r"^3$"):
        cli.main([*command(name, file), "--threads", "3"])


def refused():
    """Return a dict of name to (content that is not text, error message)."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("u.data", LAYOUTS["u.data"][0])
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w:gz") as file:
        member = tarfile.TarInfo("u.data")
        member.size = 5
        file.addfile(member, io.BytesIO(b"1\t2\t3"))
    return {
        "zip": (archive.getvalue(), "it is a zip archive"),
        "tar.gz": (tar.getvalue(), "it is a tar archive"),
        "zstd": (b"\x28\xb5\x2f\xfd" + bytes(20), "it is compressed by zstd"),
        "Parquet": (b"PAR1" + bytes(20) + b"PAR1", "it is Parquet"),
        "UTF-16": (LAYOUTS["u.data"][0].encode("utf-16"), "it is UTF-16"),
        "truncated": (gzip.compress(b"1,2,3,4\n" * 1000)[:-20], "the file is truncated"),
        "damaged xz": (lzma.compress(b"1,2,3,4\n")[:20] + bytes(50), "damaged xz"),
        "damaged bzip2": (bz2.compress(b"1,2,3,4\n")[:20] + bytes(50), "damaged bzip2"),
    }


@pytest.mark.parametrize("name", [n for n in COMMANDS if n not in ("deepfm", "hash tsv")])
def test_other_files_are_named_by_their_first_bytes(name, capfd, tmp_path):
    file = tmp_path / "file"
    for content, message in refused().values():
        file.write_bytes(content)
        error = error_of(capfd, *command(name, file))
        assert str(file) in error
        assert message in error
    error = error_of(capfd, *command(name, "/dev/zero"))
    assert "/dev/zero" in error
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("link", [os.link, os.symlink, None])
def test_what_is_read_is_not_written_over(link, capfd, tmp_path):
    content = LAYOUTS["clicks.csv"][0]
    for name, option in (
        ("hash", "--out"),
        ("ratings", "--save"),
        ("wide", "--save"),
        ("autoencoder", "--save"),
        ("autoencoder", "--recs"),
    ):
        file = tmp_path / "x.csv"
        file.write_text(content)
        other = file
        if link is not None:
            other = tmp_path / "other"
            other.unlink(missing_ok=True)
            link(file, other)
        error = error_of(capfd, *COMMANDS[name], str(file), option, str(other))
        assert f"{option} {other}: is the file that is read, {file}" in error
        assert file.read_text() == content
    error = error_of(capfd, "recommend", str(file), "--out", str(other))
    assert f"--out {other}: is the file that is read" in error
    log = tmp_path / "metrics.jsonl"
    log.write_text("{}\n")
    error = error_of(capfd, "plot", str(tmp_path), "--out", str(log))
    assert f"--out {log}: is the file that is read" in error
    assert log.read_text() == "{}\n"


def test_two_results_are_not_written_to_one_file(capfd, tmp_path):
    (tmp_path / "u.data").write_text(LAYOUTS["u.data"][0])
    os.symlink(tmp_path, tmp_path / "here")
    for command, option, other in (
        ([*COMMANDS["autoencoder"], "u.data"], "--recs", "--save"),
        (["scaling"], "--plot", "--json"),
    ):
        error = error_of(capfd, *command, other, "x", option, str(tmp_path / "here" / "x"))
        assert f"{option} {tmp_path}/here/x: is the file of {other}" in error
        assert not (tmp_path / "x").exists()


def test_a_stream_is_read_as_a_file_is(tmp_path):
    """A stream and a file handle quotes, block ends and overlong lines in the same way."""
    lines = "".join(f'{i},"{chr(10) * (i % 3)}{"x" * (i % 50)}"\n' for i in range(200))
    content = f"a,b\n{lines}200,{'y' * 900}\n201,z\n".encode()
    (tmp_path / "x.csv").write_bytes(content)
    settings = {"dense": ["a"], "sparse": ["b"], "on_error": "skip", "max_line_bytes": 200}
    (expected,) = CsvReader(tmp_path / "x.csv", 999, **settings)
    assert expected.rows == 201
    for number, (pack, block_bytes) in enumerate(
        itertools.product((bytes, gzip.compress, bz2.compress, lzma.compress), (7, 1000))
    ):
        pipe = Pipe(tmp_path / f"pipe{number}", pack(content))
        try:
            reader = CsvReader(pipe.path, 999, block_bytes=block_bytes, **settings)
            with pytest.raises(DataFormatError, match="is a pipe, whose rows cannot be counted"):
                reader.count_rows()
            (batch,) = reader
            assert torch.equal(batch.dense, expected.dense)
            assert torch.equal(batch.sparse.values(), expected.sparse.values())
            assert reader.skipped == 1
            with pytest.raises(DataFormatError, match="is a pipe, read once already; write it"):
                list(reader)
        finally:
            pipe.done()


def test_hash_keeps_a_text_with_newlines_whole(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "clicks.csv"
    file.write_text(LAYOUTS["clicks.csv"][0])
    for more in ([], ["--skip-malformed"]):
        assert cli.main([*command("hash", file), *more]) == 0
        columns = parquet.read_table("out.parquet").to_pydict()
        assert columns["title"] == xxh64([row[2] for row in CLICKS]).tolist()
        assert columns["click"] == [row[0] for row in CLICKS]
        assert columns["null"] == [None] * len(CLICKS)


def test_recommend_needs_a_model_that_recommends(tmp_path, capfd):
    (tmp_path / "u.data").write_text(LAYOUTS["u.data"][0])
    for name in ("ratings", "autoencoder"):
        assert cli.main([*COMMANDS[name], "u.data", "--save", f"{name}.pt"]) == 0
    assert cli.main(["recommend", "autoencoder.pt", "--out", "recs.tsv"]) == 0
    for file in ("ratings.pt", "u.data"):
        assert file in error_of(capfd, "recommend", file, "--out", "recs.tsv")
