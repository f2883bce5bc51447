"""Applies random sequences of training and restoring to a table and to a reference model.

The model is a dict of keys to vectors and states, updated by the same optimizer on plain
parameters. Other tests compare that optimizer with torch and NumPy; these tests find rows that
belong to the wrong key.
"""

import copy
import functools
import random
import tempfile
from pathlib import Path

import torch

import sparsekit
from sparsekit import checkpoint, optim

from .cases import ALL_ROWS, OPTIMIZERS, make

DIM, CAPACITY = 3, 40
OF_TORCH = {
    "torch SparseAdam": (torch.optim.SparseAdam, {"lr": 0.1}),
    "torch Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.2}),
    "torch SGD": (torch.optim.SGD, {"lr": 0.1}),
}
NAMES = [*OPTIMIZERS, *OF_TORCH]


def make_any(name, parameters):
    if name in OF_TORCH:
        kind, settings = OF_TORCH[name]
        return kind(parameters, **settings)
    return make(name, parameters)


class Model:
    """Expected vectors and states by key, and the number of steps."""

    def __init__(self, name):
        self.name, self.vectors, self.states, self.step = name, {}, {}, None
        initial = sparsekit.Embedding(1, DIM, name="table", dtype=torch.float64)
        self.initial = lambda key: initial.vectors(torch.tensor([key]))[0]

    def train(self, gradients):
        """Take a step with a dict of key to gradient; some keys may be new."""
        for key in gradients:
            self.vectors.setdefault(key, self.initial(key))
        self.keep_states()
        moving = list(self.vectors if self.name in ALL_ROWS else gradients)
        weight = torch.nn.Parameter(torch.stack([self.vectors[key] for key in moving]))
        grad = torch.stack([gradients.get(key, torch.zeros(DIM).double()) for key in moving])
        weight.grad = grad.to_sparse(1) if "Sparse" in self.name else grad
        optimizer = make_any(self.name, [weight])
        fresh = self._fresh(weight)
        if self.step is not None:
            names = fresh.keys()
            rows = [self.states.get(key, {}) for key in moving]
            state = {n: torch.stack([r.get(n, fresh[n][0]) for r in rows]) for n in names}
            optimizer.state[weight] = {"step": copy.deepcopy(self.step), **state}
        optimizer.step()
        state = optimizer.state[weight]
        self.step = copy.deepcopy(state.get("step", 0))
        for i, key in enumerate(moving):
            self.vectors[key] = weight.detach()[i].clone()
            self.states[key] = {n: state[n][i].clone() for n in fresh}

    def _fresh(self, like):
        """Return the states of a row before its first step."""
        weight = torch.nn.Parameter(like.detach().clone())
        optimizer = make_any(self.name, [weight])
        if self.name in OF_TORCH:
            weight.grad = torch.zeros_like(weight)
            if "Sparse" in self.name:
                weight.grad = weight.grad.to_sparse(1)
            optimizer.step()
        else:
            optimizer._add_states(weight, optimizer.param_groups[0], optimizer.state[weight])
        state = optimizer.state[weight]
        rows = {n: v for n, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
        return {n: v for n, v in rows.items() if n != "row_step" or self.name not in ALL_ROWS}

    def load(self, other, vectors, states):
        """Load the vectors of a saved model, its states, or both."""
        other = copy.deepcopy((other.vectors, other.states, other.step))
        if vectors:
            self.vectors = other[0]
        if states:
            self.states, self.step = other[1:]
        if vectors:
            self.keep_states()

    def reset(self):
        self.vectors, self.states = {}, {}

    def keep_states(self):
        """Drop the states of keys that no longer exist."""
        self.states = {key: state for key, state in self.states.items() if key in self.vectors}


class Side:
    """Table with its optimizer, and the model of their expected contents."""

    def __init__(self, name, capacity=CAPACITY, fused=False):
        self.name, self.fused = name, fused
        self.layer = sparsekit.Embedding(capacity, DIM, name="table", dtype=torch.float64)
        self.optimizer = make_any(name, self.layer.parameters())
        self.model = Model(name)
        self.attach()

    def attach(self):
        if self.fused:
            optim.fuse_in_backward(self.optimizer, self.layer)

    def copy(self):
        copied = copy.copy(self)
        copied.layer, copied.optimizer = copy.deepcopy((self.layer, self.optimizer))
        copied.model = copy.deepcopy(self.model)
        copied.attach()
        return copied

    def train(self, rng, universe):
        keys = rng.sample(universe, rng.randint(1, min(4, len(universe))))
        factors = torch.tensor([[rng.uniform(-9, 9) for _ in range(DIM)] for _ in keys]).double()
        self.layer.train()
        self.optimizer.zero_grad()
        (self.layer(torch.tensor(keys)) * factors).sum().backward()
        self.optimizer.step()
        self.model.train(dict(zip(keys, factors, strict=True)))

    def check(self):
        keys = self.layer.table.keys()
        assert set(keys.tolist()) == set(self.model.vectors)
        for key, vector in zip(keys.tolist(), self.layer.vectors(keys), strict=True):
            assert torch.allclose(vector, self.model.vectors[key], rtol=1e-11, atol=1e-13), key
        unseen = torch.tensor([-1])
        assert torch.equal(self.layer.vectors(unseen)[0], self.model.initial(-1))

    def check_states(self):
        state = self.optimizer.state_dict()["state"].get(0, {})
        keys = state.get("keys", self.layer.table.keys())
        for row, key in enumerate(keys.tolist() if self.model.states else []):
            for name, expected in self.model.states.get(key, {}).items():
                assert torch.allclose(state[name][row], expected, rtol=1e-11, atol=1e-13), name


class Saved:
    """A saved point of training: states in memory, and a checkpoint."""

    def __init__(self, side, save):
        layer, optimizer = side.layer, side.optimizer
        self.layer = copy.deepcopy(layer.state_dict())
        self.optimizer = copy.deepcopy(optimizer.state_dict())
        self.model = copy.deepcopy(side.model)
        self.path = save(layer, optimizer)
        side.model.keep_states()  # a checkpoint drops loaded states of keys that the table lacks


def saver(rng, folder, checkpoints, number):
    """Return a randomly chosen function that saves a layer and optimizer and returns the folder."""

    def in_background(layer, optimizer):
        return checkpoints.async_save(number, layer, optimizer).wait()

    complete = folder / str(number)
    return rng.choice(
        [
            lambda layer, optimizer: checkpoint.save(layer, complete, optimizer) and complete,
            *[functools.partial(checkpoints.save, number)] * 2,
            in_background,
        ]
    )


def restore(rng, side, saved, way):
    """Restore a saved point of training by the method `way`."""
    of_torch = side.name in OF_TORCH
    both = way.endswith("both")
    if way.startswith("checkpoint"):
        checkpoint.load(side.layer, saved.path, side.optimizer if both else None)
    elif way == "states alone":
        side.optimizer.load_state_dict(copy.deepcopy(saved.optimizer))
        side.model.load(saved.model, vectors=False, states=True)
        return
    else:
        loads = [lambda: side.layer.load_state_dict(copy.deepcopy(saved.layer))]
        if both:
            loads.append(lambda: side.optimizer.load_state_dict(copy.deepcopy(saved.optimizer)))
            # The states of torch's optimizers contain no keys.
            loads = loads[::-1] if of_torch or rng.random() < 0.5 else loads
        for load in loads:
            load()
    side.model.load(saved.model, vectors=True, states=both)
    if of_torch and both:
        # torch's states contain no keys. At the first step after a load, the loaded states are
        # assigned to the table's current keys.
        side.train(rng, list(saved.model.vectors))


def run(name, seed, operations=14):
    """Run one random sequence; raise an error if table and model differ."""
    rng = random.Random(f"{name} {seed}")
    ours = name in OPTIMIZERS
    universe = [rng.randrange(-(2**63), 2**63) for _ in range(12)]
    sides = [Side(name, fused=ours and rng.random() < 0.3) for _ in range(2)]
    saved = []
    ways = ["module", "both", "checkpoint", "checkpoint both", *(["states alone"] if ours else [])]
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        # Both sides, their copies and recreated sides save through the same Checkpoints.
        checkpoints = checkpoint.Checkpoints(folder / "all", keep=99, complete_every=3)
        for number in range(operations):
            place = rng.randrange(2)
            side = sides[place]
            action = rng.choice(
                ["train"] * 3 + ["save"] * 2 + ["restore", "restore", "reset", "copy"]
            )
            if action == "train" or not side.model.vectors:
                for _ in range(rng.randint(1, 3)):
                    side.train(rng, rng.sample(universe, 6))
                    side.check()
                side.check_states()
            elif action == "save":
                saved.append(Saved(side, saver(rng, folder, checkpoints, number)))
            elif action == "restore" and saved:
                if rng.random() < 0.3:
                    capacity = rng.choice([CAPACITY, 30, 99]) if ours else CAPACITY
                    side = sides[place] = Side(name, capacity, side.fused)
                restore(rng, side, rng.choice(saved), rng.choice(ways))
            elif action == "reset":
                rng.choice([side.layer.reset_parameters, side.layer.table.clear_])()
                side.model.reset()
            elif action == "copy":
                side = sides[rng.randrange(2)] = side.copy()
                if not ours:
                    side.train(rng, universe)  # as after a restore of layer and optimizer
            side.check()
        checkpoints.close()
