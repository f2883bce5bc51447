"""Reads snapshots and logs with NumPy, as docs/serving_format.md says, in less than 200 lines."""

import re
import struct
import zlib
from pathlib import Path

import numpy as np

HEADER, DELTA, SECTION = "<8sIIQQQQqqQQQ", "<8sIIQQQQqqII", "<IIIIQII"
TABLE = "<QIIIIQQqQQIIIIQffQIIq"
NAMES = re.findall(
    r"\w+",
    "name_offset name_bytes row_format dim row_bytes num_rows num_buckets index_seed index_offset "
    "rows_offset index_crc rows_crc miss distribution initial_seed a b num_fallbacks combiner "
    "has_padding_key padding_key",
)
BUCKET = np.dtype([("keys", "<i8", 5), ("rows", "<i4", 5), ("spilled", "<i4")])
FIRST = -(2**63)


def check(data, crc, what):
    if zlib.crc32(data) != crc:
        raise ValueError(f"{what} is damaged")


def hash_of(key):
    x = key % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def decoded(row, form, dim):
    """Decode one row, uint8, to float32."""
    if form < 3:
        wide = row.view(["<f4", "<f2", "<u2"][form])
        return wide.astype("f4") if form < 2 else (wide.astype("<u4") << 16).view("<f4")
    q = row[:-4] if form == 3 else np.stack([row[:-4] & 15, row[:-4] >> 4], 1).reshape(-1)[:dim]
    scale, bias = row[-4:].view("<f2").astype("f4")
    return scale * q.astype("f4") + bias


class Table:
    def __init__(self, data, record):
        self.__dict__.update(zip(NAMES, record, strict=True))
        self.name = bytes(data[self.name_offset :][: self.name_bytes]).decode()
        index = data[self.index_offset :][: self.num_buckets * 64]
        rows = data[self.rows_offset :][: self.num_rows * self.row_bytes]
        check(index, self.index_crc, f"the index of {self.name}")
        check(rows, self.rows_crc, f"the rows of {self.name}")
        self.buckets, self.rows = index.view(BUCKET), rows.reshape(-1, self.row_bytes)
        self.changed = {}  # rows of deltas; None for keys that they have removed

    def find(self, key):
        """Return the row of a key, or None."""
        if key in self.changed:
            return self.changed[key]
        place = hash_of(key ^ self.index_seed) * self.num_buckets >> 64
        for step in range(self.num_buckets):
            bucket = self.buckets[(place + step) % self.num_buckets]
            for slot in range(5):
                if bucket["keys"][slot] == key and bucket["rows"][slot] >= 0:
                    return self.rows[bucket["rows"][slot]]
            if not bucket["spilled"]:
                return None
        return None

    def vector(self, key):
        row = self.find(key)
        if row is None and self.miss == 2:
            signed = (hash_of(key) + 2**63) % 2**64 - 2**63
            row = self.find(FIRST + signed % self.num_fallbacks)
        if row is not None:
            return decoded(row, self.row_format, self.dim)
        if self.miss == 3:
            raise KeyError(f"{self.name} has no key {key}")
        return self.initial(key) if self.miss == 0 else np.zeros(self.dim, "f4")

    def initial(self, key):
        a, b = np.float32(self.a), np.float32(self.b)
        out = []
        for block in range(-(-self.dim // 4)):
            words = philox(self.initial_seed, key % 2**64, block)
            if self.distribution == 2:
                for u, v in (words[:2], words[2:]):
                    radius, angle = (
                        np.sqrt(-2 * np.log((u + 1) * 2.0**-32)),
                        2 * np.pi * 2.0**-32 * v,
                    )
                    out += [float(a) + float(b) * (radius * np.cos(angle))]
                    out += [float(a) + float(b) * (radius * np.sin(angle))]
            elif self.distribution == 1:
                drawn = [a + np.float32(word >> 8) * np.float32(2**-24) * (b - a) for word in words]
                out += [x if x < b else np.nextafter(b, a) for x in drawn]
            else:
                out += [a] * 4
        x = np.array(out[: self.dim], "f4")
        if self.row_format == 2:  # rounded to bfloat16
            bits = x.view("<u4")
            x = (bits + 0x7FFF + (bits >> 16 & 1) >> 16 << 16).view("<f4")
        return x

    def pooled(self, keys, combiner="sum", weights=None):
        """Pool a bag, in float32, in the order in which the library adds."""
        keep = [
            i
            for i, key in enumerate(keys)
            if not (self.has_padding_key and key == self.padding_key)
        ]
        vectors = [self.vector(int(keys[i])) for i in keep]
        scales = np.ones(len(keep), "f4") if weights is None else np.asarray(weights, "f4")[keep]
        if combiner == "max":
            return np.max(vectors, 0) if vectors else np.zeros(self.dim, "f4")

        def added(terms):
            runs = [sum(terms[i : i + 256], np.float32(0) * 0) for i in range(0, len(terms), 256)]
            return sum(runs, np.float32(0))

        total = added([s * x for s, x in zip(scales, vectors, strict=True)]) + np.zeros(
            self.dim, "f4"
        )
        if combiner == "sum" or not vectors:
            return total
        by = added(list(scales)) if combiner == "mean" else np.sqrt(added([s * s for s in scales]))
        return total / by if by else np.zeros(self.dim, "f4")


def philox(seed, key, block):
    c, k = [key % 2**32, key >> 32, block, 0], [seed % 2**32, seed >> 32]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k[0], q % 2**32, p >> 32 ^ c[3] ^ k[1], p % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


class Snapshot:
    def __init__(self, path):
        data = np.fromfile(path, np.uint8)
        magic, form, count, size, *ids, length, note, note_bytes = struct.unpack_from(HEADER, data)
        if magic != b"\x89SKS\r\n\x1a\n" or form > 1 or size != len(data):
            raise ValueError(f"{path} is no snapshot, of a newer format, or cut")
        crcs = data[4088:4096].view("<u4")
        check(data[:4092], crcs[1], "the header")
        check(data[4096:][:length], crcs[0], "the directory")
        self.log_id, self.version, self.dense_version, self.step, self.written_at = ids
        self.note = bytes(data[note:][:note_bytes]).decode()
        records = [struct.unpack_from(TABLE, data, 4096 + 256 * t) for t in range(count)]
        self.list = [Table(data, record) for record in records]
        self.tables = {table.name: table for table in self.list}


def follow(folder):
    """Read the newest base of a log and the deltas after it."""
    files = {path.name: path for path in Path(folder).iterdir()}
    snapshot = Snapshot(files[max(name for name in files if name.startswith("base-"))])
    while True:
        parts = sorted(n for n in files if n.startswith(f"delta-{snapshot.version + 1:020d}-"))
        if not parts or len(parts) < int(re.search(r"of-(\d+)", parts[0])[1]):
            return snapshot
        sections = [part for name in parts for part in read_delta(files[name], snapshot)]
        for kind, table, keys, rows in sorted(sections, key=lambda section: -section[0]):
            for i, key in enumerate(keys.tolist()):
                snapshot.list[table].changed[key] = rows[i] if kind == 1 else None
        snapshot.version += 1


def read_delta(path, snapshot):
    data = np.fromfile(path, np.uint8)
    magic, form, count, size, log_id, version, *_ = struct.unpack_from(DELTA, data)
    check(data[:124], data[124:128].view("<u4")[0], f"the header of {path}")
    found = magic == b"\x89SKD\r\n\x1a\n", form <= 1, size == len(data), log_id == snapshot.log_id
    if not all(found) or version != snapshot.version + 1:
        raise ValueError(f"{path} is no delta of this log, of another version, or cut")
    at, sections = 128, []
    for _ in range(count):
        table, kind, _, row_bytes, n, crc, header_crc = struct.unpack_from(SECTION, data, at)
        check(data[at : at + 28], header_crc, "the header of a section")
        length = -(-n * (8 + (row_bytes if kind == 1 else 0)) // 8) * 8
        body = data[at + 32 : at + 32 + length]
        check(body, crc, "a section")
        rows = body[8 * n :][: n * row_bytes].reshape(n, row_bytes) if kind == 1 else None
        sections.append((kind, table, body[: 8 * n].view("<i8"), rows))
        at += 32 + length
    return sections
