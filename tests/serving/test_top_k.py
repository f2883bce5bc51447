"""The best rows of a table are exactly those that NumPy finds by scoring all rows."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsekit.serving import Snapshot, _library
from sparsekit.serving.format import ROW_FORMATS
from sparsekit.serving.writer import SnapshotWriter

from . import made
from .logs import TABLES, Log

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
DIMS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 64, 65, 128, 257, 1000)


def write(path, vectors, keys, **options):
    """Write a snapshot with one table, "t"."""
    with SnapshotWriter(path) as snapshot:
        snapshot.table("t", vectors.shape[1], **options).append(keys, vectors)
    return path


def stored(vectors, row_format):
    """Return the vectors as lookups return them."""
    return made.decoded(made.encoded(vectors, row_format), row_format, vectors.shape[1])


def scores_of(vectors, query):
    """Score rows in the documented order of additions."""
    lanes = np.zeros((len(vectors), 16), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for j in range(0, len(query), 16):
            part = vectors[:, j : j + 16] * query[j : j + 16]
            lanes[:, : part.shape[1]] += part
        for half in (8, 4, 2, 1):
            lanes[:, :half] += lanes[:, half : 2 * half]
    return lanes[:, 0]


def best(keys, scores, k):
    """Return the best keys and their scores, ties by the smaller key."""
    real = ~np.isnan(scores)
    order = np.lexsort((keys[real], -scores[real]))[:k]
    return keys[real][order], scores[real][order]


def same(got, wanted):
    """Require the same keys, and scores with the same bits but for the sign of zeros."""
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], wanted[1])


def random_case(rng):
    """Return vectors, a query and k of a random case, with ties, zeros and extreme sizes."""
    n, dim = int(rng.integers(1, 3000)), int(rng.choice(DIMS))
    vectors = (rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
    if rng.random() < 0.3:
        vectors = np.rint(vectors)
    query = rng.standard_normal(dim).astype(np.float32)
    query *= np.float32(10.0 ** rng.choice([-40, -20, 0, 0, 0, 10, 25, 34]))
    if rng.random() < 0.2:
        query = np.rint(query)
    if rng.random() < 0.2:
        query[rng.integers(dim)] *= 1000
    if rng.random() < 0.05:
        query[:] = 0
    return vectors, query, int(rng.choice([1, 2, 10, 100, 5000]))


@pytest.mark.parametrize("row_format", ROW_FORMATS)
def test_random_tables(row_format, tmp_path):
    for case in range(25):
        rng = np.random.default_rng([ROW_FORMATS.index(row_format), case])
        vectors, query, k = random_case(rng)
        keys = rng.integers(INT64_MIN, INT64_MAX, len(vectors))
        path = write(tmp_path / "file.sks", vectors, keys, rows=row_format)
        with Snapshot(path) as snapshot:
            got = snapshot.top_k("t", query, k)
        same(got, best(keys, scores_of(stored(vectors, row_format), query), k))


@pytest.mark.parametrize("row_format", ["int8", "int4"])
def test_scores_that_integers_cannot_tell_apart(row_format, tmp_path):
    """All but one number of the query are too small for its integers, and make the difference."""
    rng = np.random.default_rng(5)
    dim = 1000
    vectors = rng.uniform(-1, 1, (3000, dim)).astype(np.float32)
    vectors[:, :2] = 1, -1  # so that all rows have the same scale and bias
    query = rng.choice(np.array([3e-5, -3e-5], np.float32), dim)
    query[0] = 1
    keys = rng.permutation(len(vectors)).astype(np.int64)
    path = write(tmp_path / "file.sks", vectors, keys, rows=row_format)
    with Snapshot(path) as snapshot:
        for k in (1, 50, 2000):
            got = snapshot.top_k("t", query, k)
            same(got, best(keys, scores_of(stored(vectors, row_format), query), k))


def test_scores_that_overflow(tmp_path):
    """Infinite scores are ties, although the products have bounds that differ."""
    rng = np.random.default_rng(7)
    vectors = rng.uniform(-1, 4, (2000, 32)).astype(np.float32) * 100
    keys = rng.permutation(len(vectors)).astype(np.int64)
    query = np.full(32, 7e34, np.float32)
    path = write(tmp_path / "file.sks", vectors, keys, rows="int8")
    scores = scores_of(stored(vectors, "int8"), query)
    assert 100 < np.isinf(scores).sum() < 1900
    with Snapshot(path) as snapshot:
        same(snapshot.top_k("t", query, 10), best(keys, scores, 10))


def test_true_products_agree(tmp_path):
    """By products in float64, no row is missing that is better by more than rounding."""
    rng = np.random.default_rng(6)
    vectors = rng.standard_normal((20_000, 64)).astype(np.float32)
    keys = np.arange(20_000)
    query = rng.standard_normal(64).astype(np.float32)
    path = write(tmp_path / "file.sks", vectors, keys, rows="int8")
    true = stored(vectors, "int8").astype(np.float64) @ query
    with Snapshot(path) as snapshot:
        found, scores = snapshot.top_k("t", query, 100)
    assert len(set(found.tolist())) == 100
    margin = 1e-4
    np.testing.assert_allclose(scores, true[found], atol=margin)
    others = np.delete(true, found)
    assert others.max() < true[found].min() + margin


def test_ties_go_to_the_smaller_key(tmp_path):
    keys = np.array([5, INT64_MAX, -3, 0, INT64_MIN, 7], np.int64)
    for row_format in ROW_FORMATS:
        path = write(tmp_path / "file.sks", np.ones((6, 20), np.float32), keys, rows=row_format)
        with Snapshot(path) as snapshot:
            assert snapshot.top_k("t", np.ones(20, "f4"), 4)[0].tolist() == [INT64_MIN, -3, 0, 5]


def test_rows_that_stand_for_no_key_are_left_out(tmp_path):
    keys = np.array([INT64_MIN, INT64_MIN + 1, INT64_MIN + 2, 9, 4], np.int64)
    vectors = np.array([[9], [8], [1], [7], [2]], np.float32)
    path = write(tmp_path / "file.sks", vectors, keys, miss="fallback", fallbacks=2, padding_key=9)
    with Snapshot(path) as snapshot:
        found, scores = snapshot.top_k("t", np.ones(1), 5)
    assert found.tolist() == [4, INT64_MIN + 2]
    assert scores.tolist() == [2, 1]


def test_scores_that_are_no_number_are_left_out(tmp_path):
    vectors = np.array([[np.inf, np.inf], [np.inf, 1], [-np.inf, 0], [2, 2]], np.float32)
    path = write(tmp_path / "file.sks", vectors, np.arange(4), rows="float32")
    with Snapshot(path) as snapshot:
        found, scores = snapshot.top_k("t", np.array([[1, -1], [0.5, 0.25]], np.float32), 9)
    assert found.tolist() == [[1, 3, 2, 0], [0, 1, 3, 2]]  # the first row has 0 for no key
    assert scores.tolist() == [[np.inf, 0, -np.inf, -np.inf], [np.inf, np.inf, 1.5, -np.inf]]


def test_an_empty_table_has_no_best_row(tmp_path):
    path = write(tmp_path / "file.sks", np.ones((0, 4), np.float32), np.arange(0), rows="int8")
    with Snapshot(path) as snapshot:
        found, scores = snapshot.top_k("t", np.ones((2, 4)), 3)
    assert found.shape == scores.shape == (2, 0)


def test_arrays_and_tensors(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    path = write(tmp_path / "file.sks", vectors, np.arange(50))
    with Snapshot(path) as snapshot:
        keys, scores = snapshot.top_k("t", vectors[:3], 4)
        assert keys.shape == scores.shape == (3, 4)
        assert (keys.dtype, scores.dtype) == (np.int64, np.float32)
        for kind in (torch.float32, torch.float64):
            of_tensor = snapshot.top_k("t", torch.from_numpy(vectors[:3]).to(kind), 4)
            assert isinstance(of_tensor[0], torch.Tensor)
            same([each.numpy() for each in of_tensor], (keys, scores))
        one = snapshot.top_k("t", vectors[1], 4)
        same(one, (keys[1], scores[1]))
        with snapshot.pin() as pinned:
            same(pinned.top_k("t", vectors[:3], 4), (keys, scores))


def test_wrong_arguments_are_refused(tmp_path):
    path = write(tmp_path / "file.sks", np.ones((3, 4), np.float32), np.arange(3))
    with Snapshot(path) as snapshot:
        for query, k, error, message in [
            (np.ones(5), 1, ValueError, r"table 't': queries must be \[4\] or \[n, 4\], got \[5\]"),
            (np.ones(4, np.int64), 1, TypeError, "must be floating point, got int64"),
            ([1.0, 2, 3, 4], 1, TypeError, "queries must be a NumPy array or a dense tensor"),
            (np.ones(4), 0, ValueError, r"k must be in \[1, 2\*\*31 - 1\], got 0"),
            (np.ones(4), 1.0, TypeError, "k must be an int, got float"),
            (np.array([1, np.nan, 0, 0]), 1, ValueError, r'table "t": query\[1\] is nan'),
            (np.array([0, 0, 0, 1e300]), 1, ValueError, r"query\[3\] is inf"),
        ]:
            with pytest.raises(error, match=message):
                snapshot.top_k("t", query, k)
        with pytest.raises(ValueError, match="no table named 'u'"):
            snapshot.top_k("u", np.ones(4), 1)


def test_the_c_function_refuses_what_python_does_not_pass(tmp_path):
    path = write(tmp_path / "file.sks", np.ones((3, 4), np.float32), np.arange(3))
    library = _library.load()
    array = np.ones(4, np.float32)
    found = ctypes.c_int32(77)
    with Snapshot(path) as snapshot:
        p = array.ctypes.data
        good = [snapshot.handle, None, 0, p, 1, p, p, ctypes.byref(found)]
        for place, bad, message in [
            (0, None, "snapshot is null"),
            (2, -1, "table is -1, but there are 1 tables"),
            (2, 1, "table is 1"),
            (3, None, "query is null"),
            (4, 0, "k is 0"),
            (5, None, "keys is null"),
            (6, None, "scores is null"),
            (7, None, "found is null"),
        ]:
            arguments = [bad if i == place else each for i, each in enumerate(good)]
            assert library.sk_top_k(*arguments) == 1
            assert message in library.sk_message().decode()
    assert found.value == 77


# Prints the bits of results, which must not depend on the instruction set.
CODE = """
import sys, zlib
import numpy as np
from sparsekit.serving import Snapshot
snapshot = Snapshot(sys.argv[1])
query = np.random.default_rng(1).standard_normal(67).astype(np.float32)
for table in snapshot.tables:
    for part in snapshot.top_k(table, query, 300):
        print(table, zlib.crc32(part.tobytes()))
"""


def test_all_instruction_sets_give_the_same_bits(tmp_path):
    vectors = np.random.default_rng(2).standard_normal((5000, 67)).astype(np.float32)
    path = tmp_path / "file.sks"
    with SnapshotWriter(path) as snapshot:
        tables = [snapshot.table(each, 67, rows=each) for each in ROW_FORMATS]
        for table in tables:
            table.append(np.arange(5000), vectors)
    printed = set()
    for isa in ("generic", "avx2", "avx512"):
        environment = {**os.environ, "SPARSEKIT_SERVING_ISA": isa}
        done = subprocess.run(
            [sys.executable, "-c", CODE, path],
            env=environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        assert len(done.stdout.splitlines()) == 10
        printed.add(done.stdout)
    assert len(printed) == 1


def test_versions_of_a_log(tmp_path):
    """Rows that deltas have replaced or erased are not found, although memory still has them."""
    log = Log(tmp_path / "log", keys=300)
    rng = np.random.default_rng(8)
    with Snapshot(log.path) as snapshot:
        for _ in range(6):
            with snapshot.pin() as pinned:
                log.add(upserts=150, erased=20, new=15)
                snapshot.refresh()
                for reader, version in ((pinned, log.last - 1), (snapshot, log.last)):
                    for name, (dim, row_format) in TABLES.items():
                        rows = log.versions[version][name]
                        keys = np.array(list(rows), np.int64)
                        vectors = np.array(list(rows.values()), np.float32)
                        query = rng.standard_normal(dim).astype(np.float32)
                        wanted = best(keys, scores_of(stored(vectors, row_format), query), 400)
                        same(reader.top_k(name, query, 400), wanted)
