"""After an interrupt on one rank, no rank mixes data of two steps, and no rank hangs."""

import itertools
import os
import pkgutil
import random
import sys

import pytest
import torch
import torch.distributed as dist

import sparsekit
from sparsekit.distributed import Exchange, exchange_of, world

FOLDER = os.path.dirname(sparsekit.__file__)
BROKEN = ("the exchange broke down before", "no answer from all other ranks")
TOLD = ("A step was interrupted on one of them", *BROKEN)


class Run:
    """Training of one layer on this rank, step by step."""

    def __init__(self, way):
        self.layer = sparsekit.DistributedEmbedding(
            "sum", 5000, 2, 1, 2, name=way, strategy=way, gradient_reduction="sum",
            placement="modulo",
        )  # fmt: skip
        self.batch = 0

    def train(self):
        """Train on keys 2n and 2n + 1 in batch n on every rank; each rank owns one of the keys."""
        number, self.batch = self.batch, self.batch + 1
        self.layer.weight.grad = None
        self.layer(torch.tensor([[[2 * number, 2 * number + 1]]])).sum().backward()

    def step(self):
        self.train()
        grad = self.layer.weight.grad
        keys = self.layer.table.keys()[grad._indices()[0]]
        assert keys.tolist() == [2 * (self.batch - 1) + dist.get_rank()]
        assert (grad._values() == dist.get_world_size()).all()

    def skip(self):
        """Continue at a batch number that all ranks share, as after loading a checkpoint."""
        self.batch = (self.batch // 10 + 1) * 10


def of_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def replace_exchange(layer):
    """Replace a broken exchange with a working one; this is faster than starting processes."""
    exchanges = world._exchanges[dist.group.WORLD]
    ((key, _),) = [item for item in exchanges.items() if item[1] is layer.exchange]
    device, backend, timeout, _ = key
    # The other rank closes its exchange, too, so that both ranks give the next group the same name.
    layer.exchange.close()
    group = dist.new_group(timeout=timeout)
    transport = world.make_transport(backend, group, device, timeout)
    exchanges[key] = Exchange(group, device, transport)


def trial(rank, way, interruption):
    """Interrupt a step on rank 1; return whether this rank was interrupted, and its error."""
    run = Run(way)
    run.step()
    told, interrupted = "", False
    for attempt in range(3):
        try:
            if rank == 1 and attempt == 0:
                with interruption:
                    run.train()
            else:
                run.step()
        except KeyboardInterrupt:
            interrupted = True
        except RuntimeError as error:
            told = str(error)
            break
    everyone = of_all_ranks(told)
    assert all(everyone) or not any(everyone), everyone
    if told:
        assert any(text in told for text in TOLD), told
    if any(text in other for other in everyone for text in BROKEN):
        replace_exchange(run.layer)
    run.skip()
    for _ in range(2):
        run.step()
    return interrupted, told


class InCall:
    """Context that interrupts the `number`-th call of a function of sparsekit."""

    def __init__(self, name, number):
        self.name, self.number = f"sparsekit.{name}", number

    def __enter__(self):
        function, calls = pkgutil.resolve_name(self.name), itertools.count(1)
        self.patch = pytest.MonkeyPatch()

        def call(*arguments, **keywords):
            if next(calls) == self.number:
                raise KeyboardInterrupt
            return function(*arguments, **keywords)

        self.patch.setattr(self.name, call)

    def __exit__(self, *_):
        self.patch.undo()


class AtLine:
    """Context that interrupts the `number`-th line of sparsekit after a lookup is counted.

    An earlier interrupt is like one in the model's own code: the other ranks cannot notice it. They
    need not notice an interrupt after the last line of `Exchange.alone`: by then everything is
    computed, and autograd has the gradient.
    """

    ALONE = Exchange.alone.__wrapped__.__code__

    def __init__(self, number):
        self.number = number

    def __enter__(self):
        self.exchange = exchange_of(None, torch.device("cpu"))
        self.begin = self.exchange.lookups
        self.lines = self.last_alone = 0
        sys.settrace(self._of_call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _of_call(self, frame, event, argument):
        return self._of_line if frame.f_code.co_filename.startswith(FOLDER) else None

    def _of_line(self, frame, event, argument):
        if event == "line" and self.exchange.lookups > self.begin:
            self.lines += 1
            if self.lines == self.number:
                raise KeyboardInterrupt
        if frame.f_code is self.ALONE:
            self.last_alone, self.collectives = self.lines, self.exchange.collectives
        return self._of_line


def in_call(rank, way, *arguments):
    return trial(rank, way, InCall(*arguments))


# Calls around each collective of a step; other ranks already wait in the collective or soon will.
BETWEEN = [
    *(("all_to_all", "distributed.Exchange.send", number) for number in (1, 2, 3)),
    *(
        ("all_to_all", f"lookup.{name}", 1)
        for name in (
            "key_client.KeyClient.write_keys",
            "key_server.KeyServer.answer",
            "key_client.KeyClient.pool",
            "key_client.KeyClient.write_gradients",
            "key_server.KeyServer.features_at",
        )
    ),
    *(
        ("reduce_scatter", f"lookup.by_bag.{name}", 1)
        for name in ("write_bags", "_bags_of_ranks", "_Owned.sums", "_Owned.gradient")
    ),
]
# The function that begins a collective, for each backend.
COLLECTIVES = {
    "torch": "distributed.transport.dist.all_to_all_single",
    "shared_memory": "distributed.shared_memory._pybind.SharedMemoryCommunicator.begin",
}


@pytest.mark.parametrize(("way", "name", "number"), BETWEEN)
def test_a_step_is_interrupted_on_one_rank(two_ranks_over, way, name, number):
    for rank, (interrupted, told) in enumerate(two_ranks_over(in_call, way, name, number)):
        assert interrupted == (rank == 1)
        assert TOLD[0] in told


# The interrupt arrives before or after the collective begins.
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_collective_is_interrupted_on_one_rank(two_ranks_over, number):
    name = COLLECTIVES[two_ranks_over.backend]
    outcomes = two_ranks_over(in_call, "all_to_all", name, number)
    for rank, (interrupted, told) in enumerate(outcomes):
        assert interrupted == (rank == 1)
        assert any(text in told for text in BROKEN)
        # The other rank learns of the interrupt before the timeout.
        assert "timed out" not in told.lower()


def at_lines(rank, way, seed, trials):
    run = Run(way)
    run.step()
    with AtLine(0) as line:
        run.train()
    assert line.collectives == line.exchange.collectives  # no collective begins after that line
    generator = random.Random(seed)
    numbers = generator.sample(range(1, line.lines + 1), trials)
    outcomes = []
    for number in of_all_ranks(numbers)[1]:  # the line counts of ranks differ
        outcomes.append((number, line.last_alone, *trial(rank, way, AtLine(number))))
    return outcomes


@pytest.mark.parametrize("way", ["all_to_all", "reduce_scatter"])
def test_a_step_is_interrupted_at_random_lines(two_ranks_over, way):
    outcomes = two_ranks_over(at_lines, way, 1, 25)[1]
    for number, last_alone, interrupted, told in outcomes:
        assert interrupted
        assert told or number > last_alone
