"""Unusual but valid files of other libraries are imported; damaged files are refused."""

import io
import os
import pickle
import struct
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from peak_memory import forget_peak, peak

from sparsekit import checkpoint, cli
from sparsekit.checkpoint import CheckpointError

from .mutations import damaged, mutated, seeds, time_limit
from .numpy_reader import read_table
from .test_convert import sok2_table, vectors, write_sok2


def imported(kind, path, out):
    return checkpoint.import_tables(checkpoint.sources_of(kind, path, {"": 4}), out)


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    ("keys_as", "vectors_as"), [("<i8", ">f4"), (">i8", "<f2"), (">u4", ">f8"), ("|u1", "<f4")]
)
def test_npz_of_any_order(tmp_path, monkeypatch, save, order, keys_as, vectors_as):
    monkeypatch.setattr("sparsekit.checkpoint.sources.PIECE", 100)
    rows = np.random.default_rng(0).standard_normal((23, 5))
    vectors = np.asarray(rows.astype(vectors_as), order=order)
    save(tmp_path / "t.npz", keys=np.arange(40, 63).astype(keys_as), vectors=vectors)
    imported("npz", tmp_path / "t.npz", tmp_path / "out")
    found = read_table(tmp_path / "out", "t")
    assert sorted(found) == list(range(40, 63))
    for key, row in found.items():
        wanted = vectors[key - 40].astype("<f8" if vectors_as == ">f8" else "<f4")
        assert row["vectors"].tolist() == wanted.tolist(), key


@pytest.mark.parametrize(
    ("arrays", "names"),
    [
        ({"keys": np.arange(3)}, "no vectors"),
        ({"keys": np.arange(2), "vectors": vectors(3, 5)}, "2 keys and 3 vectors"),
        ({"keys": np.arange(3.0), "vectors": vectors(3, 5)}, "keys should be whole numbers"),
        ({"vectors": np.array([{}, {}], dtype=object)}, "vectors should be floating-point"),
        ({"vectors": np.arange(4)}, "vectors should be floating-point"),
        ({"vectors": vectors(4, 1)[:, 0]}, r"vectors should be .* 2 dim.*, and is '<f4' \[4\]"),
        ({"vectors": vectors(3, 0)}, "vectors of dim 0"),
    ],
)
def test_npz_of_other_things_is_refused(tmp_path, arrays, names):
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(CheckpointError, match=rf"t\.npz: (has (keys, and )?)?{names}"):
        checkpoint.sources_of("npz", tmp_path / "t.npz")


@pytest.mark.parametrize(
    "comment",
    [b"\xff", b"of mine", b"null", b"3", b"[1]", b"{}", b'{"table": 3}', b"[" * 60_000],
)
def test_comments_of_other_programs_name_no_table(tmp_path, comment):
    path = tmp_path / "t.npz"
    np.savez(path, vectors=vectors(3, 5))
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = comment
    assert [table.name for table in checkpoint.sources_of("npz", path)] == ["t"]


def test_npz_that_is_damaged_is_refused(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, vectors=vectors(30, 5))
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"t\.npz"):
        checkpoint.import_tables(checkpoint.sources_of("npz", path), tmp_path / "out")
    path.write_bytes(content[:200])
    with pytest.raises(CheckpointError, match=r"t\.npz: is no \.npz file"):
        checkpoint.sources_of("npz", path)


def npz_of(path, headers, contents, method=zipfile.ZIP_DEFLATED, version=b"\x01\x00"):
    """Write an archive of arrays with arbitrary headers."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, header in headers.items():
            text = header if isinstance(header, bytes) else repr(header).encode("utf8", "replace")
            length = struct.pack("<H" if version[0] == 1 else "<I", len(text) % 2**16)
            start = b"\x93NUMPY" + version + length
            archive.writestr(f"{name}.npy", start + text + contents.get(name, b""))


def header(descr, *shape):
    return {"descr": descr, "fortran_order": False, "shape": shape}


CLAIMS = {
    "rows": ({"vectors": header("<f4", 2**40, 8)}, {}),
    "keys": ({"vectors": header("<f4", 2**28, 1), "keys": header("<i8", 2**28)}, {}),
    # The data are as large as the header says, but compress to almost nothing.
    "repeated keys": (
        {"vectors": header("<f4", 1 << 24, 1), "keys": header("|u1", 1 << 24)},
        {"vectors": bytes(1 << 26), "keys": bytes(1 << 24)},
    ),
    "a long header": ({"vectors": b"{'descr': " + b" " * 60_000 + b"'<f4'}"}, {}),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_memory_is_that_of_what_a_npz_has(tmp_path, claim):
    npz_of(tmp_path / "t.npz", *CLAIMS[claim])
    imported_before = open_files()
    before = forget_peak()
    with pytest.raises(CheckpointError, match=r"t\.npz"):
        imported("npz", tmp_path / "t.npz", tmp_path / "out")
    assert peak() - before < 64 << 20
    assert open_files() == imported_before
    assert os.listdir(tmp_path) == ["t.npz"]


def test_rows_that_no_bytes_stand_for(tmp_path):
    """A dump of an expanded tensor, with more elements than the file has data for, is refused."""
    state = {"embedding_bags.t.weight": torch.zeros(1, 8).expand(2**33, 8)}
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"state\.pt: .*there are 32 "):
        imported("torchrec", tmp_path / "state.pt", tmp_path / "out")


def test_a_method_that_numpy_does_not_write(tmp_path):
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        npz_of(tmp_path / "t.npz", {"vectors": header("<f4", 0, 8)}, {}, method)
        with pytest.raises(CheckpointError, match=f"compressed by method {method}"):
            checkpoint.sources_of("npz", tmp_path / "t.npz")


@pytest.mark.parametrize("step", ["write", "flush"])
@pytest.mark.parametrize("reason", [(28, "No space left on device"), ("no more",)])
def test_columns_that_cannot_be_unpacked(tmp_path, monkeypatch, step, reason):
    np.savez(tmp_path / "t.npz", vectors=np.asfortranarray(np.ones((9, 4), "f4")))

    def fail(*_):
        raise OSError(*reason)

    full = type("Full", (io.BytesIO,), {step: fail})
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    said = rf"t\.npz: .* unpacked in .*: {reason[-1]}; set TMPDIR .* for 144 bytes$"
    with pytest.raises(CheckpointError, match=said):
        imported("npz", tmp_path / "t.npz", tmp_path / "out")


def odd_npz(path, chance):
    headers = {"vectors": header("<f4", 6, 4), "keys": header("<i8", 6)}
    contents = {"vectors": bytes(96), "keys": np.arange(6, dtype="<i8").tobytes()}
    kind = chance.choice(["header", "header", "content", "archive", "version", "method"])
    if kind == "header":
        listed = {name: {**each, "shape": list(each["shape"])} for name, each in headers.items()}
        headers = mutated(listed, chance)
        for each in headers.values() if isinstance(headers, dict) else ():
            if isinstance(each, dict) and isinstance(each.get("shape"), list):
                each["shape"] = tuple(each["shape"])
    elif kind == "content":
        name = chance.choice(["vectors", "keys"])
        contents[name] = damaged(contents[name], chance)
    version = bytes([chance.randrange(5), 0]) if kind == "version" else b"\x01\x00"
    methods = [zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
    method = chance.choice(methods) if kind == "method" else zipfile.ZIP_DEFLATED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns if two members have the same name
        npz_of(path, headers, contents, method, version)
    if kind == "archive":
        path.write_bytes(damaged(path.read_bytes(), chance))


def odd_sok1(path, chance):
    path.mkdir()
    contents = {"t_keys.file": np.arange(6, dtype="<i8").tobytes(), "t_values.file": bytes(96)}
    name = chance.choice(sorted(contents))
    contents[name] = damaged(contents[name], chance)
    if chance.random() < 0.2:
        del contents[name]
    for each, content in contents.items():
        (path / each).write_bytes(content)


def odd_sok2(path, chance):
    table = sok2_table("net/t:0", 1, "q", list(range(6)), 4)
    write_sok2(path, [table, sok2_table("u", 2, "I", [5], 4)])
    file = chance.choice(sorted(path.iterdir()))
    content = file.read_bytes()
    if file.name == "meta_info" and chance.random() < 0.7:
        # Overwrite the name of a table or of an optimizer, or a number.
        place, size = chance.choice(
            [(44, 256), (556, 32), (0, 4), (4, 4), (12, 4), (20, 4), (28, 8)]
        )
        odd = chance.choice([
            "**", "*/..", "../x", "\0", "a\nb", "", "é" * 200, struct.pack(">I", 2**31),
            struct.pack(">Q", 2**62), b"\xff" * 8,
        ])  # fmt: skip
        odd = (odd.encode() if isinstance(odd, str) else odd)[:size].rjust(size)
        file.write_bytes(content[:place] + odd + content[place + size :])
    elif chance.random() < 0.2:
        file.unlink()
    else:
        file.write_bytes(damaged(content, chance))


def odd_torchrec(path, chance):
    state = {"embedding_bags.t.weight": torch.ones(6, 4), "embeddings.u.weight": torch.ones(2, 3)}
    kind = chance.choice(["value", "value", "archive", "archive", "pickle"])
    if kind == "value":
        odd = [
            torch.ones(3), torch.ones(2, 0), torch.ones(2, 2).long(), torch.ones(2, 2).cfloat(),
            torch.ones(2, 2).to_sparse(), torch.ones(2, 2, device="meta"), 5, None, [], "x",
            torch.ones(1, 2).expand(2**40, 2), torch.ones(0, 3), torch.ones(2, 2).half(),
            torch.ones(2, 2).to(torch.float8_e4m3fn), torch.ones(4, 2).t(), {1: 2}, torch.nn.Linear,
        ]  # fmt: skip
        name = chance.choice([*state, "a.embeddings.t.weight", "embeddings.é.weight", 5])
        state[name] = chance.choice(odd)
    torch.save(chance.choice([state, state, state, [state], 5]), path)
    if kind == "archive":
        path.write_bytes(damaged(path.read_bytes(), chance))
    elif kind == "pickle":
        path.write_bytes(damaged(pickle.dumps({"embeddings.t.weight": [1.0]}), chance))


def flip_behind(name, by):
    """Return a function that inverts the byte `by` bytes after the first occurrence of `name`."""

    def change(content):
        content[content.index(name) + by] ^= 0xFF

    return change


def ask_for_a_password(content):
    for name, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(name) + at] |= 1


ODD_ARCHIVES = {
    "deflated bytes": flip_behind(b"vectors.npy", 40),
    "a password": ask_for_a_password,
    "a method": flip_behind(b"PK\1\2", 10),
    "a version": flip_behind(b"PK\1\2", 6),
}
ODD_HEADERS = [
    b"{'descr': '<f4', 'shape': (3, 5), 'fortran_order': Fal", b"(" * 3000, b"\0", b"9" * 9000,
    b"{[]: 1}", b"{}", b"[]", b"'\\N{x}'", b"'''", b"\xff\xfe", b"-" * 9000 + b"1",
]  # fmt: skip


@pytest.mark.parametrize("kind", ODD_ARCHIVES)
def test_odd_archives_are_refused(tmp_path, kind):
    rows = np.random.default_rng(0).integers(0, 9, (300, 5)).astype("f4")
    np.savez_compressed(tmp_path / "t.npz", vectors=rows)
    content = bytearray((tmp_path / "t.npz").read_bytes())
    ODD_ARCHIVES[kind](content)
    (tmp_path / "t.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"t\.npz: (is no \.npz|vectors is)"):
        imported("npz", tmp_path / "t.npz", tmp_path / "out")
    assert os.listdir(tmp_path) == ["t.npz"]


@pytest.mark.parametrize("header", ODD_HEADERS)
def test_odd_headers_of_arrays_are_refused(tmp_path, header):
    npz_of(tmp_path / "t.npz", {"vectors": header}, {})
    with pytest.raises(CheckpointError, match=r"t\.npz: vectors is damaged"):
        checkpoint.sources_of("npz", tmp_path / "t.npz")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("fortran_order", [0, 1, None, "False"]),
        ("shape", [[0, 5], 5, (0, -5), (0, 5.0), (False, 5)]),
        ("descr", ["<f16", "<c8", "|O", "<f4\n", "f4f4", "float32", "|S4", 5, ["<f4"], "<i4"]),
    ],
)
def test_values_of_headers_of_arrays(tmp_path, key, values):
    names = {"descr": "vectors should be floating-point numbers of 2 dim"}
    for value in values:
        npz_of(tmp_path / "t.npz", {"vectors": {**header("<f4", 0, 5), key: value}}, {})
        said = names.get(key, r"vectors is damaged: its header is \{'descr'")
        with pytest.raises(CheckpointError, match=rf"t\.npz: {said}"):
            checkpoint.sources_of("npz", tmp_path / "t.npz")


@pytest.mark.parametrize("version", range(5))
def test_versions_and_lengths_of_headers_of_arrays(tmp_path, version):
    text = repr(header(">f2", 0, 5)).encode()
    for length in (len(text), 10_000, 10_001):
        content = {"vectors": text.ljust(length)}
        npz_of(tmp_path / "t.npz", content, {}, version=bytes([version, 0]))
        if version in (1, 2, 3) and length <= 10_000:
            (source,) = checkpoint.sources_of("npz", tmp_path / "t.npz")
            assert (source.rows, source.dim) == (0, 5)
            continue
        said = "it begins with" if version in (0, 4) else "it has a header of 10001 bytes"
        with pytest.raises(CheckpointError, match=rf"t\.npz: vectors is damaged: {said}"):
            checkpoint.sources_of("npz", tmp_path / "t.npz")


def test_arrays_of_a_npz_that_are_left(tmp_path):
    np.savez(tmp_path / "t.npz", vectors=vectors(2, 2), **dict.fromkeys("cadb", vectors(1, 1)))
    assert checkpoint.sources_of("npz", tmp_path / "t.npz")[0].left == "a, b, c, d"


@pytest.mark.parametrize("size", [39, 41])
def test_an_array_of_another_size_than_its_header_says(tmp_path, size):
    npz_of(tmp_path / "t.npz", {"vectors": header("<f4", 2, 5)}, {"vectors": bytes(size)})
    said = rf"t\.npz: vectors is damaged: it has {size} bytes, and float32 \[2, 5\] has 40"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.sources_of("npz", tmp_path / "t.npz")


@pytest.mark.parametrize("optimizer", ["**", "*", "/", "..", "[", "\0", "é"])
def test_names_of_optimizers_are_no_patterns(tmp_path, optimizer):
    write_sok2(tmp_path / "dump", [sok2_table("t", 1, "q", [5, 6, 7], 4)])
    meta = (tmp_path / "dump" / "meta_info").read_bytes()
    (tmp_path / "dump" / "meta_info").write_bytes(meta[:-32] + optimizer.encode().rjust(32))
    (source,) = checkpoint.sources_of("sok2", tmp_path / "dump")
    assert source.left == ""


@time_limit
@pytest.mark.parametrize("kind", ["npz", "sok1", "sok2", "torchrec"])
def test_odd_dumps_are_imported_or_refused(tmp_path, capsys, kind):
    """A dump gives a valid checkpoint, or no output and a one-line error with the file's name."""
    results = {0: 0, 2: 0}
    files = open_files()
    before = forget_peak()
    for number, chance in enumerate(seeds()):
        folder = tmp_path / str(number)
        folder.mkdir()
        dump, out = folder / ("t.npz" if kind == "npz" else "dump"), folder / "out"
        {"npz": odd_npz, "sok1": odd_sok1, "sok2": odd_sok2, "torchrec": odd_torchrec}[kind](
            dump, chance
        )
        status = cli.main(
            ["checkpoint", "import", str(dump), str(out), "--from", kind, "--dim", "4"]
        )
        results[status] += 1
        text = capsys.readouterr().err
        if status:
            last = text.splitlines()[-1]
            assert last.startswith("sparsekit: "), (number, text)
            assert str(dump) in last, (number, text)
        else:
            checkpoint.reshard(out, folder / "again", 2)  # the result is a valid checkpoint
        assert {path.name for path in folder.iterdir()} <= {dump.name, "out", "again"}, number
        assert out.exists() == (status == 0)
    assert peak() - before < 100 << 20
    assert open_files() == files
    print(results)
    assert min(results.values()) > 0, results


def test_names_of_tables_that_no_checkpoint_can_have(tmp_path):
    torch.save({f"embeddings.{'t' * 2000}.weight": torch.ones(2, 2)}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="at most 1000 characters"):
        imported("torchrec", tmp_path / "state.pt", tmp_path / "out")
    assert os.listdir(tmp_path) == ["state.pt"]


def test_a_path_that_is_not_utf8(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    np.savez(folder / "t.npz", vectors=np.ones((2, 2), "f4"))
    imported("npz", folder / "t.npz", folder / "saved")
    for format in checkpoint.convert.FORMATS:
        (file,) = checkpoint.export(folder / "saved", folder / format, format).iterdir()
        assert file.name == f"t.{format}"


def test_a_folder_without_dumps_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no \*_keys\.file"):
        checkpoint.sources_of("sok1", tmp_path)
    with pytest.raises(CheckpointError, match=r"has no \.npz file"):
        checkpoint.sources_of("npz", tmp_path)
    np.savez(tmp_path / "t.npz")
    with pytest.raises(CheckpointError, match=r"t\.npz: has nothing, and no vectors"):
        checkpoint.sources_of("npz", tmp_path)
