"""Training interrupted at 500 random moments equals a twin that is never interrupted.

Table sizes and step counters show how far an interrupted step got. The twin performs the step
exactly up to that point, so keys, vectors and states must be equal bit for bit.
"""

import copy
import functools
import pickle
import random
import signal
import threading

import pytest
import torch
from conftest import same_bits
from interruptions import Interrupted, interrupt

import sparsekit
from sparsekit import optim

from .cases import make

CASES = [
    ("LazyAdam", False), ("LazyAdam", True), ("LazyAdam per row", False), ("Adam", False),
    ("Adam", True), ("Adam sweep", False), ("SGD catch_up", False),
    ("SGD nesterov catch_up", True), ("Adagrad", False), ("RowWiseAdagrad", True),
]  # fmt: skip
MOMENTS = 50  # interrupts per case
SIGNALS = 10  # additional interrupts from another thread, some of which come too late


class Side:
    """A layer that pools, a layer that does not, and their optimizer."""

    def __init__(self, name, fused):
        size = {"max_vocabulary_size_per_gpu": 1000, "dtype": torch.float64}
        self.pooled = sparsekit.DistributedEmbedding(
            "mean", embedding_vec_size=3, slot_num=1, max_nnz=2, name="pooled", **size
        )
        self.single = sparsekit.All2AllDenseEmbedding(
            embedding_vec_size=2, slot_num=1, nnz_per_slot=1, dynamic_input=True, name="single",
            **size,
        )  # fmt: skip
        self.model = torch.nn.ModuleList([self.pooled, self.single])
        self.optimizer = make(name, list(self.model.parameters()))
        if fused:
            optim.fuse_in_backward(self.optimizer, self.model)

    def step(self, keys, called=(True, True), updated=(True, True)):
        """Take a training step; the twin skips layers that an interrupted step did not reach."""
        self.optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        inputs = keys.view(-1, 1, 2), keys
        for layer, values, call, update in zip(self.model, inputs, called, updated, strict=True):
            if call or update:
                squares = ((layer(values) - 0.3) ** 2).sum()
                loss = loss + squares if update else loss
        if any(updated):
            loss.backward()
            self.optimizer.step()

    def sizes(self):
        return [len(layer.table) for layer in self.model]

    def steps(self):
        return [int(self.optimizer.state[p].get("step", 0)) for p in self.model.parameters()]

    def read(self, keys):
        self.model.eval()
        with torch.no_grad():
            found = self.pooled(keys.view(-1, 1, 2)), self.single(keys)
        self.model.train()
        return found

    def settle(self):
        """Prepare for the next batch, as a training loop would after an interrupt."""
        torch.set_grad_enabled(True)  # an interrupted torch.no_grad() can leave it off
        self.model.train()
        self.optimizer.zero_grad()
        self.optimizer.step()


def check(one, other):
    tables = [[layer.table.keys() for layer in side.model] for side in (one, other)]
    for keys, expected in zip(*tables, strict=True):
        assert keys.tolist() == expected.tolist()
    keys = torch.cat([keys[: len(keys) // 2 * 2] for keys in tables[0]])
    assert all(map(same_bits, one.read(keys), other.read(keys)))
    for side in (one, other):
        side.optimizer.state_dict()  # all late rows catch up
    for layer, twin in zip(one.model, other.model, strict=True):
        rows = len(layer.table)
        vectors, expected = layer.state_dict()["weight"], twin.state_dict()["weight"]
        assert same_bits(vectors[:rows], expected[:rows])
        state, expected = one.optimizer.state[layer.weight], other.optimizer.state[twin.weight]
        if state.get("step", 0) == 0 and not expected:
            continue  # the state has been created, but not used yet
        assert set(state) == set(expected)
        for name in set(state) - {"step"}:
            assert same_bits(state[name][:rows], expected[name][:rows]), name
        assert state["step"] == expected["step"]


def interrupt_by_signal(call, seconds):
    """Call a function; return whether a signal handler raised Interrupted before the call ended."""
    armed = False

    def handler(number, frame):
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    main = threading.get_ident()
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        try:
            timer.start()
            armed = True
            call()
        finally:
            armed = False
    except Interrupted:
        return True
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    return False


def batch_of(rng, known):
    """Return a batch of keys: some known, so that other rows are late, and sometimes new ones."""
    new = [rng.randrange(-(2**63), 2**63) for _ in range(rng.choice([0, 0, 1, 3]))]
    known += new
    return torch.tensor((new + rng.choices(known, k=6))[:6])


# pytest gives this warning if a signal arrives during a destructor.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("name", "fused"), CASES)
def test_interrupted_training_is_what_was_completed_of_it(name, fused):
    rng = random.Random(f"{name} {fused}")
    side, twin, known = Side(name, fused), Side(name, False), list(range(8))
    lengths, interruptions, signals = {}, 0, 0
    while interruptions < MOMENTS or signals < SIGNALS:
        keys = batch_of(rng, known)
        calls = {
            "step": lambda keys=keys: side.step(keys),
            "read": lambda keys=keys: side.read(keys),
            "save": side.model.state_dict,
            "save states": side.optimizer.state_dict,
            "copy": lambda: copy.deepcopy((side.model, side.optimizer)),
        }
        action = rng.choice(["step"] * 9 + list(calls))
        sizes, steps, ended = side.sizes(), side.steps(), True
        if action not in lengths or rng.random() < 0.3:
            lengths[action] = interrupt(calls[action], -1)
        elif interruptions < MOMENTS:
            ended = interrupt(calls[action], rng.randint(1, lengths[action] + 1))
            interruptions += not ended
        else:
            ended = not interrupt_by_signal(calls[action], rng.uniform(0, 0.003))
            signals += 1
        inserted = [now > before for now, before in zip(side.sizes(), sizes, strict=True)]
        updated = [now > before for now, before in zip(side.steps(), steps, strict=True)]
        assert action != "step" or not ended or all(updated)
        twin.step(keys, inserted, updated)
        if not ended:
            side.settle()
            if rng.random() < 0.2:
                check(side, twin)
    check(side, twin)


@pytest.mark.parametrize("name", ["Adam", "SGD catch_up"])
def test_interrupted_anywhere_while_all_rows_catch_up(name):
    rng, known = random.Random(name), list(range(8))
    side, twin = Side(name, False), Side(name, False)
    catch_up = functools.partial(side.optimizer.catch_up, side.single.weight)
    moment, ended = 0, None
    while ended is None:
        keys = batch_of(rng, known)
        side.step(keys)
        twin.step(keys)
        twin.optimizer.catch_up(twin.single.weight)
        if moment == 0:
            moment = interrupt(catch_up, -1) // 2
            continue  # rows are written in the second half of the call
        ended = interrupt(catch_up, moment := moment + 1)
    check(side, twin)


@pytest.mark.parametrize(
    ("name", "op"), [("LazyAdam", "group_embedding_bag_update_"), ("Adam", "update_rows_")]
)
def test_an_update_that_is_interrupted_as_it_returns_is_not_made_again(monkeypatch, name, op):
    side, keys = Side(name, True), torch.arange(6)
    side.step(keys)
    update = getattr(sparsekit.ops, op)

    def interrupted(*args, **options):
        update(*args, **options)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(sparsekit.ops, op, interrupted)
        with pytest.raises(Interrupted):
            side.single(keys).sum().backward()
    before, steps = side.single.weight.detach().clone(), side.steps()
    assert steps == [1, 2]
    with pytest.raises(RuntimeError, match=r"two updates of single without step\(\)"):
        side.single(keys).sum().backward()
    assert side.steps() == steps
    assert same_bits(side.single.weight, before)
    side.settle()
    side.step(keys)
    assert side.steps() == [2, 3]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_after_an_interrupted_sweep(monkeypatch, way):
    """A copy of the optimizer has late rows updated, since no layer would do it later."""
    weight = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = optim.Adam([weight], lr=0.1, mode="sweep")
    weight.grad = torch.ones(4, 2).to_sparse(1)
    optimizer.step()
    weight.grad = torch.ones(4, 2)[:1].to_sparse(1).sparse_resize_((4, 2), 1, 1)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optim.catch_up.ops, "catch_up_rows_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    before = weight.detach().clone()
    (copied,) = way(optimizer).param_groups[0]["params"]
    optimizer.catch_up(weight)
    assert not same_bits(weight, before)
    assert same_bits(copied, weight)


@pytest.mark.parametrize("name", ["LazyAdam per row", "Adam"])
def test_an_interrupted_load_leaves_the_old_state_or_the_new_one(name):
    side, other = Side(name, False), Side(name, False)
    for keys in torch.arange(24).view(4, 6).unbind():
        side.step(keys % 9)
        other.step(keys % 7)
    states = [copy.deepcopy(one.optimizer.state_dict()) for one in (side, other)]
    moment, found, ended = 0, [], None
    while ended is None:
        side.optimizer.load_state_dict(states[0])
        load = functools.partial(side.optimizer.load_state_dict, states[1])
        ended = interrupt(load, moment := moment + 7)
        now = side.optimizer.state_dict()["state"]
        names = [(i, k) for i in now for k in now[i] if k != "keys"]  # keys belong to the table
        same = [
            all(same_bits(now[i][k], saved["state"][i][k]) for i, k in names) for saved in states
        ]
        assert sum(same) == 1
        found.append(same[1])
    assert found == sorted(found)
    assert not found[0]
    assert found[-1]


def test_a_state_of_another_capacity_is_refused_by_parameter():
    small = sparsekit.All2AllDenseEmbedding(9, 2, 1, 1, dynamic_input=True)
    side, optimizer = Side("LazyAdam", False), make("LazyAdam", list(small.parameters()))
    side.step(torch.arange(12))
    small(torch.arange(6)).sum().backward()
    optimizer.step()
    state = side.optimizer.state_dict()
    state["state"], state["param_groups"][0]["params"] = {0: state["state"][1]}, [0]
    with pytest.raises(ValueError, match=r"got \(1000, 2\).*, for parameter 0 of shape \(9, 2\)"):
        optimizer.load_state_dict(state)
    assert optimizer.state[small.weight]["step"] == 1
