"""Cases of the ops on keys: the hash table, unique, bucketize and the hash of values."""

import copy

import numpy as np
import torch
import xxhash

from sparsekit import HashTable, TableFullError, ops
from sparsekit.hashing import xxh64

from ..reference import ops as reference
from .case import Case


def _state(table):
    return [buffer.clone() for buffer in table.buffers()]


def _copied(case: Case, table: HashTable, expected: reference.HashTable) -> None:
    """Copy the keys of some rows into another table, from parts of the buckets."""
    rows = case.random.randint(0, len(expected))
    other = HashTable(rows + 1 + case.size(rows + 1), load_factor=case.any_of(0.3, 0.6, 1.0))
    other.hash_seed.copy_(table.hash_seed)
    other.size.fill_(rows)
    case.note(copied=rows, into=other.capacity, other_load_factor=other.load_factor)
    for part in table.buckets.tensor_split(case.random.randint(1, min(3, len(table.buckets)))):
        ops.hash_table_copy_(other.buckets, part, table.hash_seed, rows)
    case.same("copied keys", other.keys(), expected.keys()[:rows])


def hash_table(case: Case) -> None:
    """Insert batches into a table, which may refuse some of them, and compare it with a dict."""
    most = case.most(6000, 1500)
    table = HashTable(
        1 + case.size(most), load_factor=case.any_of(0.05, 0.3, 0.6, 0.95, 1.0), name="fuzzed"
    )
    expected = reference.HashTable(table.capacity)
    dtype = case.key_dtype()
    pool = case.keys(1 + case.size(most), dtype)
    case.note(capacity=table.capacity, load_factor=table.load_factor, pool=pool)
    for _ in range(case.random.randint(1, 5)):
        n = case.size(most)
        # Draw from the pool, so that batches share keys, or draw other keys.
        batch = pool[case.integers(0, len(pool) - 1, n)] if case.maybe(0.6) else case.keys(n, dtype)
        batch = case.placed(batch)
        case.same("find", case.call(table.find, batch), expected.find(batch))
        before = _state(table)
        rows, status = expected.find_or_insert(batch)
        if status[1] == 0:
            case.same("find_or_insert", case.call(table.find_or_insert, batch), rows)
        else:
            case.refused(TableFullError, table.find_or_insert, batch)
            for now, then in zip(_state(table), before, strict=True):
                case.same("a buffer after a refusal", now, then)
        case.equal("size", len(table), len(expected))
        case.same("keys", table.keys(), expected.keys())
        if case.maybe(0.2):
            _copied(case, table, expected)
        if case.maybe(0.2):
            table = copy.deepcopy(table)
        if case.maybe(0.2):
            other = HashTable(table.capacity, load_factor=table.load_factor, name="loaded")
            other.load_state_dict(table.state_dict())
            table = other
    if len(expected) == 0:
        return
    shaped = expected.keys()[: len(expected) // 2 * 2].view(2, -1).t()
    case.same(
        "find of two dimensions", table.find(shaped).t().reshape(-1), torch.arange(shaped.numel())
    )


def _unique_by_numpy(keys):
    """Return the reference's results, computed by numpy to be fast enough for many keys."""
    distinct, first, inverse, counts = np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    results = distinct[order], rank[inverse.reshape(-1)], counts[order]
    return tuple(torch.from_numpy(np.ascontiguousarray(r)) for r in results)


def unique(case: Case) -> None:
    large = case.backend == "cpu" and case.maybe(0.02)
    n = case.random.randint(2**16 - 5, 2**18) if large else case.size(case.most(20_000, 3000))
    keys = case.placed(case.keys(n, case.key_dtype()))
    expected = reference.unique(keys) if n < 2000 else _unique_by_numpy(keys.contiguous())
    results = case.call(ops.unique, keys)
    for name, result, wanted in zip(
        ("unique", "inverse", "counts"), results, expected, strict=True
    ):
        case.same(name, result, wanted)


def unique_padded(case: Case) -> None:
    """Check unique of the first num_keys keys; memory after the distinct keys is unspecified."""
    keys = case.placed(case.keys(case.size(case.most(5000, 2000)), case.key_dtype()))
    n = case.any_of(0, len(keys), case.random.randint(0, len(keys)))
    op = torch.ops.sparsekit.unique_padded.default
    if n == len(keys) and case.maybe(0.5):
        distinct, inverse, counts, number = case.call(op, keys)
    else:
        distinct, inverse, counts, number = case.call(op, keys, torch.tensor([n]))
    expected = reference.unique(keys[:n])
    case.equal("num_unique", number.tolist(), [len(expected[0])])
    case.equal("lengths", [len(distinct), len(inverse), len(counts)], [len(keys)] * 3)
    case.same("unique", distinct[: len(expected[0])], expected[0])
    case.same("inverse", inverse[:n], expected[1])
    case.same("counts", counts[: len(expected[0])], expected[2])


def bucketize(case: Case) -> None:
    keys = case.placed(case.keys(case.size(case.most(40_000, 6000)), case.key_dtype()))
    world_size = case.any_of(1, 2, 3, 8, 2048, case.random.randint(1, 2048))
    owners = None
    if case.maybe(0.5):
        owners = case.placed(case.integers(0, world_size - 1, 65536).to(torch.int16))
    results = case.call(ops.bucketize, keys, world_size, owners)
    expected = reference.bucketize(keys, world_size, owners)
    for name, result, wanted in zip(
        ("by_owner", "counts", "permutation"), results, expected, strict=True
    ):
        case.same(name, result, wanted)


def _value(case):
    kind = case.any_of("text", "bytes", "int", "large int", "none", "unicode")
    if kind == "none":
        return None
    if kind == "int":
        return case.random.randint(-1000, 1000)
    if kind == "large int":
        return case.random.randint(-(2**80), 2**80)
    length = case.any_of(0, 1, 3, 4, 7, 8, 31, 32, 33, case.random.randrange(200))
    if kind == "bytes":
        return case.random.randbytes(length)
    alphabet = "ab0" if kind == "text" else "aä€😀\0"
    return "".join(case.random.choice(alphabet) for _ in range(length))


def _code(value, seed):
    data = b"" if value is None else value if isinstance(value, bytes) else str(value).encode()
    code = xxhash.xxh64_intdigest(data, seed)
    return code - 2**64 if code >= 2**63 else code


def xxh64_of_values(case: Case) -> None:
    n = case.size(3000)
    seed = case.any_of(0, 1, 2**63, 2**64 - 1, case.random.getrandbits(64))
    form = case.any_of("list", "tuple", "integers", "tensor", "text array")
    if form in ("list", "tuple"):
        values = [_value(case) for _ in range(n)]
        if values and case.maybe(0.1):
            values[case.random.randrange(n)] = case.any_of(1.5, True, object(), "\ud800", [])
            case.refused((TypeError, ValueError), xxh64, values, seed)
            return
        argument = values if form == "list" else tuple(values)
    elif form == "text array":
        values = [case.any_of("a", "item", "ä", "") for _ in range(n)]
        argument = np.array(values) if n else np.array([], dtype=str)
    else:
        dtype = case.any_of(torch.int64, torch.int32, torch.int16, torch.uint8)
        argument = case.placed(case.keys(n, torch.int64).to(dtype))
        values = argument.tolist()
        argument = argument if form == "tensor" else argument.numpy()
    result = case.call(xxh64, argument, seed)
    case.equal("codes", result.tolist(), [_code(value, seed) for value in values])


def hash_integers(case: Case) -> None:
    values = case.placed(case.keys(case.size(3000), torch.int64))
    seed = case.any_of(0, 2**63, 2**64 - 1, case.random.getrandbits(64))
    codes = case.call(ops.hash_integers, values, seed)
    case.same("codes", codes, reference.hash_integers(values, seed))


OPS = {
    "hash_table": hash_table,
    "unique": unique,
    "unique_padded": unique_padded,
    "bucketize": bucketize,
    "hash_integers": hash_integers,
    "xxh64": xxh64_of_values,
}
