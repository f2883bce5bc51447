"""Compares the speed of a snapshot's exact top k with torch and faiss on float32 vectors.

    python -m benchmarks.systems.serving_top_k [--rows 1000000] [--dim 64] [--repeats 30]

Writes a table of random vectors with random 64-bit keys in each row format, and asks for the best
10 and 100 rows for random queries. torch and faiss return positions, not keys; torch uses its
default number of threads. Exits with 1 if a result is not exact.
"""

import argparse
import functools
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsekit.serving import Snapshot
from sparsekit.serving.writer import SnapshotWriter

FORMATS = ("int8", "int4", "bfloat16", "float16", "float32")
KS = (10, 100)

Search = Callable[[np.ndarray, int], Any]


def written(folder: Path, row_format: str, keys: np.ndarray, vectors: np.ndarray) -> Path:
    """Write a snapshot with one table, and return its path."""
    path = folder / f"{row_format}.sks"
    with SnapshotWriter(path) as snapshot:
        snapshot.table("t", vectors.shape[1], rows=row_format).append(keys, vectors)
    return path


def is_exact(snapshot: Snapshot, keys: np.ndarray, queries: np.ndarray) -> bool:
    """Return whether the results are the best rows, as judged by products in float64."""
    stored = snapshot.lookup("t", keys)
    order = keys.argsort()
    for query in queries:
        found, scores = snapshot.top_k("t", query, max(KS))
        places = order[np.searchsorted(keys, found, sorter=order)]
        true = stored @ query.astype(np.float64)
        margin = 1e-5 * np.abs(query).sum()
        good = (keys[places] == found).all() and (np.abs(scores - true[places]) < margin).all()
        if not (good and np.delete(true, places).max() < true[places].min() + margin):
            return False
    return True


def torch_search(vectors: np.ndarray) -> Search:
    """Return a function that searches with a matrix product and torch.topk."""
    matrix = torch.from_numpy(vectors)
    return lambda query, k: torch.topk(matrix @ torch.from_numpy(query), k)


def faiss_search(vectors: np.ndarray) -> Search:
    """Return a function that searches a flat faiss index."""
    import faiss

    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return lambda query, k: index.search(query[None], k)


def times(searches: dict[str, Search], queries: np.ndarray, k: int) -> dict[str, float]:
    """Return each search's median time in milliseconds; the searches take turns."""
    samples: dict[str, list[float]] = {name: [] for name in searches}
    for query in [queries[0], *queries]:  # the first round warms up
        for name, search in searches.items():
            start = time.perf_counter()
            search(query, k)
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: float(np.median(each[1:])) for name, each in samples.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((args.rows, args.dim), dtype=np.float32)
    keys = rng.permutation(np.arange(args.rows) * 9_000_000_001)
    queries = rng.standard_normal((args.repeats, args.dim), dtype=np.float32)
    exact = True
    with tempfile.TemporaryDirectory() as folder:
        searches: dict[str, Search] = {}
        for row_format in FORMATS:
            path = written(Path(folder), row_format, keys, vectors)
            snapshot = Snapshot(path, prefault=True)
            if not is_exact(snapshot, keys, queries[:3]):
                print(f"{row_format}: NOT EXACT")
                exact = False
            searches[f"snapshot, {row_format}"] = functools.partial(snapshot.top_k, "t")
        searches[f"torch.topk(matmul), {torch.get_num_threads()} threads"] = torch_search(vectors)
        if importlib.util.find_spec("faiss") is None:
            print("faiss is not installed, and left out")
        else:
            searches["faiss, IndexFlatIP"] = faiss_search(vectors)
        print(f"{args.rows:,} rows of dim {args.dim}, median ms of {args.repeats} queries")
        print(f"{'':32}" + "".join(f"{f'k = {k}':>9}" for k in KS))
        by_k = [times(searches, queries, k) for k in KS]
        for name in searches:
            print(f"{name:32}" + "".join(f"{of[name]:9.2f}" for of in by_k))
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
