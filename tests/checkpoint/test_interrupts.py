"""If a save, load or reshard is interrupted anywhere, each reported checkpoint is correct.

SPARSEKIT_INTERRUPTS=1000 tries that many moments.
"""

import contextlib
import os
import random
import signal
import threading
import time

import pytest
import torch
from interruptions import Interrupted, interrupt

import sparsekit
from sparsekit import checkpoint
from sparsekit.checkpoint import Checkpoints
from sparsekit.checkpoint.folder import retain, steps_in

MOMENTS = int(os.environ.get("SPARSEKIT_INTERRUPTS", "120"))
KEYS = 24


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ids = sparsekit.Embedding(64, 2, name="ids")
        self.out = torch.nn.Linear(1, 1)
        self.optimizer = sparsekit.optim.Adagrad([self.ids.weight], lr=0.1)

    def train_some(self, chance):
        keys = torch.tensor(chance.sample(range(KEYS), 4))
        self.ids(keys).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.out.bias.data.fill_(chance.random())

    def contents(self):
        found = {"bias": self.out.bias.item()}
        state = self.optimizer.state.get(self.ids.weight, {})
        for row, key in enumerate(self.ids.table.keys().tolist()):
            vector = self.ids.weight[row].tolist()
            found[key] = vector, state["sum"][row].tolist() if "sum" in state else None
        return found


class Attacked:
    """A run that is interrupted while it saves to a folder, and the folder's expected contents."""

    def __init__(self, folder, seed):
        self.chance = random.Random(seed)
        self.folder, self.out = folder / "run", folder / "out"
        self.model, self.loaded = Model(), Model()
        self.model.train_some(self.chance)
        self.earlier = self.model.state_dict(), self.model.optimizer.state_dict()
        self.keep = Checkpoints(self.folder, keep=2, complete_every=3)
        self.attempts = {}  # contents saved, by step
        self.announced = -1
        self.lengths = {}  # number of bytecodes, by call
        self.seconds = {}  # seconds, by call
        self.by_signal = self.by_bytecode = 0  # numbers of interrupts

    def change(self):
        if self.chance.random() < 0.15:
            self.model.load_state_dict(self.earlier[0])
            self.model.optimizer.load_state_dict(self.earlier[1])
        for _ in range(self.chance.randrange(3)):
            self.model.train_some(self.chance)
        if self.chance.random() < 0.2:
            state = self.model.state_dict(), self.model.optimizer.state_dict()
            self.earlier = {n: t.clone() for n, t in state[0].items()}, state[1]
        step = max(self.attempts, default=-1) + 1
        self.attempts[step] = self.model.contents()
        return step

    def save(self):
        step = self.change()

        def call():
            self.keep.save(step, self.model, self.model.optimizer)
            self.announced = step

        return call

    def save_in_background(self):
        step = self.change()

        def call():
            self.keep.async_save(step, self.model, self.model.optimizer)
            self.keep.wait()
            self.announced = step

        return call

    def load(self):
        return lambda: self.keep.load(self.loaded, self.loaded.optimizer)

    def retain(self):
        written = list(steps_in(self.folder).values())[-1:]
        return lambda: [retain(self.folder, 1, path) for path in written]

    def reshard(self, world_size=3):
        def call():
            if self.announced >= 0:
                checkpoint.reshard(self.folder, self.out, world_size)

        return call

    def compact(self):
        return self.reshard(world_size=1)

    def interrupted(self, call, kind):
        """Interrupt a call at a random bytecode, or by a signal."""
        if self.chance.random() < 0.5:
            length = self.lengths.get(kind, 3000)
            whole = interrupt(call, self.chance.randrange(1, length))
            self.lengths[kind] = whole or length
            self.by_bytecode += whole is None
            return
        begin = time.monotonic()
        try:
            longest = self.seconds.get(kind, 0.01)
            signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(1e-5, longest))
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.seconds[kind] = time.monotonic() - begin
        except Interrupted:
            torch.set_grad_enabled(True)
            self.by_signal += 1

    def check(self):
        self.keep.wait()
        found = self.keep.load(self.loaded, self.loaded.optimizer)
        assert (found.step if found else -1) >= self.announced
        if found:
            assert self.loaded.contents() == self.attempts[found.step]
        if self.out.exists():
            self.loaded = Model()
            checkpoint.load(self.loaded, self.out, self.loaded.optimizer)
            assert self.loaded.contents() == self.attempts[found.step]
            self.out.rename(self.folder.parent / f"done-{time.monotonic_ns()}")


def stop(*_):
    raise Interrupted


def descriptors():
    """Return a dict of the process's open file descriptors and their paths."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own file is closed by now
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found


# If an interrupt arrives while a file is opened, the garbage collector closes it and warns.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_at_any_moment(tmp_path):
    before = signal.signal(signal.SIGALRM, stop)
    try:
        run = Attacked(tmp_path, seed=7)
        kinds = [run.save, run.save, run.save_in_background, run.save_in_background,
                 run.load, run.retain, run.reshard, run.compact]  # fmt: skip
        run.save()()
        opened = descriptors()
        for _ in range(MOMENTS):
            kind = run.chance.choice(kinds)
            run.interrupted(kind(), kind.__name__)
            run.check()
            assert descriptors() == opened, kind.__name__
        run.save()()
        run.check()
    finally:
        signal.signal(signal.SIGALRM, before)
    # Both kinds of interrupts have hit enough calls.
    assert min(run.by_signal, run.by_bytecode) > MOMENTS / 8
    left = [path.name for path in run.folder.iterdir() if path.name[0] == "."]
    assert left == [".lock"]
    deadline = time.monotonic() + 60
    while threads := [t for t in threading.enumerate() if "sparsekit" in t.name and t.is_alive()]:
        assert time.monotonic() < deadline, threads
        time.sleep(0.01)
    run.keep.close()
    assert not [path for path in descriptors().values() if str(tmp_path) in path]
