"""A rating model that learns in one process while another process recommends from its delta log."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
import torch

from ...datasets import Ratings
from ...optim import LazyAdam, split_embedding_variable_from_others
from ...serving import Snapshot
from ...serving.delta_log import DeltaLog
from .model import RatingModel

DIM, HISTORY = 32, 32
BATCH, EPOCHS = 1024, 3
LR = 0.02
# Each new rating counts this many times in a step, so that a few steps suffice.
WEIGHT_OF_NEW = 16
_TABLES = {name: f"embeddings.layers.{name}" for name in ("user", "item", "rated")}


def train(
    folder: str, columns: Sequence[np.ndarray], every_seconds: float, calls: Connection
) -> None:
    """Train until the other process closes the connection; run this in a separate process.

    Args:
        folder: folder of the delta log.
        columns: users, items, ratings and timestamps to train on.
        every_seconds: time from one delta to the next.
        calls: connection to the other process. After some epochs, "ready" is sent through it. Each
            time new ratings then arrive, as arrays ``[n]`` of users, items and ratings, the reply
            is the number of steps so far.
    """
    # Ctrl-C reaches both processes; let the other one close the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    data = Ratings(*map(torch.from_numpy, columns))
    model = RatingModel(data, dim=DIM, history_size=HISTORY)
    # Without a dense part, rows alone determine which films suit a user.
    model.project.requires_grad_(False)
    sparse, dense = split_embedding_variable_from_others(model)
    optimizers = [LazyAdam(sparse, lr=LR), torch.optim.Adam(dense, lr=1e-3)]
    generator = torch.Generator("cpu").manual_seed(0)
    new = [torch.empty(0, dtype=each.dtype) for each in (data.users, data.items, data.ratings)]

    def step(batch: torch.Tensor) -> None:
        old = data.users[batch], data.items[batch], data.ratings[batch]
        columns = [torch.cat(pair) for pair in zip(old, new, strict=True)]
        squares, penalties = model.losses(*columns)
        (squares.mean() + penalties.mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(EPOCHS):
        for batch in torch.randperm(len(data), generator=generator).split(BATCH):
            step(batch)
    log = DeltaLog(folder, model, every_seconds=every_seconds)
    calls.send("ready")
    steps = 0
    try:
        while True:
            if calls.poll():
                new = [torch.from_numpy(each).repeat(WEIGHT_OF_NEW) for each in calls.recv()]
                calls.send(steps)
            step(torch.randint(len(data), (BATCH,), generator=generator))
            steps += 1
            log.step(steps)
    except (EOFError, ConnectionError):
        log.close()


@dataclass
class Server:
    """Recommends films from a delta log, and measures how fresh the served tables are.

    Attributes:
        snapshot: the tables.
        freshness: for each refresh that found new versions, the seconds since the previously served
            version was written, which limits the age of the changes that became visible.
    """

    snapshot: Snapshot
    freshness: list[float] = field(default_factory=list)

    def refresh(self) -> int:
        """Load any new versions, and return the newest one's training step."""
        before = self.snapshot.written_at
        if self.snapshot.refresh().deltas:
            self.freshness.append((time.time_ns() - before) / 1e9)
        return self.snapshot.step

    def recommend(self, user: int, history: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return all films, the best for a user first, and their scores.

        Args:
            user: id of the user.
            history: ids of the films that the user has rated in training, int64 ``[n]``, oldest
                rating first.
        """
        with self.snapshot.pin() as pinned:
            own = pinned.lookup(_TABLES["user"], np.array([user]))[0]
            bag = history[None, -HISTORY:]
            rated = pinned.lookup(_TABLES["rated"], bag, combiner="sqrtn")[0]
            # A film's row consists of its bias and its vector.
            query = np.concatenate([[np.float32(1)], own[1:] + rated])
            k = self.snapshot.tables[_TABLES["item"]].rows
            return pinned.top_k(_TABLES["item"], query, k)

    def alike(self, film: int) -> np.ndarray:
        """Return all films, sorted by the dot product with one film's vector, largest first."""
        name = _TABLES["item"]
        with self.snapshot.pin() as pinned:
            query = pinned.lookup(name, np.array([film]))[0]
            query[0] = 0  # omit biases, or good films would seem similar to all others
            return pinned.top_k(name, query, self.snapshot.tables[name].rows)[0]


class Training:
    """The process that trains; use it in a ``with`` statement, whose end stops the process."""

    def __init__(self, folder: str, data: Ratings, every_seconds: float) -> None:
        # In a forked process, torch's threads would be in an unknown state.
        context = multiprocessing.get_context("spawn")
        self._calls, theirs = context.Pipe()
        # Pass arrays, because tensors would be shared through files that both processes must open.
        columns = [each.numpy() for each in (data.users, data.items, data.ratings, data.timestamps)]
        self._process = context.Process(
            target=train, args=(folder, columns, every_seconds, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def process_id(self) -> int:
        """Return the process ID."""
        return self._process.pid or 0

    def wait(self) -> None:
        """Wait until the log is open.

        Raises:
            RuntimeError: the process has ended.
        """
        self._answer()

    def rate(self, user: int, films: np.ndarray, stars: float) -> int:
        """Send new ratings to the training process; return the last step taken without them."""
        users = np.full(len(films), user)
        self._calls.send((users, films, np.full(len(films), stars, np.float32)))
        return int(self._answer())

    def alive_while(self, act: Callable[[], Any], done: Callable[[], bool]) -> None:
        """Call a function every 10 ms until a condition holds.

        Raises:
            RuntimeError: the process has ended.
        """
        while not done():
            act()
            if not self._process.is_alive():
                self._ended()
            time.sleep(0.01)

    def _ended(self) -> NoReturn:
        self._process.join()
        raise RuntimeError(f"the training process has ended with code {self._process.exitcode}")

    def _answer(self) -> Any:
        try:
            return self._calls.recv()
        except (EOFError, ConnectionError):
            self._ended()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        self._calls.close()
        self._process.join(10)
        self._process.kill()
