"""Implements the ops on many tables in plain torch, table by table; other ops are in ops.py.

Functions have the signatures of `sparsekit.ops`, but take a list of `HashTable` from ops.py instead
of the tensors of hash tables.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparsekit.ops._group import GROUP_COMBINERS, FeatureColumn, split_by_table
from sparsekit.ops.init_rows import DISTRIBUTIONS

from . import ops as reference

Tensors = Sequence[torch.Tensor]


@dataclass
class _Feature:
    """A row of `features`, with the keys of its bags."""

    table: int
    first_entry: int
    keys: torch.Tensor  # [n]
    offsets: torch.Tensor  # [bags + 1], from 0

    @property
    def entries(self) -> slice:
        return slice(self.first_entry, self.first_entry + len(self.keys))


def _features(keys: Tensors, offsets: Tensors, features: torch.Tensor) -> Iterator[_Feature]:
    entry = 0
    for values in features.tolist():
        row = dict(zip(FeatureColumn.__members__, values, strict=True))
        source = row["source"]
        bounds = offsets[source].to(torch.int64)
        if len(bounds) == 0:
            bounds = torch.arange(len(keys[source]) + 1)
        bounds = bounds[row["first_bag"] : row["first_bag"] + row["bags"] + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        own = keys[source][begin:end].to(torch.int64)
        yield _Feature(row["table"], entry, own, bounds - begin)
        entry += end - begin


def _length(keys: Tensors) -> int:
    return sum(len(k) for k in keys)


def bags_of(
    keys: Tensors, offsets: Tensors, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results `bags` and `key_starts` of group ops.

    bags: the first entry of each bag, then the number of entries.
    key_starts: the position in its source at which each feature's keys begin.
    """
    bags, key_starts, entries = [], [], 0
    for feature, row in zip(_features(keys, offsets, features), features.tolist(), strict=True):
        bags += (feature.first_entry + feature.offsets[:-1]).tolist()
        bounds = offsets[row[1]]
        key_starts.append(int(bounds[row[2]]) if len(bounds) else row[2])
        entries = feature.first_entry + len(feature.keys)
    return torch.tensor([*bags, entries], dtype=torch.int32), torch.tensor(key_starts).long()


def _of_table(features: Sequence[_Feature], table: int) -> tuple[torch.Tensor, slice]:
    """Return the keys of all entries of a table, and the slice of entries that they occupy."""
    own = [feature for feature in features if feature.table == table]
    if not own:
        return torch.empty(0, dtype=torch.int64), slice(0, 0)
    keys = torch.cat([feature.keys for feature in own])
    return keys, slice(own[0].first_entry, own[0].first_entry + len(keys))


def group_find(
    hash_tables: Sequence[reference.HashTable],
    tables: torch.Tensor,
    keys: Tensors,
    offsets: Tensors,
    features: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the row of each entry, or -1 if its key is absent, and the results of `bags_of`."""
    rows = torch.zeros(_length(keys), dtype=torch.int32)
    for feature in _features(keys, offsets, features):
        hash_table, _, world_size = tables[feature.table].tolist()
        found = (
            feature.keys // world_size
            if hash_table < 0
            else hash_tables[hash_table].find(feature.keys)
        )
        rows[feature.entries] = found.to(torch.int32)
    return (rows, *bags_of(keys, offsets, features))


def group_find_or_insert_(
    hash_tables: Sequence[reference.HashTable],
    weights: Tensors,
    seeds: Tensors,
    tables: torch.Tensor,
    initializers: torch.Tensor,
    keys: Tensors,
    offsets: Tensors,
    features: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Look up the distinct keys of each table, inserting new ones.

    Returns the rows of the distinct keys, table by table; each entry's index among its table's
    distinct keys; the number of distinct keys of each table; and the results of `bags_of`.
    """
    listed = list(_features(keys, offsets, features))
    rows, inverse = (torch.zeros(_length(keys), dtype=torch.int32) for _ in range(2))
    counts = torch.zeros(len(tables), dtype=torch.int64)
    for t, (hash_table, _, world_size) in enumerate(tables.tolist()):
        asked, entries = _of_table(listed, t)
        distinct, inverse[entries], _ = reference.unique(asked)
        if hash_table < 0:
            found = distinct // world_size
        else:
            found, status = hash_tables[hash_table].find_or_insert(distinct)
            initial = _initializer(seeds[t], initializers[t])
            reference.init_rows_(weights[t], distinct, found, status, **initial)
        counts[t] = len(distinct)
        rows[entries.start : entries.start + len(distinct)] = found.to(torch.int32)
    return (rows, inverse, counts, *bags_of(keys, offsets, features))


def group_bucketize(
    owners: Tensors,
    maps: Sequence[int],
    ends: Sequence[int],
    keys: Tensors,
    offsets: Tensors,
    features: torch.Tensor,
    world_size: int,
    distinct: bool = True,
    max_keys_per_rank: Sequence[int] = (),
) -> tuple[torch.Tensor, ...]:
    """Sort the keys of all tables by the rank that owns them.

    Returns the keys, rank by rank and within a rank table by table; their counts by rank and table;
    the counts by table; each entry's index among its table's keys; the position of each key among
    its table's keys sorted by owner; and the results of `bags_of`. With max_keys_per_rank, the keys
    of a table for a rank are followed by zeros up to that number.
    """
    listed = list(_features(keys, offsets, features))
    inverse, places = (torch.zeros(_length(keys), dtype=torch.int32) for _ in range(2))
    counts = torch.zeros(world_size, len(maps), dtype=torch.int64)
    pieces: list[tuple[torch.Tensor, ...]] = []
    for t in range(len(maps)):
        asked, entries = _of_table(listed, t)
        if distinct:
            asked, inverse[entries], _ = reference.unique(asked)
        else:
            inverse[entries] = torch.arange(len(asked), dtype=torch.int32)
        map_of_table = owners[maps[t]] if maps[t] >= 0 else None
        by_owner, counts[:, t], permutation = reference.bucketize(asked, world_size, map_of_table)
        own = places[entries.start : entries.start + len(asked)]
        own[permutation] = torch.arange(len(asked), dtype=torch.int32)
        piece = by_owner.split(counts[:, t].tolist())
        if max_keys_per_rank:
            most = max_keys_per_rank[t]
            before = counts[:, t].cumsum(0) - counts[:, t]
            number = torch.arange(len(asked)) - before.repeat_interleave(counts[:, t])
            owner = torch.arange(world_size).repeat_interleave(counts[:, t])
            own[permutation] = (owner * most + number).to(torch.int32)
            piece = [torch.cat([keys, keys.new_zeros(most - len(keys))]) for keys in piece]
        pieces.append(piece)
    return (
        torch.cat([piece[r] for r in range(world_size) for piece in pieces]),
        counts,
        counts.sum(0),
        inverse,
        places,
        *bags_of(keys, offsets, features),
    )


def group_exchange_rows(
    places: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    come: torch.Tensor,
    steps: Sequence[int],
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the row of each key's received vector; elements without a key are zero."""
    rows = torch.zeros_like(places)
    bags_of_tables = torch.zeros(len(steps) + 1, dtype=torch.int64)
    bags_of_tables[1:].index_add_(0, features[:, 0], features[:, 3])
    for t, bag in enumerate(bags_of_tables.cumsum(0)[:-1].tolist()):
        # Rows of the table's received vectors, rank by rank.
        of_places, before = [], 0
        for begin, end in come[t].tolist():
            of_places += [begin + j * steps[t] for j in range(end - before)]
            before = end
        keys = before if numbers is None else int(numbers[t])
        own = slice(int(bags[bag]), int(bags[bag]) + keys)
        all_rows = torch.tensor(of_places, dtype=torch.int32)
        rows[own] = all_rows[places[own].to(torch.int64)]
    return rows


def _initializer(seed: torch.Tensor, initializer: torch.Tensor) -> dict[str, Any]:
    code, a, b = initializer.tolist()
    name = next(name for name, number in DISTRIBUTIONS.items() if number == code)
    return {"seed": int(seed), "distribution": name, "a": a, "b": b}


@dataclass
class _Pooled:
    """A row of `features`, with the entries of its bags."""

    table: int
    entries: slice
    offsets: torch.Tensor  # [bags + 1], from 0
    weights: torch.Tensor | None  # [n]
    keys: torch.Tensor | None  # [n]
    combiner: str
    vectors: torch.Tensor  # [bags, dim], in the feature's output or gradient

    def pool(self, vectors: torch.Tensor) -> torch.Tensor:
        """Pool the vectors of all entries into bags."""
        if self.combiner == "none":
            empty = self.offsets[1:] == self.offsets[:-1]
            return reference.gather_rows(vectors, self.offsets[:-1].masked_fill(empty, -1))
        places = torch.arange(len(vectors))
        return reference.embedding_bag(vectors, places, self.offsets, self.combiner, self.weights)


def _pooled(
    tensors: Tensors,
    dims: Sequence[int],
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors,
    key_starts: torch.Tensor | None,
    keys: Tensors = (),
) -> Iterator[_Pooled]:
    first_bag = 0
    for f, values in enumerate(features.tolist()):
        row = dict(zip(FeatureColumn.__members__, values, strict=True))
        bounds = bags[first_bag : first_bag + row["bags"] + 1].to(torch.int64)
        first_bag += row["bags"]
        begin, end = int(bounds[0]), int(bounds[-1])
        own = slice(0, 0)
        if key_starts is not None:
            own = slice(int(key_starts[f]), int(key_starts[f]) + end - begin)
        weights = sample_weights[row["source"]] if sample_weights else bounds[:0]
        dim, flat = dims[row["table"]], tensors[row["tensor"]].view(-1)
        place = (
            flat[:0].view(row["bags"], dim)
            if row["bags"] * dim == 0
            else flat.as_strided(
                (row["bags"], dim), (row["stride"], 1), flat.storage_offset() + row["begin"]
            )
        )
        yield _Pooled(
            row["table"],
            slice(begin, end),
            bounds - begin,
            weights[own] if len(weights) else None,
            keys[row["source"]][own].to(torch.int64) if keys else None,
            next(name for name, code in GROUP_COMBINERS.items() if code == row["combiner"]),
            place,
        )


def _table_entries(features: Sequence[_Pooled], table: int) -> slice:
    own = [feature.entries for feature in features if feature.table == table]
    return slice(own[0].start, own[-1].stop) if own else slice(0, 0)


def group_embedding_bag_(
    outs: Tensors,
    weights: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor | None,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors = (),
    key_starts: torch.Tensor | None = None,
    keys: Tensors = (),
    seeds: Tensors = (),
    initializers: torch.Tensor | None = None,
) -> None:
    """Pool the bags of each feature into its part of `outs`."""
    dims = [weight.shape[1] for weight in weights]
    listed = list(_pooled(outs, dims, bags, features, sample_weights, key_starts, keys))
    for feature in listed:
        found = index[feature.entries].to(torch.int64)
        if rows is not None:
            found = rows[_table_entries(listed, feature.table)][found].to(torch.int64)
        vectors = reference.gather_rows(weights[feature.table], found)
        if initializers is not None and feature.keys is not None:
            missing = (found < 0).nonzero().squeeze(1)
            initial = _initializer(seeds[feature.table], initializers[feature.table])
            reference.init_rows_(vectors, feature.keys[missing], missing, **initial)
        feature.vectors[:] = feature.pool(vectors)


def group_embedding_bag_backward(
    grads: Tensors,
    dims: Sequence[int],
    index: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors = (),
    key_starts: torch.Tensor | None = None,
    divisor: int = 1,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct rows of all tables in ascending order, and the gradient of each row."""
    listed = list(_pooled(grads, dims, bags, features, sample_weights, key_starts))
    all_rows, all_sums = [], []
    for t, (dim, count) in enumerate(zip(dims, counts.tolist(), strict=True)):
        # Let autograd differentiate the pooling of vectors that stand for the distinct rows.
        leaf = torch.zeros(count, dim, dtype=grads[0].dtype, requires_grad=True)
        own = [feature for feature in listed if feature.table == t]
        pooled = [
            feature.pool(reference.gather_rows(leaf, index[feature.entries].long()))
            for feature in own
        ]
        if own:
            torch.autograd.backward(pooled, [feature.vectors for feature in own])
        sums = (leaf.new_zeros(count, dim) if leaf.grad is None else leaf.grad) / divisor
        if rows is not None:
            distinct = rows[_table_entries(listed, t)][:count]
            order = distinct.argsort()
            all_rows.append(distinct[order].long())
            sums = sums[order]
        all_sums.append(sums.detach().reshape(-1))
    nothing = torch.empty(0, dtype=torch.int64)
    # Each table's part begins at a multiple of 16 elements.
    padded = [torch.nn.functional.pad(sums, (0, -len(sums) % 16)) for sums in all_sums[:-1]]
    parts = [grads[0].new_empty(0), *padded, *all_sums[-1:]]
    return torch.cat([nothing, *all_rows]), torch.cat(parts)


def group_embedding_bag_backward_at_(
    out: torch.Tensor,
    row_strides: Sequence[int],
    grads: Tensors,
    dims: Sequence[int],
    index: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors = (),
    key_starts: torch.Tensor | None = None,
    deterministic: bool = True,
) -> None:
    """Write the gradient of each distinct row to `out`, at ``row * row_stride``."""
    own_rows, sums = split_by_table(
        dims,
        counts.tolist(),
        *group_embedding_bag_backward(
            grads, dims, index, rows, counts, bags, features, sample_weights, key_starts
        ),
    )
    for stride, at, gradients in zip(row_strides, own_rows, sums, strict=True):
        elements = (at * stride)[:, None] + torch.arange(gradients.shape[1])
        out.view(-1)[elements.view(-1)] = gradients.reshape(-1)


def group_embedding_bag_update_(
    grads: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors,
    key_starts: torch.Tensor | None,
    weights: Tensors,
    states: Tensors,
    row_steps: Tensors,
    steps: Tensors,
    rule: str,
    settings: Sequence[float],
    divisor: int = 1,
    per_row: bool = False,
    rounding_seed: int | None = None,
    count_steps: bool = False,
    deterministic: bool = True,
    lr: torch.Tensor | None = None,
) -> None:
    """Compute the gradients of the distinct rows and take an optimizer step with them."""
    dims = [weight.shape[1] for weight in weights]
    own_rows, sums = split_by_table(
        dims,
        counts.tolist(),
        *group_embedding_bag_backward(
            grads or [weights[0].new_empty(0)], dims, index, rows, counts, bags, features,
            sample_weights, key_starts, divisor,
        ),
    )  # fmt: skip
    reference.update_rows_(
        weights, states, row_steps, own_rows, sums, steps, rule, settings,
        per_row=per_row, rounding_seed=rounding_seed, count_steps=count_steps, lr=lr,
    )  # fmt: skip


def group_touch_(
    scores: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    policies: torch.Tensor,
    clocks: Tensors,
    occurrences: torch.Tensor | None = None,
    ticks: Sequence[int] = (),
) -> None:
    """Write the scores of the distinct rows of each table, one after another."""
    most = 2**32 - 1
    first_bag = first_entry = 0
    for t, (policy, halve_every) in enumerate(policies.tolist()):
        first_bag += int(features[features[:, 0] == t, 3].sum())
        entries = range(first_entry, int(bags[first_bag]))
        touches = [0] * int(counts[t])
        for e in entries:
            if 0 <= index[e] < counts[t]:
                given = 1 if occurrences is None else int(occurrences[e])
                touches[int(index[e])] += min(max(given, 0), most)
        if ticks and policy and len(scores[t]):
            clocks[t] += ticks[t]
        clock = int(clocks[t])
        now = clock % 2**32
        for j, count in enumerate(touches):
            row = int(rows[first_entry + j])
            if not 0 <= row < len(scores[t]) or policy == 0:
                continue
            word = clock
            if policy == 2:
                before, then = divmod(int(scores[t][row]) % 2**64, 2**32)
                halvings = now // halve_every - then // halve_every if halve_every else 0
                if now >= then:
                    before >>= min(halvings, 32)
                word = min(before + count, most) << 32 | now
            scores[t][row] = (word + 2**63) % 2**64 - 2**63
        first_entry = entries.stop


def group_drop_lowest_(
    buckets: Tensors,
    hash_seeds: Tensors,
    sizes: Tensors,
    tensors: Tensors,
    initial: Tensors,
    lists: Tensors,
    tables: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop the lowest rows of one table after another; keys stay in their buckets."""
    dropped, lost = [], []
    of_tensors, of_lists = iter(zip(tensors, initial, strict=True)), iter(lists)
    for t, (*policy, count, num_tensors, num_lists, num_pinned) in enumerate(tables.tolist()):
        size = int(sizes[t])
        own = [next(of_tensors) for _ in range(num_tensors)]
        numbers = [next(of_lists) for _ in range(num_lists)]
        pinned = torch.cat([torch.empty(0, dtype=torch.int64), *numbers[:num_pinned]])
        gone, _, _ = reference.lowest_rows(own[0][0], buckets[t], size, *policy, pinned, count)
        new_rows = reference.compact_rows(gone, size)
        rows = buckets[t].view(torch.int32)[:, 10:15]
        for numbered in (rows, *numbers):
            inside = (numbered >= 0) & (numbered < size)
            lost.append(bool((new_rows[numbered[inside].long()] < 0).any()))
            numbered[inside] = new_rows[numbered[inside].long()]
        lost.pop(-1 - num_lists)  # that of the buckets
        left = size - len(gone)
        moved, values = zip(*own, strict=True)
        reference.move_rows_(moved, new_rows, left, values)
        sizes[t].fill_(left)
        dropped.append(len(gone))
    return torch.tensor(dropped), torch.tensor(lost, dtype=torch.int64)
