"""Dumps are imported in pieces, tables of any size are exported, and many rows are resharded."""

import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch

import sparsekit
from sparsekit import checkpoint
from sparsekit.checkpoint import CheckpointError, convert, sources
from sparsekit.checkpoint.manifest_file import read_manifest

from .numpy_reader import read_table
from .test_convert import sok2_table, write_sok2
from .test_sources import imported


def few_at_a_time(monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 100)
    monkeypatch.setattr(convert, "_FEW_KEYS", 2)


def written(path, keys):
    rows = np.arange(2 * len(keys), dtype="f4").reshape(-1, 2)
    np.savez(path, keys=np.array(keys, "i8"), vectors=rows)
    return rows


def test_keys_of_many_pieces(tmp_path, monkeypatch):
    """The table of known keys grows without losing a key."""
    few_at_a_time(monkeypatch)
    keys = [(7 * i) % 41 - 20 for i in range(41)]
    rows = written(tmp_path / "t.npz", keys)
    imported("npz", tmp_path / "t.npz", tmp_path / "out")
    found = read_table(tmp_path / "out", "t")
    assert [found[key]["vectors"].tolist() for key in keys] == rows.tolist()
    for first in (0, 1, 17, 39):
        for second in {first + 1, 40} - {0}:
            again = [*keys[:second], keys[first], *keys[second + 1 :]]
            written(tmp_path / "t.npz", again)
            said = f"key {keys[first]} is there twice, the second time in row {second}$"
            with pytest.raises(CheckpointError, match=said):
                imported("npz", tmp_path / "t.npz", tmp_path / "new")


def test_new_keys_begin_as_in_a_layer_of_that_name(tmp_path):
    written(tmp_path / "ids.npz", [5])
    path = imported("npz", tmp_path / "ids.npz", tmp_path / "out")
    loaded, alike = sparsekit.Embedding(9, 2), sparsekit.Embedding(9, 2, name="ids")
    checkpoint.load(torch.nn.ModuleDict({"ids": loaded}), path)
    assert torch.equal(loaded(torch.arange(4)), alike(torch.arange(4)))
    assert read_manifest(path).version == sparsekit.build_info()["version"]
    written(tmp_path / "ids.npz", [])
    path = imported("npz", tmp_path / "ids.npz", tmp_path / "empty")
    checkpoint.load(torch.nn.ModuleDict({"ids": loaded}), path)
    assert len(loaded.table) == 0


ROWS = np.arange(23 * 5, dtype="<f4").reshape(23, 5)
DUMPS = {
    "npz": lambda path: np.savez(path / "t.npz", vectors=ROWS),
    "npz by columns": lambda path: np.savez(path / "t.npz", vectors=np.asfortranarray(ROWS)),
    "sok1": lambda path: [
        (path / "t_keys.file").write_bytes(np.arange(23).tobytes()),
        (path / "t_values.file").write_bytes(ROWS.tobytes()),
    ],
    "sok2": lambda path: write_sok2(path / "sok2", [sok2_table("t", 1, "q", list(range(23)), 5)]),
    "torchrec": lambda path: torch.save(
        {"embeddings.t.weight": torch.from_numpy(ROWS)}, path / "state.pt"
    ),
}


@pytest.mark.parametrize("dump", DUMPS)
def test_pieces_have_as_many_rows_as_fit(tmp_path, monkeypatch, dump):
    """With fewer rows per piece, a large table would be read a few bytes at a time."""
    monkeypatch.setattr(sources, "PIECE", 3 * (8 + 5 * 4) + 1)
    DUMPS[dump](tmp_path)
    path = {"sok2": tmp_path / "sok2", "torchrec": tmp_path / "state.pt"}.get(dump, tmp_path)
    (source,) = checkpoint.sources_of(dump.split()[0], path, {"": 5})
    assert [len(keys) for keys, _ in source.pieces()] == [3] * 7 + [2]


def test_tables_of_a_folder_are_in_the_order_of_names(tmp_path):
    for name in ("c", "a", "d", "b"):
        np.savez(tmp_path / f"{name}.npz", vectors=ROWS)
        (tmp_path / f"{name}_keys.file").write_bytes(b"")
        (tmp_path / f"{name}_values.file").write_bytes(b"")
    for kind in ("npz", "sok1"):
        found = checkpoint.sources_of(kind, tmp_path, {"": 5})
        assert [table.name for table in found] == ["a", "b", "c", "d"]


def test_vectors_that_are_too_long(tmp_path):
    np.savez(tmp_path / "t.npz", vectors=np.empty((0, 2**24), "f4"))
    assert checkpoint.sources_of("npz", tmp_path)[0].dim == 2**24
    np.savez(tmp_path / "t.npz", vectors=np.empty((0, 2**24 + 1), "f4"))
    with pytest.raises(CheckpointError, match=r"t\.npz: vectors of dim 16777217"):
        checkpoint.sources_of("npz", tmp_path)


def test_as_many_keys_as_a_hash_table_can_have(tmp_path, monkeypatch):
    few_at_a_time(monkeypatch)
    written(tmp_path / "t.npz", range(11))
    monkeypatch.setattr(convert, "_MOST_KEYS", 11)
    imported("npz", tmp_path / "t.npz", tmp_path / "out")
    monkeypatch.setattr(convert, "_MOST_KEYS", 10)
    with pytest.raises(CheckpointError, match=r"t\.npz: has more than 10 keys"):
        imported("npz", tmp_path / "t.npz", tmp_path / "new")


@pytest.mark.parametrize("format", convert.FORMATS)
def test_an_export_that_cannot_be_written(tmp_path, monkeypatch, format):
    if format == "parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow")
    checkpoint.save(sparsekit.Embedding(9, 2, name="t"), tmp_path / "saved")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, f"_write_{format}", fail)
    said = rf"table\.{format}: cannot be written: No space left on device"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.export(tmp_path / "saved", tmp_path / "out", format)
    assert os.listdir(tmp_path) == ["saved"]


def test_no_group_of_rows_of_a_parquet_file_is_empty(tmp_path):
    """No row group is empty even if all rows of the base have changed."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    keep = checkpoint.Checkpoints(tmp_path / "saved", complete_every=2)
    layer = sparsekit.Embedding(9, 2, name="t")
    for step in range(2):
        layer.assign(torch.arange(3), torch.full((3, 2), float(step)))
        keep.save(step, layer)
    out = checkpoint.export(tmp_path / "saved", tmp_path / "out", "parquet")
    about = parquet.ParquetFile(out / "table.parquet").metadata
    assert [about.row_group(i).num_rows for i in range(about.num_row_groups)] == [3]


def test_arrays_of_a_npz_may_be_of_any_size(tmp_path):
    """Arrays use zip's format for large files, since zipfile does not know sizes in advance."""
    checkpoint.save(sparsekit.Embedding(9, 2, name="t"), tmp_path / "saved")
    checkpoint.export(tmp_path / "saved", tmp_path / "out", "npz")
    path = tmp_path / "out" / "table.npz"
    with zipfile.ZipFile(path) as archive:
        headers = [path.read_bytes()[each.header_offset :] for each in archive.infolist()]
    assert len(headers) == 2
    for header in headers:
        # The version that the header needs depends on Python's; the field of 64-bit sizes does not.
        name, extra = struct.unpack_from("<HH", header, 26)
        assert extra >= 20
        assert struct.unpack_from("<HH", header, 30 + name) == (1, 16)


@pytest.mark.parametrize("kind", ["", "npzs", "NPZ", "csv"])
def test_kinds_and_formats_there_are_not(tmp_path, kind):
    with pytest.raises(ValueError, match=f"sources_of: kind='{kind}' is none of sok1, sok2, npz"):
        checkpoint.sources_of(kind, tmp_path)
    with pytest.raises(ValueError, match=f"export: format='{kind}' is none of npz, parquet"):
        checkpoint.export(tmp_path, tmp_path / "out", kind)
    for known in convert.KINDS:
        with pytest.raises(CheckpointError, match="none: there is no such file or folder"):
            checkpoint.sources_of(known, tmp_path / "none")


@pytest.mark.parametrize("world_size", [0, -1])
def test_reshard_for_no_ranks(tmp_path, world_size):
    with pytest.raises(ValueError, match=f"reshard: world_size={world_size} must be >= 1"):
        checkpoint.reshard(tmp_path, tmp_path / "out", world_size)


@pytest.mark.parametrize("hash_table", [True, False])
def test_reshard_of_more_rows_than_16_bits_count(tmp_path, hash_table):
    rows = 2 * 33_000 + 1
    layer = sparsekit.Embedding(rows + 9, 1, name="t", use_hashtable=hash_table)
    layer.assign(torch.arange(rows), torch.arange(rows)[:, None].float())
    checkpoint.save(layer, tmp_path / "saved")
    for world_size in (1, 2):
        out = checkpoint.reshard(tmp_path / "saved", tmp_path / f"out{world_size}", world_size)
        table = read_manifest(out).tables["table"]
        size = rows if hash_table else rows + 9
        assert table.size == size
        most = max(shard.size for shard in table.shards)
        assert most > 2**15
        assert table.capacity == (rows + 9 if hash_table else most)
        found = checkpoint.diff(tmp_path / "saved", out)
        assert (found.tables["table"].same, bool(found)) == (size, False)


def test_reshard_onto_fewer_ranks_than_a_capacity_is_for(tmp_path):
    """The capacity grows when a single rank gets more rows than the saved capacity of a rank."""
    layer = sparsekit.Embedding(40, 1, name="t")
    layer.assign(torch.arange(40), torch.ones(40, 1))
    saved = checkpoint.save(layer, tmp_path / "saved")
    four = checkpoint.reshard(saved, tmp_path / "four", 4)
    table = read_manifest(four).tables["table"]
    small = checkpoint.manifest_file.dataclasses.replace(table, capacity=12)
    values = checkpoint.manifest_file.dataclasses.replace(
        read_manifest(four), tables={"table": small}
    )
    for name in ("manifest.json", "manifest.crc32"):
        (four / name).unlink()
    checkpoint.manifest_file.write_manifest(four, values)
    one = checkpoint.reshard(four, tmp_path / "one", 1)
    assert read_manifest(one).tables["table"].capacity == 40


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_pickle_is_run(tmp_path):
    state = {"embeddings.t.weight": torch.ones(2, 2), "odd": Harm(tmp_path / "harm")}
    torch.save(state, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(state["odd"]))
    for name in "ab":
        said = rf"{name}\.pt: is no state dict of plain tensors: (Weights only|mmap can) [^\n]*$"
        with pytest.raises(CheckpointError, match=said):
            checkpoint.sources_of("torchrec", tmp_path / f"{name}.pt")
    assert not (tmp_path / "harm").exists()


ODD_MATRICES = {
    "a vector": (torch.ones(3), "is no matrix"),
    "a cube": (torch.ones(3, 2, 2), "is no matrix"),
    "a list": ([1.0], "is no matrix"),
    "no columns": (torch.ones(3, 0), "has vectors of dim 0"),
    "whole numbers": (torch.ones(3, 2, dtype=torch.int64), r"is torch\.int64, torch\.strided$"),
    "complex": (torch.ones(3, 2, dtype=torch.complex64), r"is torch\.complex64"),
    "sparse": (torch.eye(2).to_sparse(), r"is torch\.float32, torch\.sparse_coo$"),
    "meta": (torch.ones(3, 2, device="meta"), r"torch\.strided, on meta$"),
    "expanded": (torch.ones(1, 2).expand(9, 2), "has 72 bytes, and there are 8 "),
}


@pytest.mark.parametrize("kind", ODD_MATRICES)
def test_odd_matrices_of_torchrec(tmp_path, kind):
    value, said = ODD_MATRICES[kind]
    for name in ("embeddings.t.weight", "a.b.embedding_bags.t.weight"):
        torch.save({name: value}, tmp_path / "state.pt")
        with pytest.raises(CheckpointError, match=rf"state\.pt: {name} .*{said}"):
            checkpoint.sources_of("torchrec", tmp_path / "state.pt")


@pytest.mark.parametrize(
    "name", ["embeddings.t.bias", "xembeddings.t.weight", "embeddings.t.u.weight", "t.weight"]
)
def test_names_that_are_no_tables_of_torchrec(tmp_path, name):
    torch.save({name: torch.ones(2, 2)}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"has no \*\.embedding_bags\.<table>\.weight"):
        checkpoint.sources_of("torchrec", tmp_path / "state.pt")


SOK1 = {
    "empty": (0, 0, None),
    "8 bytes": (24, 48, None),
    "4 bytes": (12, 48, None),
    "keys without vectors": (8, 0, "0 bytes are no float32 vectors of dim 4 for the 8 bytes"),
    "half a vector": (24, 40, "40 bytes are no float32"),
    "half a key": (6, 16, "16 bytes are no float32"),
    "16 bytes": (48, 48, "48 bytes are no float32"),
}


@pytest.mark.parametrize("kind", SOK1)
def test_sizes_of_sok1(tmp_path, kind):
    keys, values, said = SOK1[kind]
    (tmp_path / "t_keys.file").write_bytes(bytes(range(keys)))
    (tmp_path / "t_values.file").write_bytes(bytes(values))
    if said:
        with pytest.raises(CheckpointError, match=rf"t_values\.file: {said}"):
            checkpoint.sources_of("sok1", tmp_path, {"": 4})
    else:
        (source,) = checkpoint.sources_of("sok1", tmp_path, {"": 4})
        assert source.rows == values // 16
        assert [len(k) for k, _ in source.pieces()] == [3] * bool(values)
        with pytest.raises(CheckpointError, match="give --dim, or --dim t=N"):
            checkpoint.sources_of("sok1", tmp_path, {"u": 4})


@pytest.mark.parametrize("change", [b"x", -1], ids=["longer", "shorter"])
def test_a_list_of_sok2_of_another_size(tmp_path, change):
    write_sok2(tmp_path / "dump", [sok2_table("t", 1, "q", [5], 4)] * 2)
    meta = tmp_path / "dump" / "meta_info"
    content = meta.read_bytes()
    meta.write_bytes(content[:change] if change == -1 else content + change)
    with pytest.raises(CheckpointError, match="meta_info: is damaged: its size is not that of 2 "):
        checkpoint.sources_of("sok2", tmp_path / "dump")


@pytest.mark.parametrize(("key_type", "code"), [(0, "i"), (1, "q"), (2, "I"), (3, "Q")])
def test_only_uint32_keys_of_sok2_may_have_eight_bytes(tmp_path, key_type, code):
    """A file with 16 bytes for two keys of a 4-byte type is accepted only for uint32."""
    table = sok2_table("t", key_type, code, [5, 6], 4)
    write_sok2(tmp_path / "dump", [table])
    with open(tmp_path / "dump" / "t-key", "ab") as file:
        file.write(bytes(8))
    if key_type == 2:
        (source,) = checkpoint.sources_of("sok2", tmp_path / "dump")
        assert torch.cat([keys for keys, _ in source.pieces()]).tolist() == [5 + 6 * 2**32, 0]
        return
    size = 8 * 2 + 8 if key_type in (1, 3) else 16
    said = rf"t-key: is damaged: it has {size} bytes behind its head, and 2 rows have {size - 8}$"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.sources_of("sok2", tmp_path / "dump")


def test_a_state_of_torchrec_behind_a_link(tmp_path):
    torch.save({"embeddings.t.weight": torch.ones(2, 2)}, tmp_path / "state.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"link\.pt: cannot be read: it is a link"):
        checkpoint.sources_of("torchrec", tmp_path / "link.pt")


def test_a_dump_that_cannot_be_read(tmp_path):
    class Broken:
        def read(self, _):
            raise OSError(5, "Input/output error")

    with pytest.raises(CheckpointError, match=r"t\.npz: cannot be read: Input/output error"):
        sources.exactly(Broken(), 5, tmp_path / "t.npz")
