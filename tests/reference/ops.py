"""Implements every op in plain torch; tests compare the kernels with these functions.

Functions have the signatures of `sparsekit.ops`. Nothing here is fast. Differentiable ops get their
gradients here from autograd alone. The hash table is a class around a dict, since the layout of
buckets is not part of the ops' meaning.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sparsekit.hashing import xxh64
from sparsekit.ops._checks import accumulate_dtype

from .rules import RULES

_MASK = 0xFFFFFFFF


def unique(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the distinct keys by first occurrence, each key's index among them, and the counts."""
    position: dict[int, int] = {}
    inverse = [position.setdefault(key, len(position)) for key in keys.tolist()]
    as_tensor = torch.tensor(inverse, dtype=torch.int64, device=keys.device)
    return (
        torch.tensor(list(position), dtype=keys.dtype, device=keys.device),
        as_tensor,
        torch.bincount(as_tensor, minlength=len(position)),
    )


def mixed(keys: torch.Tensor) -> list[int]:
    """Return the finaliser of splitmix64 of each key, as a number in [0, 2^64)."""
    hashes = []
    for key in keys.tolist():
        x = key % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        hashes.append(x ^ x >> 31)
    return hashes


def compact_rows(gone: torch.Tensor, size: int) -> torch.Tensor:
    """Move the last rows that stay, one by one, into the places of the first rows that go."""
    left, places, new_rows = size - len(gone), gone.tolist(), []
    for row in range(size):
        stays = row not in gone
        new_rows.append((row if row < left else places.pop(0)) if stays else -1)
    return torch.tensor(new_rows, dtype=torch.int32)


def lowest_rows(
    scores: torch.Tensor,
    buckets: torch.Tensor,
    size: int,
    kind: int,
    halve_every: int,
    now: int,
    pinned: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the rows that are not pinned by order and hash of the key, and take the first ones."""
    rows = buckets.view(torch.int32)[:, 10:15]
    keys = torch.zeros(max(size, 1), dtype=torch.int64)
    inside = (rows >= 0) & (rows < size)
    keys[rows[inside].long()] = buckets[:, :5][inside]
    orders = []
    for word in scores[:size].tolist():
        touches, then = divmod(word % 2**64, 2**32)
        halvings = now // halve_every - then // halve_every if halve_every and now >= then else 0
        orders.append(word if kind == 1 else touches >> min(halvings, 32))
    hashes = mixed(keys)
    free = set(range(size)) - set(pinned.tolist())
    found = sorted(sorted(free, key=lambda row: (orders[row], hashes[row]))[:count])
    rows = torch.tensor(found, dtype=torch.int64)
    return rows, torch.tensor([orders[row] for row in found], dtype=torch.int64), keys[rows]


def move_rows_(
    tensors: Sequence[torch.Tensor],
    new_rows: torch.Tensor,
    left: int,
    initial: Sequence[torch.Tensor],
) -> None:
    """Move the last rows one by one, and overwrite them."""
    for tensor, value in zip(tensors, initial, strict=True):
        for row in range(left, len(new_rows)):
            if new_rows[row] >= 0:
                tensor[int(new_rows[row])] = tensor[row]
            tensor[row] = value


def virtual_shard(key: int) -> int:
    """Return the upper 16 bits of MurmurHash3's finaliser of a key. Saved tables depend on this."""
    x = key % 2**64
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD % 2**64
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
    return x >> 48


def bucketize(
    keys: torch.Tensor, world_size: int, owners: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the keys sorted by owner, the number of keys per owner, and the sorting permutation.

    The owner is ``owners[virtual_shard(key)]``, or without a map ``unsigned(key) % world_size``.
    """
    if owners is None:
        ranks = [key % 2**64 % world_size for key in keys.tolist()]
    else:
        ranks = [int(owners[virtual_shard(key)]) for key in keys.tolist()]
    owner = torch.tensor(ranks, dtype=torch.int64, device=keys.device)
    permutation = owner.argsort(stable=True)
    return keys[permutation], torch.bincount(owner, minlength=world_size), permutation


def gather_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``out[i] = table[rows[i]]``, or zeros where ``rows[i] < 0``."""
    with_zeros = torch.cat([table.new_zeros(1, table.shape[1]), table])
    return with_zeros[rows.clamp(min=-1) + 1]


def hash_integers(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return XXH64 of each integer's decimal text."""
    return xxh64([str(value) for value in values.tolist()], seed).to(values.device)


def unsorted_segment_sum(
    data: torch.Tensor, segment_ids: torch.Tensor, num_segments: int
) -> torch.Tensor:
    """Return ``out[s]``, the sum of ``data[i]`` with ``segment_ids[i] == s``; skip ids < 0."""
    kept = (segment_ids >= 0).nonzero().squeeze(1)
    total = _segment_sum(data[kept], segment_ids[kept], num_segments)
    return total.to(data.dtype)


def _segment_sum(data: torch.Tensor, ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Sum in the dtype used for accumulation; no id may be negative."""
    data = data.to(accumulate_dtype(data.dtype))
    return data.new_zeros(num_segments, *data.shape[1:]).index_add(0, ids, data)


def embedding_bag(
    weight: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    combiner: str = "sum",
    sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pool ``rows[offsets[b]:offsets[b + 1]]`` of weight into bag b.

    With rows x_i and weights w_i, S = sum w_i x_i: sum is S, mean is S / sum w_i, sqrtn is
    S / sqrt(sum w_i^2). A negative row is a zero vector that counts like any other. An empty bag
    and a divisor of zero give zeros.
    """
    bags = len(offsets) - 1
    bag = torch.repeat_interleave(torch.arange(bags, device=rows.device), offsets.diff())
    x = gather_rows(weight, rows).to(accumulate_dtype(weight.dtype))
    w = x.new_ones(len(rows)) if sample_weights is None else sample_weights.to(x.dtype)
    pooled = _segment_sum(w.unsqueeze(1) * x, bag, bags)
    if combiner != "sum":
        divisor = _segment_sum(w if combiner == "mean" else w * w, bag, bags)
        zero = divisor == 0
        # Replace zeros before the root and the division, so that no gradient becomes NaN.
        divisor = divisor.masked_fill(zero, 1)
        divisor = divisor.sqrt() if combiner == "sqrtn" else divisor
        pooled = (pooled / divisor.unsqueeze(1)).masked_fill(zero.unsqueeze(1), 0)
    return pooled.to(weight.dtype)


class HashTable:
    """Table that maps keys to rows 0, 1, 2, ... in order of first occurrence."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.row: dict[int, int] = {}

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the rows of keys, -1 where a key is absent."""
        return torch.tensor([self.row.get(key, -1) for key in keys.tolist()], dtype=torch.int64)

    def find_or_insert(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Insert absent keys; return the rows of all keys, and (old size, entries without a row).

        All or nothing: if the new keys do not all fit, none is inserted, and their rows are -1.
        """
        before = len(self.row)
        new = [key for key in dict.fromkeys(keys.tolist()) if key not in self.row]
        if before + len(new) <= self.capacity:
            self.row.update(zip(new, range(before, before + len(new)), strict=True))
        rows = self.find(keys)
        return rows, torch.tensor([before, int((rows < 0).sum())])

    def keys(self) -> torch.Tensor:
        """Return all keys; the key of row i is at position i."""
        return torch.tensor(list(self.row), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.row)


def philox4x32_10(counter: Iterable[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Return four random words from a counter of four and a key of two 32-bit words, all int64.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011: ten
    rounds of two 32 x 32 -> 64 bit products; between rounds, two Weyl constants change the key.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The products wrap to negative numbers, but the mask still takes the right 32 bits.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product1 >> 32 & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32 & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


def init_vectors(
    keys: torch.Tensor, dim: int, *, seed: int, distribution: str, a: float, b: float
) -> torch.Tensor:
    """Compute initial vectors, float32 ``[n, dim]``: a function of key, column and seed alone.

    Columns 4 j to 4 j + 3 are the four words of the counter (low half of the key, high half, j, 0)
    under the two halves of the seed.

    Constant gives a. Uniform in [a, b) takes the upper 24 bits u of a word and gives
    a + u / 2^24 * (b - a) in float32; if this rounds up to b, the result is the float below b.
    Normal gives a + b z in float64, with z by Box-Muller from two neighbouring words.
    """
    if distribution == "constant":
        return torch.full((len(keys), dim), a, dtype=torch.float32, device=keys.device)
    column = torch.arange((dim + 3) // 4, device=keys.device)
    zero = torch.zeros(len(keys), len(column), dtype=torch.int64, device=keys.device)
    low, high = keys.unsqueeze(1) & _MASK, keys.unsqueeze(1) >> 32 & _MASK
    key = (seed & _MASK, seed >> 32 & _MASK)
    words = torch.stack(philox4x32_10([low + zero, high + zero, column + zero, zero], key), dim=2)
    if distribution == "uniform":
        a32, b32 = torch.tensor([a, b], dtype=torch.float32, device=keys.device)
        values = a32 + (words >> 8).to(torch.float32) * 2**-24 * (b32 - a32)
        values = torch.where((values >= b32) & (b32 > a32), torch.nextafter(b32, a32), values)
    else:
        a, b = torch.tensor([a, b], dtype=torch.float32).tolist()  # the parameters are float32
        words = words.unflatten(2, (2, 2)).to(torch.float64)
        radius = torch.sqrt(-2 * torch.log((words[..., 0] + 1) * 2**-32))
        angle = 2 * math.pi * 2**-32 * words[..., 1]
        z = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=3)
        values = (a + b * z).to(torch.float32)
    return values.reshape(len(keys), 4 * len(column))[:, :dim]


def init_rows_(
    out: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
    *,
    seed: int = 0,
    distribution: str = "uniform",
    a: float = -0.05,
    b: float = 0.05,
) -> None:
    """Set ``out[rows[i]]`` to the initial vector of ``keys[i]``.

    Rows below 0 or below ``status[0]`` are left unchanged. Without `rows`, row i gets the
    vector of ``keys[i]``.
    """
    rows = torch.arange(len(keys), device=keys.device) if rows is None else rows
    written = rows >= max(0, 0 if status is None else int(status[0]))
    vectors = init_vectors(
        keys[written], out.shape[1], seed=seed, distribution=distribution, a=a, b=b
    )
    out[rows[written]] = vectors.to(out.dtype)


def update_rows_(
    weight: Any,
    states: Sequence[torch.Tensor],
    row_step: Any,
    rows: Any,
    grad: Any,
    step: Any,
    rule: str,
    settings: Sequence[float],
    *,
    per_row: bool = False,
    rounding_seed: int | None = None,
    count_steps: bool = False,
    lr: torch.Tensor | None = None,
) -> None:
    """Take an optimizer step on `rows`, or on all rows if None, of one table or of several."""
    settings = settings if lr is None else [lr.item(), *settings[1:]]
    if not isinstance(weight, torch.Tensor):
        each = len(states) // len(weight)
        for i, own in enumerate(weight):
            update_rows_(
                own, states[i * each : (i + 1) * each], row_step[i] if row_step else None,
                rows[i] if rows else None, grad[i], step[i], rule, settings,
                per_row=per_row, rounding_seed=rounding_seed, count_steps=count_steps,
            )  # fmt: skip
        return
    if count_steps:
        step.add_(1)
    rows = torch.arange(len(weight), device=weight.device) if rows is None else rows
    dtype = accumulate_dtype(weight.dtype)
    if row_step is not None:
        now = row_step[rows].to(torch.int64) + 1 if per_row else step
        row_step[rows] = now.clamp(max=2**31 - 1).to(row_step.dtype)
    counts = row_step[rows] if row_step is not None and per_row else step.expand(len(rows))
    t = counts.to(torch.float64).unsqueeze(1)
    s = [state[rows] if state.dim() == 2 else state[rows].unsqueeze(1) for state in states]
    w, s = RULES[rule](settings, t, grad.to(dtype), weight[rows].to(dtype), s)
    if rounding_seed is not None and weight.dtype == torch.bfloat16:
        weight[rows] = _rounded_at_random(w, rows, int(step), rounding_seed)
    else:
        weight[rows] = w.to(weight.dtype)
    for state, new in zip(states, s, strict=True):
        state[rows] = new[:, 0] if state.dim() == 1 else new


def _rounded_at_random(w: torch.Tensor, rows: torch.Tensor, step: int, seed: int) -> torch.Tensor:
    """Round float32 to bfloat16: add 16 random bits to the lower 16 bits, then drop these.

    Columns 8 b to 8 b + 7 get the eight halves of Philox4x32-10 of (row, b, step), lower halves
    first.
    """
    block = torch.arange((w.shape[1] + 7) // 8, device=w.device)
    zero = torch.zeros(len(rows), len(block), dtype=torch.int64, device=w.device)
    low, high = rows.unsqueeze(1) & _MASK, rows.unsqueeze(1) >> 32
    key = (seed & _MASK, (seed >> 32 ^ step >> 32) & _MASK)
    counter = [low + zero, high + zero, block + zero, zero + (step & _MASK)]
    words = torch.stack(philox4x32_10(counter, key), dim=2)
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=3).flatten(1)
    bits = w.view(torch.int32).to(torch.int64) & _MASK
    cut = (bits + halves[:, : w.shape[1]] >> 16 << 16).to(torch.int64)
    cut = torch.where(cut >= 2**31, cut - 2**32, cut).to(torch.int32)
    return torch.where(w.isnan(), w, cut.view(torch.float32)).to(torch.bfloat16)


def catch_up_rows_(
    weight: torch.Tensor,
    states: Sequence[torch.Tensor],
    row_step: torch.Tensor,
    rows: torch.Tensor | None,
    numbers: torch.Tensor,
    first_step: int,
    rule: str,
    settings: Sequence[float],
) -> None:
    """Take the steps without a gradient that late rows have missed, one after another."""
    if len(numbers) == 0:
        return
    rows = torch.arange(len(weight), device=weight.device) if rows is None else rows
    dtype = accumulate_dtype(weight.dtype)
    for row in rows[rows >= 0].tolist():
        if row_step[row] == 0:
            continue
        for i, (first, second) in enumerate(numbers.tolist()):
            if first_step + i <= row_step[row]:
                continue
            w, zero = weight[row].to(dtype), torch.zeros_like(weight[row], dtype=dtype)
            once = torch.ones(1)
            if rule == "adam":
                _, s = RULES[rule](settings, once, zero, w, [state[row] for state in states])
                w = w - first * (s[0] / (s[1].sqrt() + second))
            else:
                own = [first, settings[1], 0, settings[3]]
                w, s = RULES[rule](own, once, zero, w, [state[row] for state in states])
            weight[row] = w.to(weight.dtype)
            for state, new in zip(states, s, strict=True):
                state[row] = new
        row_step[row] = max(int(row_step[row]), first_step + len(numbers) - 1)
