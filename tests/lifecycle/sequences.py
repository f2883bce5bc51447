"""Random operations on layers whose rows are evicted, each compared with the plain model.

Every rank runs the same sequence, drawn from one seed, with its own part of each batch. The model
is whole on every rank, and each rank compares the rows of the keys that it owns.
"""

import copy
import io
import os
import random
from dataclasses import dataclass
from functools import partial
from tempfile import gettempdir
from unittest.mock import patch

import pytest
import torch

import sparsekit
from sparsekit import MinCount, Probability, checkpoint
from sparsekit.optim import fuse_in_backward
from sparsekit.tables import growth

from . import model

# Sequences per engine and number of ranks, and operations in each. 300x500 takes a quarter of an
# hour on the CPU engine, and longer on the host runner.
SEQUENCES, STEPS = map(int, os.environ.get("SPARSEKIT_LIFECYCLE", "10x60").split("x"))

EXTREMES = [0, -1, 2**63 - 1, -(2**63)]
UNIVERSE = [*EXTREMES, *range(1, 60), *(2**32 * i for i in range(1, 30))]
ROWS = sparsekit.Fallback(3)
# Features of the group, and the layers that they ask.
FEATURES = {"f": "a", "g": "a", "h": "b"}
DIMS = {"a": 3, "b": 4}


def remainder(keys):
    """Return a score that does not depend on when a key has come; of a key, or of a tensor."""
    return keys % 13


def worth(salt, keys):
    """Return a score for each key of a lookup."""
    return (keys % 13 + salt) % 13


POLICIES = {
    "lru": ("lru", {}),
    "lfu": (sparsekit.LFU(0), {"score": "lfu"}),
    "aged lfu": (sparsekit.LFU(7), {"score": "lfu", "halve_every": 7}),
    "function": (remainder, {"score": "user", "score_of": remainder}),
    "given": ("given", {"score": "user"}),
}
# How keys are admitted, and the model's settings for it.
ADMISSIONS = {
    "all": (None, {}),
    "counts": (MinCount(2), {"min_count": 2}),
    "expiring counts": (MinCount(3, expire_after=8), {"min_count": 3, "expire_after": 8}),
    # So wide that no two of our keys share their places.
    "sketch": (MinCount(3, sketch_bytes=1 << 16), {"min_count": 3, "sketch": True}),
    "chance": (Probability(0.4, seed=5), {"probability": (0.4, 5)}),
}
RULES = {
    "SGD": (model.SGD, sparsekit.optim.SGD, {"lr": 0.125}),
    "SGD momentum": (model.Momentum, sparsekit.optim.SGD, {"lr": 0.125, "momentum": 0.5}),
    "LazyAdam": (model.LazyAdam, sparsekit.optim.LazyAdam, {"lr": 0.01}),
    "Adam": (model.Adam, sparsekit.optim.Adam, {"lr": 0.01}),
}
# Largest difference of vectors and states; 0 where all sums are exact.
TOLERANCE = {"SGD": 0.0, "SGD momentum": 0.0, "LazyAdam": 1e-10, "Adam": 1e-10}


# Operations, and how often each is drawn.
OPERATIONS = {
    "forward": 30,
    "backward": 30,
    "look_only": 10,
    "forget": 3,
    "step": 2,
    "prefetch": 8,
    "assign": 4,
    "erase": 4,
    "clear": 0.3,
    "evict": 4,
    "set_clock": 4,
    "save": 2,
    "load": 1,
    "replace": 1,
    "save_files": 1,
    "load_files": 0.7,
}


@dataclass(eq=False)
class Part:
    """The part of a lookup in one table: the model's lookup, and gradients of all ranks' bags."""

    table: str
    lookup: model.Lookup
    grads: torch.Tensor


@dataclass(eq=False)
class Pending:
    """A lookup of the layers whose backward is to come."""

    outputs: list
    grads: list
    parts: list


class Sequence:
    """Layers, their optimizer and the model of each table.

    Args:
        seed: seed of all choices.
        folder: an empty folder for checkpoints, the same on all ranks.
        rank, world_size: as of torch.distributed.
    """

    def __init__(self, seed, folder, rank=0, world_size=1):
        draw = self.draw = random.Random(seed)
        self.rank, self.world_size, self.ranks = rank, world_size, range(world_size)
        self.rule = draw.choice(list(RULES))
        self.fused = draw.random() < 0.4
        # All draws are the same for any number of ranks, which may go on with another one's files.
        self.reduction = "mean" if draw.random() < 0.5 and world_size == 2 else "sum"
        self.sets_clock = draw.random() < 0.4
        of_model, self.kind, self.settings = RULES[self.rule]
        dtype = torch.float32 if TOLERANCE[self.rule] == 0 else torch.float64
        strategy = draw.choice(["auto", "all_to_all", "reduce_scatter"])
        self.made, self.models, self.padding, self.given = {}, {}, {}, []
        self.universe = list(UNIVERSE)
        for name in "ab":
            policy = draw.choice(list(POLICIES))
            score, of_score = POLICIES[policy]
            self.given += [name] if score == "given" else []
            ttl = draw.choice([None, None, 5, 20, 40])
            max_rows = draw.randint(6, 30)
            low = draw.choice([0.95, 0.95, 0.5, 0.75, 1.0])
            budget = {"on_full": "evict", "max_rows": max_rows, "low_watermark": low}
            rows = 150
            if draw.random() < 0.3:
                budget, max_rows = {}, None
                ttl = ttl or 60
                if draw.random() < 0.7:
                    budget = {"on_full": "grow", "max_capacity": 1 << 16}
                    rows = draw.choice([1, 5, 40])
            if draw.random() < 0.3:
                most = draw.choice([1, 2, 1000]) * 4096
                budget |= {"storage": f"mmap:{gettempdir()}", "max_resident_bytes": most}
            self.padding[name] = draw.choice([None, None, 1])
            admission, of_admission = ADMISSIONS[draw.choice(["all", *ADMISSIONS])]
            before = draw.choice(["initial", "zero", ROWS]) if admission else "initial"
            if before is ROWS:
                # The smallest key is that of a fallback row.
                self.universe[UNIVERSE.index(-(2**63))] = -(2**63) + ROWS.rows
            plain = partial(
                sparsekit.DistributedEmbedding,
                *("sum", rows, DIMS[name], 1),
                seed=seed + ord(name),
                name=name,
                dtype=dtype,
                strategy=strategy,
                gradient_reduction=self.reduction,
                padding_key=self.padding[name],
            )
            self.made[name] = partial(
                plain, score=score, ttl=ttl, admission=admission, before_admission=before, **budget
            )
            every = [*UNIVERSE, *(-(2**63) + f for f in range(1, ROWS.rows + 1))]
            first = plain().vectors(torch.tensor(every))
            initial = dict(zip(every, first, strict=True))
            self.models[name] = model.Table(
                max_rows,
                low_watermark=low,
                ttl=ttl,
                rule=of_model(),
                initial=lambda keys, initial=initial, like=first: torch.stack(
                    [*(initial[k] for k in keys), like[0]]
                )[:-1].clone(),
                zero=before == "zero",
                fallback=ROWS.rows if before is ROWS else 0,
                **of_score,
                **of_admission,
            )
        self.reads = draw.choice([[], [], ["g"], ["h"], ["f", "g"], ["f", "h"]])
        layers = self.new_layers()
        owned = layers["a"].owned(torch.tensor(every)).tolist()
        self.owned = {every[place] for place in owned}
        self.take(layers)
        self.pending, self.prefetched, self.saved = [], None, None
        self.folder, self.saved_files = folder, None
        self.checkpoints = checkpoint.Checkpoints(folder, complete_every=3, keep=2)
        self.drift = self.number = 0

    def new_layers(self, **options):
        return torch.nn.ModuleDict({name: made(**options) for name, made in self.made.items()})

    def take(self, layers, state=None):
        """Go on with other layers."""
        self.layers = layers
        features = {
            name: sparsekit.Feature(table, insert=name not in self.reads)
            for name, table in FEATURES.items()
        }
        self.group = sparsekit.EmbeddingGroup(layers, features)
        self.optimizer = self.kind(layers.parameters(), **self.settings)
        if state is not None:
            self.optimizer.load_state_dict(state)
        if self.fused:
            fuse_in_backward(self.optimizer, layers)
        self.told = {"a": {}, "b": {}}
        for name, layer in layers.items():
            layer.life.on_evict = partial(self.hear, name)

    def hear(self, name, evicted):
        """Note what a sweep has dropped."""
        kind = type(self.optimizer).__name__
        states = [
            evicted.states[f"{kind}.{state}"]
            for state in self.models[name].rule.states
            if f"{kind}.{state}" in evicted.states  # there are none before the first step
        ]
        each = zip(evicted.scores.tolist(), evicted.vectors, *states, strict=True)
        for key, belongings in zip(evicted.keys.tolist(), each, strict=True):
            assert key not in self.told[name]
            self.told[name][key] = evicted.expired, *belongings

    # Drawing.

    def key(self):
        place = int(len(UNIVERSE) * self.draw.random() ** 3) + self.drift
        return self.universe[place % len(UNIVERSE)]

    def bags(self):
        """Return the bags of each rank."""
        most = self.draw.choice([0, 1, 3, 5])
        return [
            [[self.key() for _ in range(self.draw.randint(0, 4))] for _ in range(most)]
            for _ in self.ranks
        ]

    def own(self, bags):
        """Return this rank's bags as an input."""
        values = [key for bag in bags[self.rank] for key in bag]
        lengths = torch.tensor([0, *map(len, bags[self.rank])])
        return torch.tensor(values, dtype=torch.int64), lengths.cumsum(0)

    def scores(self, inputs, salt):
        """Return the scores of inputs, as arguments of a group."""
        given = {
            name: worth(salt, keys)
            for name, (keys, _) in inputs.items()
            if FEATURES.get(name, name) in self.given
        }
        return {"scores": given} if given else {}

    def scale(self):
        return 1 / self.world_size if self.reduction == "mean" else 1

    # Operations.

    def ask(self, what, inserts, bags):
        """Return the outputs of a lookup, and the model's part of each table.

        Args:
            what: "a", "b" or "group".
            inserts: whether the lookup is one of training.
            bags: for each feature, or for the layer, the bags of each rank.
        """
        inserts |= self.prefetched is not None and what == "group"
        self.group.train(inserts)
        salt = self.draw.randrange(13)
        inputs = {name: self.own(one) for name, one in bags.items()}
        if what == "group":
            if self.prefetched is not None:
                (inputs, bags, salt), self.prefetched = self.prefetched, None
                outputs = list(self.group(inputs).values())
            else:
                outputs = list(self.group(inputs, **self.scores(inputs, salt)).values())
        else:
            scores = self.scores(inputs, salt).get("scores", {}).get(what)
            outputs = [self.layers[what](inputs[what], scores=scores).squeeze(1)]
        of_tables = {}
        for name, one in bags.items():
            of_tables.setdefault(FEATURES.get(name, name), []).append((name, one))
        found = {}
        for table, several in of_tables.items():
            of_features = {
                name: [
                    [key for key in bag if key != self.padding[table]]
                    for of_rank in one
                    for bag in of_rank
                ]
                for name, one in several
            }
            flat = [bag for own in of_features.values() for bag in own]
            keys = [key for bag in flat for key in bag]
            if table in self.given:
                self.models[table].score_of = partial(worth, salt)
            inserting = [name for name in of_features if name not in self.reads]
            if inserts and inserting:
                inserted = [key for name in inserting for bag in of_features[name] for key in bag]
                self.models[table].train(inserted, keys)
            flat = [[self.models[table].placed(key) for key in bag] for bag in flat]
            known = {key for bag in flat for key in bag if key in self.models[table].rows}
            found[table] = model.Lookup(flat, known), self.models[table].pooled(flat)
        places = dict.fromkeys(of_tables, 0)
        each = zip(outputs, bags.items(), strict=True)
        slices = []
        for output, (name, one) in each:
            table = FEATURES.get(name, name)
            first = places[table] + sum(map(len, one[: self.rank]))
            own = slice(first, first + len(one[self.rank]))
            places[table] += sum(map(len, one))
            slices.append((table, own))
            expected = found[table][1][own]
            assert torch.allclose(output, expected, rtol=1e-5, atol=1e-5)
        return outputs, {table: lookup for table, (lookup, _) in found.items()}, slices

    def draw_lookup(self):
        what = "group" if self.prefetched is not None else self.draw.choice(["a", "b", "group"])
        names = FEATURES if what == "group" else [what]
        return what, {name: self.bags() for name in names}

    def forward(self):
        inserts = self.draw.random() < 0.85
        outputs, lookups, slices = self.ask(*self.with_mode(self.draw_lookup(), inserts))
        seed = self.draw.randrange(2**31)
        grads = {}
        for table, lookup in lookups.items():
            shape = len(lookup.bags), DIMS[table]
            whole = torch.randint(
                -4, 5, shape, generator=torch.Generator(device="cpu").manual_seed(seed)
            )
            grads[table] = whole.to(outputs[0].dtype)
            self.models[table].pending.append(lookup)
        own = [grads[table][place] for table, place in slices]
        parts = [Part(table, lookup, grads[table]) for table, lookup in lookups.items()]
        self.pending.append(Pending(outputs, own, parts))

    def with_mode(self, drawn, inserts):
        return drawn[0], inserts, drawn[1]

    def look_only(self):
        """Look up without gradients, in training or in evaluation."""
        with torch.no_grad():
            self.ask(*self.with_mode(self.draw_lookup(), self.draw.random() < 0.5))

    def forget(self):
        """Drop the graph of a lookup."""
        if self.pending:
            gone = self.pending.pop(self.draw.randrange(len(self.pending)))
            for part in gone.parts:
                self.models[part.table].pending.remove(part.lookup)

    def backward(self):
        if not self.pending:
            return self.forward()
        one = self.pending.pop(self.draw.randrange(len(self.pending)))
        times = 1 + (not self.fused and self.draw.random() < 0.1)
        for left in reversed(range(times)):
            torch.autograd.backward(one.outputs, one.grads, retain_graph=left > 0)
            for part in one.parts:
                self.models[part.table].backward(part.lookup, part.grads, self.scale())
        if self.fused or self.draw.random() < 0.7:
            self.step()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        for table in self.models.values():
            table.apply()

    def prefetch(self):
        if self.prefetched is None:
            self.group.train()
            bags = {name: self.bags() for name in FEATURES}
            inputs = {name: self.own(one) for name, one in bags.items()}
            salt = self.draw.randrange(13)
            self.group.prefetch(inputs, **self.scores(inputs, salt))
            self.prefetched = inputs, bags, salt

    def some_keys(self, but=None):
        """Return keys of each rank."""
        keys = [[self.key() for _ in range(self.draw.randint(0, 5))] for _ in self.ranks]
        return [[key for key in of_rank if key != but] for of_rank in keys]

    def assign(self):
        name = self.draw.choice("ab")
        table, keys = self.models[name], self.some_keys(self.padding[name])
        values = [
            [[self.draw.randint(-8, 8) / 8] * DIMS[name] for _ in of_rank] for of_rank in keys
        ]
        dtype = self.layers[name].weight.dtype
        own = torch.tensor(values[self.rank], dtype=dtype).view(-1, DIMS[name])
        self.layers[name].assign(torch.tensor(keys[self.rank], dtype=torch.int64), own)
        flat = [key for of_rank in keys for key in of_rank]
        distinct = list(dict.fromkeys(flat))
        if name in self.given:  # rows keep their scores
            counts = {key: row.count for key, row in table.rows.items()}
            table.score_of = lambda key: counts.get(key, 0)
        table.make_room(distinct, table.next_clock, by_hand=True)
        table.touch(distinct)
        for key, value in zip(flat, (v for of_rank in values for v in of_rank), strict=True):
            table.rows[key].vector = torch.tensor(value, dtype=dtype)

    def quiet(self):
        """Drop the lookups whose backward is to come, and the gradient."""
        while self.pending:
            self.forget()
        self.optimizer.zero_grad()
        for table in self.models.values():
            table.grad = None

    def erase(self):
        name = self.draw.choice("ab")
        table, layer, keys = self.models[name], self.layers[name], self.some_keys()
        own = torch.tensor(keys[self.rank], dtype=torch.int64)
        if table.grad is not None:
            with pytest.raises(RuntimeError, match="weight has a gradient"):
                layer.erase(own)
            return
        asked = {key for of_rank in keys for key in of_rank}
        table.stop_waiting(asked)
        gone = asked & table.rows.keys()
        assert layer.erase(own) == len(gone) == table.drop(gone)
        self.refused(name, bool(gone))

    def clear(self):
        name = self.draw.choice("ab")
        table, layer = self.models[name], self.layers[name]
        if table.grad is not None:
            with pytest.raises(RuntimeError, match="weight has a gradient"):
                layer.clear()
            return
        assert layer.clear() == table.drop(list(table.rows))
        table.waiting.clear()
        self.refused(name, True)

    def refused(self, name, changed):
        """Check that lookups in a table whose rows have other keys have no backward any more."""
        for one in list(self.pending):
            if changed and any(part.table == name for part in one.parts):
                if self.world_size == 1:
                    with pytest.raises(RuntimeError, match=f"{name}: its rows have other keys"):
                        torch.autograd.backward(one.outputs, one.grads)
                self.pending.remove(one)
                for part in one.parts:
                    self.models[part.table].pending.remove(part.lookup)

    def evict(self):
        name = self.draw.choice("ab")
        table, layer = self.models[name], self.layers[name]
        in_use = len(table.rows)
        if self.draw.random() < 0.5:
            fraction = self.draw.choice([0.0, 0.1, 0.3, 1.0])
            dropped, left = layer.evict(fraction=fraction), in_use - round(fraction * in_use)
        else:
            keep = self.draw.randint(0, 40)
            dropped, left = layer.evict(keep=keep), keep
        assert dropped == (
            table.evict(left, table.next_clock, table.held()) if left < in_use else 0
        )

    def set_clock(self):
        if not self.sets_clock:
            return
        now = max(table.clock for table in self.models.values()) + self.draw.choice([0, 1, 4, 30])
        behind = self.draw.randrange(self.world_size)  # the latest of all ranks counts
        own = now if self.rank == behind else max(t.clock for t in self.models.values())
        assert sparsekit.set_clock(self.layers, own) == now
        for table in self.models.values():
            table.clock, table.user_clock = now, True

    def save(self):
        state = copy.deepcopy((self.layers.state_dict(), self.optimizer.state_dict()))
        if self.draw.random() < 0.5:
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file)
        self.saved = state, {name: table.saved() for name, table in self.models.items()}

    def load(self):
        # Keys that are on their way while a state is loaded may leave the table over its budget.
        if self.saved is not None and self.prefetched is None:
            self.quiet()
            (of_layers, of_optimizer), of_models = self.saved
            self.layers.load_state_dict(of_layers)
            self.optimizer.load_state_dict(of_optimizer)
            for name, table in self.models.items():
                table.load(of_models[name])

    def replace(self):
        """Go on with a copy of the layers, or with what was pickled."""
        if self.prefetched is not None:
            return
        self.quiet()
        state = copy.deepcopy(self.optimizer.state_dict())
        if self.draw.random() < 0.5:
            return self.take(copy.deepcopy(self.layers), state)
        file = io.BytesIO()
        torch.save(self.layers, file)
        file.seek(0)
        self.take(torch.load(file, weights_only=False), state)

    def save_files(self):
        """Save a checkpoint, which holds only the changes since the one before, if it may."""
        self.checkpoints.save(self.number, self.layers, self.optimizer)
        tables = self.models.items()
        self.saved_files = {name: (table.saved(), table.user_clock) for name, table in tables}

    def load_files(self):
        """Go on with new layers that load the latest checkpoint, perhaps by way of other ranks."""
        if self.saved_files is None or self.prefetched is not None:
            return
        self.quiet()
        path, ranks = self.checkpoints.latest(), self.draw.choice([None, 1, 2, 3])
        if ranks is not None:
            resharded = self.folder / f"reshard-{self.number}"
            if self.rank == 0:
                checkpoint.reshard(path, resharded, ranks)
            if self.world_size > 1:
                torch.distributed.barrier()
            path = resharded
        self.take(self.new_layers(seed=0))
        checkpoint.load(self.layers, path, self.optimizer)
        for name, table in self.models.items():
            saved, table.user_clock = self.saved_files[name]
            table.load(saved)
            table.evicted = table.expired = table.were_admitted = table.refused = 0

    def take_over(self, first):
        """Go on with what `leave` has left before operation `first`, perhaps on other ranks."""
        self.number = first
        self.draw.seed(first)
        self.saved_files = torch.load(self.folder / "models", weights_only=False)
        self.load_files()
        self.check_keys()
        self.check_all()

    def leave(self):
        """Save the layers and the models, and end."""
        self.save_files()
        if self.rank == 0:
            torch.save(self.saved_files, self.folder / "models")
        self.checkpoints.close()

    def run(self, steps, check_every=25):
        """Run random operations; compare keys and scores after each, and all now and then.

        Returns:
            The number of rows that the model has dropped.
        """
        dropped, first = 0, self.number
        names, weights = zip(*OPERATIONS.items(), strict=True)
        self.log = []
        for number in range(first, first + steps):
            self.drift, self.number = number // 10, number
            (name,) = self.draw.choices(names, weights)
            if name == "forward" and len(self.pending) > 2:
                name = "backward"
            self.log.append(name)
            getattr(self, name)()
            self.check_keys()
            dropped += self.check_told()
            if number % check_every == check_every - 1:
                self.check_all()
        return dropped

    # Comparisons.

    def check_keys(self):
        for name, table in self.models.items():
            layer = self.layers[name]
            keys = layer.table.keys().tolist()
            expected = self.owned & table.rows.keys()
            assert set(keys) == expected, self.difference(name, keys, expected)
            assert len(keys) == len(expected)
            words = layer.scores[: len(keys)].tolist()
            assert words == [table.word(k) for k in keys], (name, self.log)
            assert int(layer.clock) == table.clock, (name, self.log)
            self.check_counts(name)
            if self.world_size == 1:
                life = layer.life
                counted = life.evicted, life.expired, life.admitted, life.refused
                of_model = table.evicted, table.expired, table.were_admitted, table.refused
                assert counted == of_model, (name, self.log)

    def difference(self, name, keys, expected):
        """Return what to look at first if the keys of a table are not those of the model."""
        table, scores = self.models[name], self.layers[name].scores.tolist()
        return {
            "only in the layer": [
                pair for pair in zip(keys, scores, strict=False) if pair[0] not in expected
            ],
            "only in the model": [(key, table.rows[key]) for key in expected - set(keys)],
            "held": table.held(),
            "last operations": self.log[-10:],
        }

    def check_counts(self, name):
        """Compare the counts of keys that have not been admitted."""
        counts = self.layers[name].life.counts
        if counts is None:
            return
        waiting = {k: of for k, of in self.models[name].waiting.items() if k in self.owned}
        if self.models[name].sketch:
            keys = torch.tensor(list(waiting), dtype=torch.int64)
            found = counts.add(keys, torch.zeros_like(keys), 0).tolist()
            assert found == [count for count, _ in waiting.values()], (name, self.log)
        else:
            found = {key: (count, then) for key, count, then in counts.state().tolist()}
            assert found == waiting, (name, self.log)

    def check_told(self):
        return sum(map(self._check_told, self.models))

    def _check_told(self, name):
        """Compare what was told of the dropped rows with what the model has dropped."""
        table, told = self.models[name], self.told[name]
        dropped = {key: row for key, row in table.dropped.items() if key in self.owned}
        assert told.keys() == dropped.keys()
        for key, (expired, score, vector, *states) in told.items():
            of_model, of_row = dropped[key]
            assert (expired, score) == of_model
            for one, other in zip((vector, *states), (of_row.vector, *of_row.states), strict=False):
                assert (one - other).abs().max().item() <= TOLERANCE[self.rule]
        told.clear()
        gone = len(table.dropped)
        table.dropped.clear()
        return gone

    def check_all(self):
        """Compare vectors and states, and check that nothing is left in free rows."""
        for name, table in self.models.items():
            layer = self.layers[name]
            layer.catch_up()
            keys = layer.table.keys().tolist()
            size = len(keys)
            states = self.optimizer.state.get(layer.weight, {})
            of_layer = {"vectors": layer.weight.detach()}
            of_layer |= {state: states[state] for state in table.rule.states if state in states}
            assert not layer.scores[size:].any()
            for what, tensor in of_layer.items():
                if keys:
                    rows = [table.rows[key] for key in keys]
                    at = None if what == "vectors" else table.rule.states.index(what)
                    each = [row.vector if at is None else row.states[at] for row in rows]
                    difference = (tensor[:size] - torch.stack(each)).abs().max().item()
                    assert difference <= TOLERANCE[self.rule], (name, what, difference, self.log)
                assert not tensor[size:].any(), (name, what, self.log)


def run(rank, seed, steps, folder, world_size=1, first=0):
    """Run a sequence on a rank; return the number of rows that its model has dropped.

    If `first` is not 0, the sequence goes on after as many operations of another one.
    """
    with patch.multiple(growth, _STEPWISE=4, _LEAST_BUCKETS=1, _ROWS_AHEAD=3):
        sequence = Sequence(seed, folder, rank, world_size)
        if first:
            sequence.take_over(first)
        dropped = sequence.run(steps)
        sequence.leave()
    return dropped
