"""Reads a checkpoint with NumPy alone, following docs/checkpoint_format.md, in under 60 lines."""

import json
import zlib
from pathlib import Path

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1"}


def read_file(path, crc32):
    content = path.read_bytes()
    if zlib.crc32(content) != int(crc32, 16):
        raise ValueError(f"{path} is damaged")
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + place for place in entry["data_offsets"])
        part = content[begin:end]
        if entry["dtype"] == "BF16":  # BF16 is the upper half of a float32
            wide = np.frombuffer(part, "<u2").astype("<u4") << 16
            tensors[name] = wide.view("<f4").reshape(entry["shape"])
        else:
            tensors[name] = np.frombuffer(part, DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def read_manifest(folder):
    content = (folder / "manifest.json").read_bytes()
    if zlib.crc32(content) != int((folder / "manifest.crc32").read_text(), 16):
        raise ValueError(f"{folder} has a damaged manifest")
    manifest = json.loads(content)
    if manifest["format"] != "sparsekit checkpoint" or manifest["format_version"] > 2:
        raise ValueError(f"{folder} is of another format")
    return manifest


def read_table(folder, name):
    """Read a table from a chain of checkpoints; return a dict of key to its tensors by name."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    table, rows = manifest["tables"][name], {}
    if not table["complete"]:
        base = manifest["base"]
        if read_manifest(folder.parent / base["folder"])["id"] != base["id"]:
            raise ValueError(f"{folder} follows another checkpoint")
        rows = read_table(folder.parent / base["folder"], name)
    names = [shard["file"] for shard in table["shards"]]
    parts = [read_file(folder / name, manifest["files"][name]["crc32"]) for name in names]
    for key in (key for tensors in parts for key in tensors.pop("removed", [])):
        rows.pop(int(key), None)
    for tensors in parts:
        keys, _, _ = (tensors.pop(part, None) for part in ("keys", "rows", "counts"))
        for number, key in enumerate(keys):
            rows[int(key)] = {name: tensor[number] for name, tensor in tensors.items()}
    return rows
