"""Makes delta logs without a trainer, and knows what each version has."""

from __future__ import annotations

import os

import numpy as np

from sparsekit.serving.delta_file import Section, header_of, write_delta
from sparsekit.serving.encoding import decode_rows, encode_rows
from sparsekit.serving.format import ROW_FORMATS, base_name, delta_name

from .made import Table, snapshot

LOG_ID = 0xABC
TABLES = {"films": (6, "float32"), "users": (5, "int8")}


class Log:
    """A folder, and the vectors of each version that has been made.

    Attributes:
        path: the folder.
        versions: for each version, for each table, the vector of each key.
    """

    def __init__(self, path, seed=0, ranks=1, keys=120, log_id=LOG_ID, version=0):
        self.path, self.ranks, self.log_id = path, ranks, log_id
        self.chance = np.random.default_rng(seed)
        path.mkdir(exist_ok=True)
        self.last = version
        self.versions = {version: {}}
        for name, (dim, _) in TABLES.items():
            drawn = self.chance.integers(-(2**62), 2**62, keys)
            self.versions[version][name] = {int(k): self._vector(dim) for k in drawn}
        self.write_base(version)

    def _vector(self, dim):
        return self.chance.standard_normal(dim).astype(np.float32)

    def write_base(self, version):
        tables = []
        for name, (dim, rows) in TABLES.items():
            now = self.versions[version][name]
            keys = np.array(list(now), np.int64)
            vectors = np.array(list(now.values()), np.float32).reshape(-1, dim)
            tables.append(Table(keys, vectors, name, rows, miss="zeros"))
        head = {"log_id": self.log_id, "version": version, "dense_version": version * 2}
        self._write(base_name(version), snapshot(tables, **head))

    def _write(self, name, data):
        (self.path / f".{name}").write_bytes(data)
        os.replace(self.path / f".{name}", self.path / name)

    def add(self, upserts=20, erased=5, new=10, only_ranks=None):
        """Make the next version, and write its parts of all ranks, or of some."""
        self.last += 1
        after = {name: dict(rows) for name, rows in self.versions[self.last - 1].items()}
        parts = [[] for _ in range(self.ranks)]
        for number, (name, (dim, rows)) in enumerate(TABLES.items()):
            now, form = after[name], ROW_FORMATS.index(rows)
            known = np.array(list(now), np.int64)
            gone = self.chance.choice(known, min(erased, len(known)), replace=False)
            kept = self.chance.choice(known, min(upserts, len(known)), replace=False)
            added = self.chance.integers(-(2**62), 2**62, new)
            changed = np.unique(np.concatenate([kept, added]))
            width = encode_rows(np.zeros((1, dim), np.float32), rows).shape[1]
            for key in gone.tolist():
                now.pop(key)
            vectors = np.array([self._vector(dim) for _ in changed]).reshape(-1, dim)
            now |= dict(zip(changed.tolist(), vectors, strict=True))
            # A key may be erased by one rank and written by another.
            for rank in range(self.ranks):
                here = changed % self.ranks == rank
                encoded = encode_rows(vectors[here], rows)
                parts[rank] += [
                    Section(number, form, width, changed[here], encoded),
                    Section(number, form, width, gone[(gone + 1) % self.ranks == rank], None),
                ]
        # Threads may read the versions.
        self.versions = {**self.versions, self.last: after}
        for rank in range(self.ranks) if only_ranks is None else only_ranks:
            self.write_part(self.last, rank, parts[rank])
        return parts

    def write_part(self, version, rank, sections, **fields):
        head = {
            "log_id": self.log_id, "version": version, "dense_version": version * 2,
            "step": version * 3, "rank": rank, "num_ranks": self.ranks,
        } | fields  # fmt: skip
        write_delta(self.delta(version, rank), header_of(**head), sections)

    def delta(self, version, rank=0):
        return self.path / delta_name(version, rank, self.ranks)

    def base(self, version):
        return self.path / base_name(version)

    def all_keys(self, name):
        return {key for version in self.versions.values() for key in version[name]}

    def assert_serves(self, reader, version):
        """Compare all keys that ever were with what a reader has in a version."""
        assert (reader.version, reader.dense_version) == (version, version * 2)
        for name, (dim, rows) in TABLES.items():
            now = self.versions[version][name]
            keys = np.array(sorted(self.all_keys(name)), np.int64)
            vectors, found = reader.lookup(name, keys, found=True)
            there = np.array([key in now for key in keys.tolist()])
            np.testing.assert_array_equal(found, there)
            wanted = np.array([now.get(key, np.zeros(dim)) for key in keys.tolist()], np.float32)
            wanted[there] = decode_rows(encode_rows(wanted[there], rows), rows, dim)
            np.testing.assert_array_equal(vectors, wanted)
