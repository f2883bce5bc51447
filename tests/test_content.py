"""Compression is recognised by a file's first bytes; errors name unsupported formats."""

import bz2
import gzip
import io
import lzma
import os
import tarfile

import pytest

from sparsekit import _content
from sparsekit._content import Content, lines_of, open_content
from sparsekit.errors import DataFormatError

TEXT = "é one\r\ntwo\rthree\n\nlast"
LINES = ["é one\r\n", "two\r", "three\n", "\n", "last"]
PACKS = {"plain": bytes, "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("pack", PACKS)
def test_lines_keep_their_ends(tmp_path, pack, mark):
    path = tmp_path / "x"
    path.write_bytes(PACKS[pack]((mark + TEXT).encode()))
    assert list(lines_of(path)) == LINES
    with open_content(path) as file:
        assert file.read() == (mark + TEXT).encode()
        assert (file.raw.regular, file.raw.plain) == (True, pack == "plain")
        assert file.raw.readable()


@pytest.mark.parametrize("pack", PACKS)
def test_a_pipe_is_read_from_its_first_byte(pack):
    read, write = os.pipe()
    os.write(write, PACKS[pack](TEXT.encode() * 100))  # more than the head, less than a pipe holds
    os.close(write)
    with io.BufferedReader(Content(f"/dev/fd/{read}")) as file:
        assert (file.raw.regular, file.raw.plain) == (False, False)
        assert file.read() == TEXT.encode() * 100
    os.close(read)


def test_an_empty_file_has_no_lines(tmp_path):
    (tmp_path / "x").touch()
    assert list(lines_of(tmp_path / "x")) == []


def tar():
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        file.addfile(tarfile.TarInfo("x"))
    return archive.getvalue()


@pytest.mark.parametrize("pack", ["plain", "gzip"])
@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"PK\3\4", "a zip archive; unpack it"),
        (b"7z\xbc\xaf'\x1c", "a 7z archive; unpack it"),
        (b"Rar!\x1a\7", "a rar archive; unpack it"),
        (b"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it"),
        (b"\x04\x22\x4d\x18", "compressed by lz4; unpack it"),
        (b"\xff\xfe", "UTF-16; convert it, `iconv -f UTF-16 -t UTF-8` does"),
        (b"\xfe\xff", "UTF-16; convert it, `iconv -f UTF-16 -t UTF-8` does"),
        (b"PAR1", "Parquet"),
        (b"ARROW1", "a file of Arrow's"),
        (b"ORC", "ORC"),
        (b"\x89HDF\r\n", "HDF5"),
        (b"\x93NUMPY", "an array of NumPy's"),
        (b"SQLite format 3\0", "a database of SQLite's"),
        (tar(), "a tar archive; unpack it"),
    ],
)
def test_files_that_are_no_text_are_named(tmp_path, pack, head, name):
    path = tmp_path / "x"
    path.write_bytes(PACKS[pack](head + bytes(9)))
    with pytest.raises(DataFormatError) as caught:
        list(lines_of(path))
    assert str(caught.value) == f"{path}: not a text file in UTF-8: it is {name}"


WHOLE = {name: pack(TEXT.encode()) for name, pack in PACKS.items()}
DAMAGED = {
    "gzip cut off": (WHOLE["gzip"][:-9], "the file is truncated: "),
    "bzip2 cut off": (WHOLE["bzip2"][:-9], "the file is truncated: "),
    "xz cut off": (WHOLE["xz"][:-9], "the file is truncated: "),
    "gzip, another sum": (WHOLE["gzip"][:-8] + bytes(8), "damaged gzip: CRC check failed"),
    "gzip, no block": (WHOLE["gzip"][:10] + b"\xff" * 20, "damaged gzip: Error -3"),
    "xz": (WHOLE["xz"][:20] + bytes(50), "damaged xz: "),
    "bzip2": (WHOLE["bzip2"][:20] + bytes(50), "damaged bzip2: "),
    "text": (b"one\n\xff\n", "not a text file in UTF-8: 'utf-8' codec can't decode byte 0xff"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_are_named(tmp_path, damage):
    path, (content, message) = tmp_path / "x", DAMAGED[damage]
    path.write_bytes(content)
    with pytest.raises(DataFormatError) as caught:
        list(lines_of(path))
    assert str(caught.value).startswith(f"{path}: {message}")


def test_what_is_neither_a_file_nor_a_pipe(tmp_path):
    with pytest.raises(DataFormatError, match=r"^/dev/zero: is a device, neither a file nor a pi"):
        Content("/dev/zero")
    with pytest.raises(IsADirectoryError):
        Content(tmp_path)
    with pytest.raises(FileNotFoundError):
        list(lines_of(tmp_path / "missing"))


def test_a_line_has_a_largest_length(tmp_path, monkeypatch):
    monkeypatch.setattr(_content, "_MOST_LINE", 10)
    path = tmp_path / "x"
    path.write_text("a" * 9 + "\n" + "b" * 9)
    with pytest.raises(DataFormatError, match=rf"^{path}: a line of over 10 letters$"):
        list(lines_of(path))
    path.write_text("a" * 8 + "\n" + "b" * 9)
    assert list(lines_of(path)) == ["a" * 8 + "\n", "b" * 9]


@pytest.mark.parametrize("head", [b"PK\3\4", b"\x1f\x8b"])
def test_a_file_that_is_refused_is_closed(tmp_path, monkeypatch, head):
    (tmp_path / "x").write_bytes(head)
    with open(tmp_path / "x", "rb") as file:
        monkeypatch.setattr(_content, "open", lambda path, mode: file, raising=False)
        with pytest.raises(DataFormatError):
            Content(tmp_path / "x")
        assert file.closed


def test_the_file_is_closed_after_its_lines(tmp_path, monkeypatch):
    closed = []
    close = Content.close
    monkeypatch.setattr(Content, "close", lambda self: (closed.append(self._file), close(self))[1])
    (tmp_path / "x").write_text(TEXT)
    assert list(lines_of(tmp_path / "x")) == LINES
    assert all(file.closed for file in closed)
    assert closed


@pytest.mark.parametrize("pack", PACKS)
def test_a_disk_that_fails_is_no_damage(tmp_path, pack):
    (tmp_path / "x").write_bytes(PACKS[pack](TEXT.encode()))

    def fail(_):
        raise OSError(5, "Input/output error")

    with Content(tmp_path / "x") as content, pytest.raises(OSError, match="Input/output error"):
        content._guarded(fail, None)
