"""A table with scores in plain Python: what the layers must do, step by step."""

import copy
from dataclasses import dataclass, field

import torch

MASK = 2**64 - 1
FIRST = -(2**63)


def tie(key):
    """Return the finaliser of splitmix64, as an unsigned number: the order of equal scores."""
    x = key & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class SGD:
    """w -= lr g, in numbers that are exact in binary."""

    lr, states = 0.125, ()

    def update(self, w, g, step):
        return w - self.lr * g, ()


class Momentum(SGD):
    """b = b / 2 + g, w -= lr b, for rows with a gradient."""

    states = ("momentum_buffer",)

    def update(self, w, b, g, step):
        b = 0.5 * b + g
        return w - self.lr * b, (b,)


class LazyAdam:
    """Adam for rows with a gradient, with the step of the whole table."""

    lr, states = 0.01, ("exp_avg", "exp_avg_sq")
    moves_all = False

    def update(self, w, m, v, g, step):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        scale = self.lr * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
        return w - scale * m / (v.sqrt() + 1e-8), (m, v)


class Adam(LazyAdam):
    """Adam of all rows: those without a gradient have one of zeros."""

    moves_all = True

    def update(self, w, m, v, g, step):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        divisor = (v / (1 - 0.999**step)).sqrt() + 1e-8
        return w - self.lr * (m / (1 - 0.9**step)) / divisor, (m, v)


@dataclass
class Row:
    """All that belongs to a key."""

    count: int
    then: int
    vector: torch.Tensor | None = None
    states: tuple = ()


@dataclass(eq=False)
class Lookup:
    """A lookup whose backward is to come."""

    bags: list
    keys: set


@dataclass
class Table:
    """Keys with a vector, optimizer states and a score each."""

    max_rows: int | None = None
    low_watermark: float = 0.99
    score: str = "lru"
    halve_every: int = 0
    score_of: object = None  # the user's score of a key
    ttl: int | None = None
    min_count: int | None = None  # of a key that is admitted
    expire_after: int | None = None
    sketch: bool = False  # whether counts stay when a key is admitted or erased
    probability: tuple | None = None  # of admission, and its seed
    zero: bool = False  # whether absent keys read zeros instead of their initial vectors
    fallback: int = 0  # rows that keys without a row share
    waiting: dict = field(default_factory=dict)  # of keys without a row: a count, and its clock
    admitted: dict = field(default_factory=dict)  # counts of the batch's new keys before it
    were_admitted: int = 0
    refused: int = 0
    rule: object = None
    initial: object = None  # returns the initial vectors of keys
    rows: dict = field(default_factory=dict)
    clock: int = 0
    user_clock: bool = False
    expired_in: int | None = None  # period of the clock in which rows were last expired
    step: int = 0
    pending: list = field(default_factory=list)  # lookups whose backward is to come
    grad: dict | None = None  # a sum for each key
    evicted: int = 0
    expired: int = 0
    # The rows that sweeps have dropped, as told: (expired, score) and the row, by key.
    dropped: dict = field(default_factory=dict)

    @property
    def next_clock(self):
        return self.clock + (not self.user_clock)

    def order(self, key, now):
        row = self.rows[key]
        if self.score == "lru":
            return row.then
        return self.aged(row, now)

    def aged(self, row, now):
        if not self.halve_every:
            return row.count
        return row.count >> min(32, now // self.halve_every - row.then // self.halve_every)

    def train(self, keys, read=()):
        """Look keys up in training; return the number of those that were dropped before.

        Args:
            keys: keys of features that insert.
            read: keys of all features.
        """
        before = self.evicted + self.expired
        for k in self.shared - self.rows.keys():
            (vector,) = self.initial([k])
            self.rows[k] = Row(
                0, 0, vector, tuple(torch.zeros_like(vector) for _ in self.rule.states)
            )
        self.make_room(keys, self.next_clock, read=read)
        self.clock = self.next_clock
        found = [k if k in self.admitted else self.placed(k) for k in keys]
        self.touch([k for k in found if k in self.rows or k in self.admitted])
        return self.evicted + self.expired - before

    def make_room(self, keys, now, by_hand=False, read=()):
        held = self.held().union(keys, read)
        if self.ttl is not None:
            every = max(1, self.ttl // 16)
            if self.expired_in != now // every:
                self.expired_in = now // every
                oldest = now - now % every - self.ttl
                old = [k for k, row in self.rows.items() if row.then < oldest]
                old = [k for k in old if k not in held]
                self.expired += self.drop(old, (True, now))
        absent = [k for k in dict.fromkeys(keys) if k not in self.rows]
        self.admitted = dict.fromkeys(absent, 0)
        if not by_hand and self.probability is not None:
            self.admit_by_chance(absent, now)
        elif not by_hand and self.min_count is not None:
            self.admit_by_count(absent, keys, now)
        self.stop_waiting(self.admitted)
        new = self.admitted
        if self.max_rows is not None and len(self.rows) + len(new) > self.max_rows:
            left = max(0, min(round(self.low_watermark * self.max_rows), self.max_rows - len(new)))
            self.evict(left, now, held)

    def admit_by_count(self, absent, keys, now):
        for k in absent:
            before, then = self.waiting.get(k, (0, now))
            if self.expire_after is not None and then < now - self.expire_after:
                before = 0
            self.waiting[k] = before + keys.count(k), now
            self.admitted[k] = before
            if self.waiting[k][0] < self.min_count:
                self.refuse(k)
        self.were_admitted += len(self.admitted)

    def admit_by_chance(self, absent, now):
        p, seed = self.probability
        for k in absent:
            if tie(k ^ tie(seed ^ (now << 1))) >> 11 >= p * 2**53:
                self.refuse(k)
        self.were_admitted += len(self.admitted)

    def refuse(self, key):
        del self.admitted[key]
        self.refused += 1

    def stop_waiting(self, keys):
        """Remove the counts of keys; a sketch cannot."""
        for k in keys:
            if not self.sketch:
                self.waiting.pop(k, None)

    @property
    def shared(self):
        """The keys of fallback rows: the smallest int64 numbers."""
        return {FIRST + f for f in range(self.fallback)}

    def placed(self, key):
        """Return the key whose row, if any, a key reads."""
        if not self.fallback or key in self.rows:
            return key
        signed = tie(key) - (2**64 if tie(key) >= 2**63 else 0)
        return FIRST + signed % self.fallback

    def held(self):
        """Return the keys of backwards to come, of a gradient, and of fallback rows."""
        return self.shared.union(self.grad or (), *(lookup.keys for lookup in self.pending))

    def touch(self, keys):
        now = self.clock
        fresh = [k for k in dict.fromkeys(keys) if k not in self.rows]
        if fresh and self.initial is not None:
            for key, vector in zip(fresh, self.initial(fresh), strict=True):
                states = tuple(torch.zeros_like(vector) for _ in self.rule.states)
                self.rows[key] = Row(0, now, vector, states)
        for key in keys:
            row = self.rows.setdefault(key, Row(0, now))
            row.count, row.then = self.aged(row, now) + 1 + self.admitted.pop(key, 0), now
            if self.score_of is not None:
                row.count = 0 if key in self.shared else self.score_of(key)

    def evict(self, left, now, held):
        """Drop the lowest until `left` rows are left; return how many were dropped."""
        free = [k for k in self.rows if k not in held]
        free.sort(key=lambda k: (self.order(k, now), tie(k)))
        dropped = self.drop(free[: max(0, len(self.rows) - left)], (False, now))
        self.evicted += dropped
        return dropped

    def drop(self, keys, told=None):
        """Drop keys; `told`: whether they have expired, and the clock, if a sweep drops them."""
        keys = list(keys)
        for key in keys:
            if told is not None:
                self.dropped[key] = (told[0], self.order(key, told[1])), self.rows[key]
            del self.rows[key]
        return len(keys)

    def word(self, key):
        row = self.rows[key]
        if self.score == "lru":
            return row.then
        return row.count << 32 | row.then

    # Training.

    def vectors(self, keys):
        """Return the vectors of keys, ``[n, dim]``; initial vectors, or zeros, of absent keys."""
        vectors = self.initial(keys) * (not self.zero)
        for place, key in enumerate(keys):
            if key in self.rows:
                vectors[place] = self.rows[key].vector
        return vectors

    def pooled(self, bags):
        """Return the sum of the vectors of each bag."""
        flat = [key for bag in bags for key in bag]
        of_bag = torch.tensor([i for i, bag in enumerate(bags) for _ in bag], dtype=torch.int64)
        vectors = self.vectors(flat)
        return vectors.new_zeros(len(bags), vectors.shape[1]).index_add_(0, of_bag, vectors)

    def backward(self, lookup, grads, scale):
        """Add the gradients of a lookup's bags to those of its keys; absent keys get none."""
        if lookup in self.pending:
            self.pending.remove(lookup)
        self.grad = {} if self.grad is None else self.grad
        for bag, grad in zip(lookup.bags, grads, strict=True):
            for key in bag:
                if key in lookup.keys:
                    self.grad[key] = self.grad.get(key, 0) + grad * scale

    def apply(self):
        """Apply a step of the optimizer, and take the gradient away."""
        grad, self.grad = self.grad, None
        if grad is None:
            return
        self.step += 1
        keys = list(self.rows if getattr(self.rule, "moves_all", False) else grad)
        if not keys:
            return
        rows = [self.rows[key] for key in keys]
        zero = torch.zeros_like(rows[0].vector)
        g = torch.stack([grad.get(key, zero) for key in keys])
        states = [torch.stack(each) for each in zip(*(row.states for row in rows), strict=True)]
        w = torch.stack([row.vector for row in rows])
        w, states = self.rule.update(w, *states, g, self.step)
        for place, row in enumerate(rows):
            row.vector, row.states = w[place], tuple(state[place] for state in states)

    def saved(self):
        """Return a copy of what a state has."""
        return copy.deepcopy((self.rows, self.clock, self.step, self.waiting))

    def load(self, saved):
        self.rows, self.clock, self.step, self.waiting = copy.deepcopy(saved)
        self.expired_in = None  # rows that were held may have expired
        self.pending.clear()
