"""After faults at random points of random steps, every rank ends in time and no table is damaged.

SPARSEKIT_FAULTS sets the number of faults, SPARSEKIT_FAULTS_SEED the seed of the first one.
"""

import os
import random
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from patience import patience

import sparsekit
from sparsekit.distributed import Exchange, world

from .pool import Died, Raised, Ranks

FAULTS = int(os.environ.get("SPARSEKIT_FAULTS", "8"))
FIRST = int(os.environ.get("SPARSEKIT_FAULTS_SEED", "0"))
# Seconds after which a collective times out, and within which a faulty run must end.
TIMEOUT, MOST = 6, 30
STEPS = 4
FOLDER = os.path.dirname(sparsekit.__file__)


class Fault(Exception):
    pass


def strike(kind):
    if kind == "raise":
        raise Fault("out of the blue")
    if kind == "delay":
        time.sleep(1)
    else:
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


class Lines:
    """Context that counts the executed lines of sparsekit and causes a fault at one line."""

    def __init__(self, kind=None, number=None):
        self.kind, self.number, self.count = kind, number, 0

    def __enter__(self):
        sys.settrace(self._of_call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _of_call(self, frame, event, argument):
        return self._of_line if frame.f_code.co_filename.startswith(FOLDER) else None

    def _of_line(self, frame, event, argument):
        if event == "line":
            self.count += 1
            if self.count == self.number:
                strike(self.kind)
        return self._of_line


def make(way):
    settings = {"max_keys_per_rank": 300} if way == "at_once" else {"strategy": way}
    layers = {
        "a": sparsekit.DistributedEmbedding("sum", 3000, 4, 2, 3, name="a", **settings),
        "b": sparsekit.DistributedEmbedding("mean", 3000, 8, 1, 3, name="b", **settings),
    }
    group = sparsekit.EmbeddingGroup(layers)
    return group, sparsekit.optim.LazyAdam(group.parameters(), lr=0.1)


def train(group, optimizer, generator):
    keys = {
        "a": torch.randint(0, 500, (20, 2, 3), generator=generator),
        "b": torch.randint(0, 500, (20, 1, 3), generator=generator),
    }
    optimizer.zero_grad()
    sum(out.sum() for out in group(keys).values()).backward()
    optimizer.step()


def check(group):
    """Check that each key of a table has its own row and that all trained values are finite."""
    for layer in group.layers.values():
        keys = layer.table.keys()
        assert len(set(keys.tolist())) == len(keys) == len(layer.table)
        assert layer.table.find(keys).tolist() == list(range(len(keys)))
        assert layer.weight.isfinite().all()


def renew_exchanges():
    """Replace broken exchanges with working ones; this is faster than starting processes."""
    exchanges = world._exchanges.get(dist.group.WORLD, {})
    for (device, backend, timeout, purpose), exchange in exchanges.items():
        exchange.close()
        group = dist.new_group(timeout=timeout)
        transport = world.make_transport(backend, group, device, timeout)
        exchanges[device, backend, timeout, purpose] = Exchange(group, device, transport)


def trial(rank, way, kind, victim, share):
    """Train with a fault; return the error raised and the seconds taken."""
    renew_exchanges()
    sparsekit.init(timeout=TIMEOUT)
    generator = torch.Generator().manual_seed(rank)
    group, optimizer = make(way)
    with Lines() as lines:
        train(group, optimizer, generator)
    number = 1 + int(share * (STEPS * lines.count - 1)) if rank == victim else None
    begin, raised = time.monotonic(), None
    try:
        with Lines(kind, number):
            for _ in range(STEPS):
                train(group, optimizer, generator)
        # If a rank dies after its last collective, the others notice in the next step.
        train(group, optimizer, generator)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    check(group)
    return raised, time.monotonic() - begin


def ready(rank):
    pass


def kill_later(process, seconds):
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    return timer


@pytest.fixture(scope="module")
def pools():
    made = {size: Ranks(size) for size in (2, 3)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + FAULTS))
def test_a_fault(pools, seed):
    generator = random.Random(seed)
    kind = ("raise", "kill", "raise", "delay", "raise", "stop", "raise", "kill")[seed % 8]
    way = generator.choice(["all_to_all", "at_once", "reduce_scatter"])
    pool = pools[generator.choice([2, 3])]
    victim, share = generator.randrange(pool.world_size), generator.random()
    timer = None
    if kind == "stop":
        pool(ready)
        timer = kill_later(pool.processes[victim], 2 * TIMEOUT)
    outcomes = pool.outcomes(trial, way, kind, victim, share)
    if timer is not None:
        timer.cancel()
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    for outcome in others:
        assert not isinstance(outcome, (Died, Raised)), outcome
        raised, seconds = outcome
        assert seconds < patience(MOST), raised
        if kind == "delay":
            assert raised is None
    if isinstance(outcomes[victim], Died):
        assert kind in ("kill", "stop")
        assert all(raised for raised, _ in others), others
    else:  # no fault happened if fewer lines ran than in the first step
        assert not isinstance(outcomes[victim], Raised), outcomes[victim]
        assert kind in ("raise", "delay") or outcomes[victim][0] is None
