"""Makes snapshot files of the documented format with NumPy, and looks up in what it has made."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, field

import numpy as np

PAGE = 4096
MAGIC = b"\x89SKS\r\n\x1a\n"
FORMATS = ("float32", "float16", "bfloat16", "int8", "int4")
MISSES = ("initial", "zeros", "fallback", "error")
COMBINERS = ("sum", "mean", "sqrtn", "none", "max")
DISTRIBUTIONS = ("constant", "uniform", "normal")
RUN = 256  # rows that are added before their sum is added to that of a bag
FIRST_FALLBACK = -(2**63)

HEADER = np.dtype(
    {
        "names": [
            *("magic", "format_version", "num_tables", "file_bytes", "log_id", "version"),
            *("dense_version", "step", "written_at", "directory_bytes", "note_offset"),
            *("note_bytes", "directory_crc", "crc"),
        ],
        "formats": ["S8", "<u4", "<u4", *["<u8"] * 4, "<i8", "<i8", *["<u8"] * 3, "<u4", "<u4"],
        "offsets": [0, 8, 12, *range(16, 88, 8), 4088, 4092],
        "itemsize": PAGE,
    }
)
RECORD = np.dtype(
    {
        "names": [
            *("name_offset", "name_bytes", "row_format", "dim", "row_bytes", "num_rows"),
            *("num_buckets", "index_seed", "index_offset", "rows_offset", "index_crc", "rows_crc"),
            *("miss", "distribution", "initial_seed", "a", "b", "num_fallbacks", "combiner"),
            *("has_padding_key", "padding_key"),
        ],
        "formats": [
            *("<u8", "<u4", "<u4", "<u4", "<u4", "<u8"),
            *("<u8", "<i8", "<u8", "<u8", "<u4", "<u4"),
            *("<u4", "<u4", "<u8", "<f4", "<f4", "<u8", "<u4"),
            *("<u4", "<i8"),
        ],
        "offsets": [
            *(0, 8, 12, 16, 20, 24),
            *(32, 40, 48, 56, 64, 68),
            *(72, 76, 80, 88, 92, 96, 104),
            *(108, 112),
        ],
        "itemsize": 256,
    }
)
BUCKET = np.dtype([("keys", "<i8", 5), ("rows", "<i4", 5), ("spilled", "<i4")])


@dataclass
class Table:
    """A table to be written: vectors float32 ``[n, dim]`` of int64 keys ``[n]``."""

    keys: np.ndarray
    vectors: np.ndarray
    name: str = "table"
    row_format: str = "float32"
    miss: str = "initial"
    distribution: str = "uniform"
    initial_seed: int = 17
    a: float = -0.5
    b: float = 0.5
    num_fallbacks: int = 0
    combiner: str = "mean"
    padding_key: int | None = None
    index_seed: int = 12345
    num_buckets: int = 0
    rows: np.ndarray = field(init=False)  # encoded

    def __post_init__(self) -> None:
        self.rows = encoded(self.vectors, self.row_format)
        self.num_buckets = self.num_buckets or max(1, -(-len(self.keys) // 3))


# ---- rows ----


def encoded(vectors: np.ndarray, row_format: str) -> np.ndarray:
    """Encode float32 vectors ``[n, dim]`` as rows, uint8 ``[n, row_bytes]``."""
    n, dim = vectors.shape
    if row_format == "float32":
        return vectors.astype("<f4").view(np.uint8).reshape(n, 4 * dim)
    if row_format == "float16":
        return vectors.astype("<f2").view(np.uint8).reshape(n, 2 * dim)
    if row_format == "bfloat16":
        bits = vectors.astype("<f4").view(np.uint32).astype(np.uint64)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return high.astype("<u2").view(np.uint8).reshape(n, 2 * dim)
    most = 255 if row_format == "int8" else 15
    bias = vectors.min(1, initial=np.inf).astype("<f2")
    spread = vectors.max(1, initial=-np.inf) - bias.astype(np.float32)
    scale = (spread / np.float32(most)).astype("<f2")
    scale[scale == 0] = 1
    inverse = np.float32(1) / scale.astype(np.float32)
    q = np.rint((vectors - bias.astype(np.float32)[:, None]) * inverse[:, None])
    q = np.clip(q, 0, most).astype(np.uint8)
    if row_format == "int4":
        q = np.concatenate([q, np.zeros((n, dim % 2), np.uint8)], 1)
        q = q[:, 0::2] | q[:, 1::2] << 4
    ends = np.stack([scale, bias], 1).view(np.uint8).reshape(n, 4)
    return np.concatenate([q, ends], 1)


def decoded(rows: np.ndarray, row_format: str, dim: int) -> np.ndarray:
    """Decode rows, uint8 ``[n, row_bytes]``, to float32 vectors ``[n, dim]``."""
    n = len(rows)
    rows = np.ascontiguousarray(rows)
    if row_format == "float32":
        return rows.view("<f4").reshape(n, dim)
    if row_format == "float16":
        return rows.view("<f2").reshape(n, dim).astype(np.float32)
    if row_format == "bfloat16":
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(n, dim)
    q, ends = rows[:, :-4], np.ascontiguousarray(rows[:, -4:]).view("<f2").astype(np.float32)
    if row_format == "int4":
        q = np.stack([q & 15, q >> 4], 2).reshape(n, -1)[:, :dim]
    return ends[:, :1] * q.astype(np.float32) + ends[:, 1:]


# ---- the index ----


def mixed(keys: np.ndarray) -> np.ndarray:
    """Return the hash of int64 keys, uint64: the finaliser of splitmix64."""
    x = np.asarray(keys, np.int64).view(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def index_of(keys: np.ndarray, num_buckets: int, seed: int) -> np.ndarray:
    """Return buckets in which keys[i] has row i."""
    buckets = np.zeros(num_buckets, BUCKET)
    buckets["rows"] = -1
    hashes = mixed(np.asarray(keys, np.int64) ^ np.int64(seed))
    for row, (key, hash_) in enumerate(zip(keys.tolist(), hashes.tolist(), strict=True)):
        b = hash_ * num_buckets >> 64
        while (buckets["rows"][b] >= 0).all():
            buckets["spilled"][b] += 1
            b = (b + 1) % num_buckets
        slot = int((buckets["rows"][b] >= 0).sum())
        buckets["keys"][b, slot], buckets["rows"][b, slot] = key, row
    return buckets


# ---- the file ----


def crc_of(part: bytes) -> int:
    return zlib.crc32(part)


def padded(part: bytes) -> bytes:
    return part + bytes(-len(part) % PAGE)


def snapshot(tables: list[Table], note: str = "made by tests", **header: int) -> bytes:
    """Return the bytes of a snapshot with these tables."""
    records = np.zeros(len(tables), RECORD)
    names = [table.name.encode() for table in tables]
    texts = b"".join([*names, note.encode()])
    directory_bytes = records.nbytes + len(texts)
    at, sections = PAGE + -(-directory_bytes // PAGE) * PAGE, b""
    name_offset = PAGE + records.nbytes
    for record, table, name in zip(records, tables, names, strict=True):
        index = index_of(table.keys, table.num_buckets, table.index_seed).tobytes()
        rows = table.rows.tobytes()
        for key in ("num_buckets", "index_seed", "initial_seed", "a", "b", "num_fallbacks"):
            record[key] = getattr(table, key)
        record["name_offset"], record["name_bytes"] = name_offset, len(name)
        record["row_format"] = FORMATS.index(table.row_format)
        record["dim"], record["row_bytes"] = table.vectors.shape[1], table.rows.shape[1]
        record["num_rows"] = len(table.keys)
        record["miss"] = MISSES.index(table.miss)
        record["distribution"] = DISTRIBUTIONS.index(table.distribution)
        record["combiner"] = COMBINERS.index(table.combiner)
        record["has_padding_key"] = table.padding_key is not None
        record["padding_key"] = table.padding_key or 0
        record["index_offset"], record["index_crc"] = at + len(sections), crc_of(index)
        sections += padded(index)
        record["rows_offset"], record["rows_crc"] = at + len(sections), crc_of(rows)
        sections += padded(rows)
        name_offset += len(name)
    head = np.zeros((), HEADER)
    head["magic"], head["format_version"], head["num_tables"] = MAGIC, 1, len(tables)
    head["file_bytes"], head["directory_bytes"] = at + len(sections), directory_bytes
    head["step"] = -1
    head["note_offset"], head["note_bytes"] = name_offset, len(note.encode())
    for key, value in header.items():
        head[key] = value
    directory = records.tobytes() + texts
    return signed(padded(head.tobytes() + directory) + sections)


def signed(file: bytes) -> bytes:
    """Return a file with the right checksums of its directory and its header."""
    head = np.frombuffer(bytearray(file[:PAGE]), HEADER)[0]
    directory = file[PAGE : PAGE + int(head["directory_bytes"])]
    head["directory_crc"] = crc_of(directory)
    head["crc"] = crc_of(head.tobytes()[:-4])
    return head.tobytes() + file[PAGE:]


def changed(file: bytes, table: int | None = None, **fields: object) -> bytes:
    """Return a file with other values in its header, or in a table's record, signed."""
    bytes_ = bytearray(file)
    if table is None:
        record = np.frombuffer(bytes_, HEADER, 1)[0]
    else:
        record = np.frombuffer(bytes_, RECORD, 1, PAGE + table * RECORD.itemsize)[0]
    for key, value in fields.items():
        record[key] = value
    return signed(bytes(bytes_))


# ---- lookups ----


def philox(counter: list[np.ndarray], key: int) -> list[np.ndarray]:
    """Return the four random words, uint64 arrays, of Philox4x32-10."""
    c = [np.asarray(x, np.uint64) for x in counter]
    low32 = np.uint64(0xFFFFFFFF)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & low32,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & low32,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def initial(table: Table, keys: np.ndarray) -> np.ndarray:
    """Return the initial vectors of keys, float32 ``[n, dim]``, of a uniform or constant one."""
    n, dim = len(keys), table.vectors.shape[1]
    a, b = np.float32(table.a), np.float32(table.b)
    if table.distribution == "constant":
        values = np.full((n, dim), a)
    else:
        blocks = np.broadcast_to(np.arange(-(-dim // 4)), (n, -(-dim // 4)))
        unsigned = np.asarray(keys, np.int64).view(np.uint64)[:, None]
        low = np.broadcast_to(unsigned & np.uint64(0xFFFFFFFF), blocks.shape)
        high = np.broadcast_to(unsigned >> np.uint64(32), blocks.shape)
        words = philox([low, high, blocks, np.zeros_like(blocks)], table.initial_seed)
        u = (np.stack(words, 2) >> np.uint64(8)).astype(np.float32) * np.float32(2**-24)
        values = a + u * (b - a)
        values = np.where((values < b) | (b <= a), values, np.nextafter(b, a))
        values = values.reshape(n, -1)[:, :dim]
    return decoded(encoded(values, "bfloat16"), "bfloat16", dim) if _rounds(table) else values


def _rounds(table: Table) -> bool:
    return table.row_format == "bfloat16"


def vectors_of(table: Table, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the vector of each key ``[n, dim]``, whether it counts in a sum, and its `found`."""
    dim = table.vectors.shape[1]
    places = {key: row for row, key in enumerate(table.keys.tolist())}
    stored = decoded(table.rows, table.row_format, dim)
    found = np.array([key in places for key in keys.tolist()], bool)
    out = initial(table, keys) if table.miss == "initial" else np.zeros((len(keys), dim), "f4")
    counts = found | (table.miss != "zeros")
    asked = keys.copy()
    if table.miss == "fallback":
        others = mixed(keys).view(np.int64) % table.num_fallbacks + FIRST_FALLBACK
        asked = np.where(found, keys, others)
    has = np.array([key in places for key in asked.tolist()], bool)
    rows = [places[key] for key in asked[has].tolist()]
    out[has] = stored[rows]
    return out, counts, found


def lookup(
    table: Table,
    keys: np.ndarray,
    offsets: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    combiner: str = "sum",
) -> tuple[np.ndarray, np.ndarray]:
    """Return pooled vectors ``[bags, dim]``, or ``[n, dim]`` without pooling, and `found`."""
    keys = np.asarray(keys, np.int64)
    real = np.ones(len(keys), bool) if table.padding_key is None else keys != table.padding_key
    vectors, counts, found = vectors_of(table, keys)
    if combiner == "none":
        return np.where(real[:, None], vectors, np.float32(0)), found & real
    offsets = np.arange(len(keys) + 1) if offsets is None else offsets
    out = np.zeros((len(offsets) - 1, vectors.shape[1]), np.float32)
    for b, (begin, end) in enumerate(itertools.pairwise(offsets)):
        own = np.arange(begin, end)[real[begin:end]]
        if len(own):
            of_bag = None if weights is None else weights[own]
            out[b] = pooled(vectors[own], counts[own], of_bag, combiner)
    return out, found & real


def pooled(
    vectors: np.ndarray, counts: np.ndarray, weights: np.ndarray | None, combiner: str
) -> np.ndarray:
    """Pool the vectors of a bag that is not empty, in the order in which the library adds."""
    if combiner == "max":
        most = vectors[0].copy()
        for x in vectors[1:]:
            most = np.where((x > most) | (np.isnan(x) & ~np.isnan(most)), x, most)
        return most
    total, weight = np.zeros(vectors.shape[1], np.float32), np.float32(0)
    for run in range(0, len(vectors), RUN):
        sum_, sum_of_weights = np.zeros_like(total), np.float32(0)
        for i in range(run, min(run + RUN, len(vectors))):
            if counts[i]:
                sum_ = sum_ + (vectors[i] if weights is None else weights[i] * vectors[i])
            if weights is not None:
                sum_of_weights += weights[i] if combiner == "mean" else weights[i] * weights[i]
        total, weight = total + sum_, weight + sum_of_weights
    if combiner == "sum":
        return total
    by = np.float32(len(vectors)) if weights is None else weight
    by = np.sqrt(by) if combiner == "sqrtn" else by
    return total / by if by != 0 else np.zeros_like(total)
