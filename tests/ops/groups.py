"""Draws random arguments for the ops on many tables."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from conftest import generator, key_pattern, randn
from reference import ops as reference

from sparsekit import HashTable, ops
from sparsekit.ops._checks import accumulate_dtype
from sparsekit.ops._group import GROUP_COMBINERS
from sparsekit.ops.init_rows import DISTRIBUTIONS

NO_LIMIT = 2**63 - 1


@dataclass
class Source:
    keys: torch.Tensor
    offsets: torch.Tensor  # empty: each key is a bag
    weights: torch.Tensor  # empty: unweighted

    @property
    def bags(self) -> int:
        return len(self.offsets) - 1 if len(self.offsets) else len(self.keys)


@dataclass
class Group:
    """Tables and the requests that look them up; see sparsekit.ops._group."""

    dtype: torch.dtype
    dims: list[int]
    capacities: list[int]
    hashed: list[bool]
    world_sizes: list[int]
    device: torch.device | str = "cpu"
    sources: list[Source] = field(default_factory=list)
    features: list[list[int]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # number of elements of each output

    def __post_init__(self) -> None:
        self.hash_tables = [
            HashTable(capacity, device=self.device)
            for capacity, hashed in zip(self.capacities, self.hashed, strict=True)
            if hashed
        ]
        self.plain_tables = [
            reference.HashTable(capacity)
            for capacity, hashed in zip(self.capacities, self.hashed, strict=True)
            if hashed
        ]
        self.weights = [
            randn(capacity, dim, dtype=self.dtype, seed=t).to(self.device)
            for t, (capacity, dim) in enumerate(zip(self.capacities, self.dims, strict=True))
        ]
        self.seeds = [torch.tensor([7 * t - 3], device=self.device) for t in range(len(self.dims))]
        codes = list(DISTRIBUTIONS.values())
        initial = [[codes[t % 3], -0.5, 0.5] for t in range(len(self.dims))]
        self.initializers = torch.tensor(initial, dtype=torch.float64).view(-1, 3)

    @property
    def tables(self) -> torch.Tensor:
        numbers = iter(range(len(self.dims)))
        columns = [
            [next(numbers) if hashed else -1, capacity, world_size]
            for hashed, capacity, world_size in zip(
                self.hashed, self.capacities, self.world_sizes, strict=True
            )
        ]
        return torch.tensor(columns, dtype=torch.int64).view(-1, 3)

    @property
    def asked(self) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Arguments of group ops: keys and offsets of all sources, and the features."""
        features = torch.tensor(self.features, dtype=torch.int64).view(-1, 9)
        keys = [source.keys.to(self.device) for source in self.sources]
        return keys, [source.offsets.to(self.device) for source in self.sources], features

    @property
    def sample_weights(self) -> list[torch.Tensor]:
        if all(len(source.weights) == 0 for source in self.sources):
            return []
        return [source.weights.to(self.device) for source in self.sources]

    def entries(self) -> int:
        """Return the total number of keys of all features."""
        return sum(map(self.keys_of, self.features))

    def keys_of(self, feature: list[int]) -> int:
        """Return the number of keys in the bags of a feature."""
        _, s, first, bags, *_ = feature
        offsets = self.sources[s].offsets
        return int(offsets[first + bags] - offsets[first]) if len(offsets) else bags

    def ask(
        self, table: int, source: int, first_bag: int, bags: int, combiner: str, stride: int = 0
    ) -> None:
        """Add a feature with a separate output."""
        dim = self.dims[table]
        stride = max(stride, dim)
        begin = stride - dim
        row = [table, source, first_bag, bags, GROUP_COMBINERS[combiner], NO_LIMIT]
        self.features.append([*row, len(self.places), begin, stride])
        self.places.append(bags * stride)

    def outs(self, fill: float = 9.0) -> list[torch.Tensor]:
        return [torch.full((n,), fill, dtype=self.dtype, device=self.device) for n in self.places]

    def find_or_insert(self, larger: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, ...]:
        return ops.group_find_or_insert_(
            [table.buckets for table in self.hash_tables],
            [table.hash_seed for table in self.hash_tables],
            [table.size for table in self.hash_tables],
            self.weights,
            self.seeds,
            self.tables,
            self.initializers,
            *self.asked,
            list(larger),
        )

    def find(self) -> tuple[torch.Tensor, ...]:
        return ops.group_find(
            [table.buckets for table in self.hash_tables],
            [table.hash_seed for table in self.hash_tables],
            self.tables,
            *self.asked,
        )

    def bucketize(self, world_size: int, distinct: bool = True, op=None, max_keys=()):
        """Call group_bucketize; keys of tables without a hash table must be in range."""
        ends = [
            -1 if hashed else capacity * ranks
            for hashed, capacity, ranks in zip(
                self.hashed, self.capacities, self.world_sizes, strict=True
            )
        ]
        maps = [-1] * len(ends)
        keys, offsets, features = self.asked
        if op is not None:
            keys, offsets = ([tensor.cpu() for tensor in list_] for list_ in (keys, offsets))
        call = op or ops.group_bucketize
        return call([], maps, ends, keys, offsets, features, world_size, distinct, max_keys)


def random_bags(
    draw: random.Random, n: int, bags: int, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    inner = sorted(draw.randint(0, n) for _ in range(bags - 1))
    return torch.tensor([0, *inner, n] if bags else [0], dtype=dtype)


def random_group(
    seed: int, dtype: torch.dtype, device: torch.device, most_keys: int = 300
) -> Group:
    """Return a group with all kinds of tables and sources; several tables share one source."""
    draw = random.Random(seed)
    n = draw.randint(1, 6)
    hashed = [draw.random() < 0.8 for _ in range(n)]
    group = Group(
        dtype,
        [draw.choice([0, 1, 3, 4, 8, 16, 20, 64]) for _ in range(n)],
        [draw.choice([1000, 2000]) for _ in range(n)],
        hashed,
        [1 if h else draw.choice([1, 3]) for h in hashed],
        device,
    )
    features = []
    for s in range(draw.randint(1, 8)):
        size = draw.choice([0, 1, 2, draw.randint(0, most_keys)])
        key_dtype = draw.choice([torch.int64, torch.int32])
        keys = key_pattern(draw.choice(["distinct", "few", "half on one"]), size, torch.int64)
        # The keys are in the range of all tables. One of three ranks owns all of them.
        keys = (keys % 300 * 3 + 1).to(key_dtype)
        plain = draw.random() < 0.3
        bags = size if plain else draw.choice([1, 2, 17, 60]) if size else draw.choice([0, 1, 5])
        offsets = random_bags(draw, size, bags, draw.choice([torch.int64, torch.int32]))
        weights = torch.empty(0, dtype=accumulate_dtype(dtype))
        if draw.random() < 0.3:
            weights = torch.rand(size, generator=generator(seed)).to(weights.dtype) + 0.5
        group.sources.append(Source(keys, offsets[:0] if plain else offsets, weights))
        # Each feature is a run of bags; some bags may belong to no feature.
        first = draw.choice([0, 0, 0, min(bags, 1)])
        while first <= bags:
            count = draw.choice([bags - first, draw.randint(0, bags - first)])
            lengths = [1] if plain else offsets[first : first + count + 1].diff().tolist()
            few = max(lengths, default=0) <= 1
            combiner = draw.choice(["sum", "mean", "sqrtn", *(["none"] * few)])
            features.append((draw.randrange(n), s, first, count, combiner, draw.choice([0, 70])))
            first += count
            if draw.random() < 0.3:
                break
            if count == 0:
                first += 1
    for feature in sorted(features, key=lambda f: f[0]):
        group.ask(*feature)
    return group
