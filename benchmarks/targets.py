"""Lists targets: the required speed of each case, as a multiple of the roof's or the peer's speed.

A key is a pair: the target's name (the `line` of its cases), and the name of the roof or peer. If a
case may take 1.15 times as long as the peer, its target is 1 / 1.15. For collectives, the target is
the peer's number divided by ours. Targets are raised once they are met.
"""

CPU_TARGETS = {
    ("find, 10M+ keys, 1 thread", "boost find"): 2.5,
    ("find, 10M+ keys, 1 thread", "R2"): 0.7,
    ("find in cache, 100k keys, 1 thread", "boost find"): 1.5,
    ("find_or_insert, all new, 10M, 1 thread", "boost emplace"): 2.5,
    ("unique", "torch.unique"): 3.0,
    ("unique", "np.unique"): 8.0,
    ("unique", "pandas.factorize"): 2.0,
    ("segment_sum, uniform and zipf", "zeros + index_add_"): 2.0,
    ("segment_sum, half on one row", "zeros + index_add_"): 4.0,
    ("embedding_bag forward", "F.embedding_bag"): 2.0,
    ("embedding_bag forward", "FBGEMM TBE"): 1.15,
    ("LazyAdam, coalesced gradient", "SparseAdam"): 4.0,
    ("step with LazyAdam", "EmbeddingBag + SparseAdam"): 5.0,
    ("step with LazyAdam", "FBGEMM TBE + row-wise Adagrad"): 1.0,
    ("step of 26 tables", "one layer, same keys"): 1 / 1.2,
    ("step of 26 tables", "FBGEMM TBE + row-wise Adagrad"): 2.0,
    ("step of 26 tables", "EmbeddingBag + SparseAdam"): 4.5,
    ("step of 100 tables", "one table, same keys"): 1 / 1.5,
    ("step of 500 tables", "one table, same keys"): 1 / 2.5,
    ("evaluation, 1 keys", "EmbeddingBag"): 1 / 4,
    ("evaluation, 256 keys", "EmbeddingBag"): 1 / 3,
    ("evaluation, 2048 keys", "EmbeddingBag"): 1 / 2,
    ("step of a small layer", "EmbeddingBag + SparseAdam"): 1.0,
    ("step on 2 ranks", "TorchRec DMP"): 2.0,
    ("step of 26 tables on 2 ranks", "TorchRec DMP"): 2.0,
    ("2 ranks of one thread", "1 rank of one thread"): 1.7,
    ("collectives of a step", "one table, same keys"): 1.0,
    ("collectives of a step", "4 collectives"): 1.0,
    ("step with prefetch, 2 ranks", "the two in a row"): 1 / 0.7,
    ("exchange with dedupe, 2 ranks, zipf", "without dedupe"): 1.5,
    ("xxh64 of 1M strings", "loop over xxhash"): 20.0,
    ("xxh64 of 1M mixed strings", "loop over xxhash"): 20.0,
    ("xxh64 of 1M mixed strings, Arrow", "loop over xxhash"): 60.0,
    ("Criteo file to keys", "pyarrow.csv into memory"): 0.8,
    ("waiting for batches", "the whole step"): 10.0,
    ("op call, 8 keys", "clone"): 1 / 4,
}

GPU_TARGETS = {
    ("find, load <= 0.75", "R2"): 0.70,
    ("find, load 0.9", "R2"): 0.55,
    ("find_or_insert, all new", "R2"): 0.30,
    ("find_or_insert, 10% new", "R2"): 0.50,
    ("unique", "torch.unique"): 4.0,
    ("unique", "cupy.unique"): 4.0,
    ("unique 1M", "torch.unique"): 6.0,
    ("unique 1M", "cupy.unique"): 6.0,
    ("segment_sum uniform", "R1"): 0.65,
    ("segment_sum sorted", "R1"): 0.85,
    ("segment_sum uniform", "index_add_"): 1.2,
    ("segment_sum zipf", "index_add_"): 3.0,
    ("segment_sum half on one", "index_add_"): 8.0,
    ("segment_sum deterministic", "its fastest mode"): 1 / 1.5,
    ("embedding_bag, D >= 128", "R1"): 0.85,
    ("embedding_bag, D 32-64", "R1"): 0.75,
    ("keys to pooled vectors", "known rows + keys / R2"): 1 / 1.15,
    ("backward + LazyAdam, uniform", "R1"): 0.65,
    ("backward + LazyAdam, zipf", "R1"): 0.5,
    ("backward + LazyAdam, uniform", "EmbeddingBag + SparseAdam"): 10.0,
    ("backward + LazyAdam, zipf", "EmbeddingBag + SparseAdam"): 10.0,
    ("LazyAdam, D >= 64", "R1"): 0.85,
    ("bucketize", "R1"): 0.5,
    ("bucketize", "argsort(owner)"): 5.0,
}

TARGETS = {"cpu": CPU_TARGETS, "gpu": GPU_TARGETS}


def target_of(targets: dict[tuple[str, str], float], line: str, against: str) -> float | None:
    """Return a line's target against a given roof or peer; None if there is none.

    Raises:
        KeyError: no target has this line, so the line is misspelled.
    """
    if line and not any(name == line for name, _ in targets):
        raise KeyError(f"there is no target for {line!r}")
    return targets.get((line, against))
