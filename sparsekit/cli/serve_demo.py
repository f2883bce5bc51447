"""``sparsekit serve demo``: recommends films from a model that keeps learning."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .._arguments import Parser
from ..datasets import DatasetUnavailableError, Ratings, movielens_100k, movielens_100k_titles
from ..recipes.ratings.served import Server, Training
from ..serving import Snapshot
from . import training
from .common import UsageError, number, set_threads

# How many films are shown, and how many the user rates.
SHOWN, RATED = 5, 5
STARS = 5.0
# Number of training steps until new ratings have an effect.
STEPS = 100


def add(parts: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit serve demo`` to the parser."""
    demo = parts.add_parser(
        "demo",
        help="recommend films from a model that goes on learning in another process",
        description="Train a rating model on MovieLens-100K, or on a file of ratings, in one "
        "process, and recommend films from its delta log in another one. A user rates films like "
        "one that is not among the best, and gets other recommendations. Print how old changes "
        "are when lookups first see them.",
    )
    demo.set_defaults(run=_demo)
    demo.add_argument("--data", metavar="FILE", help="ratings, as for `sparsekit train ratings`")
    demo.add_argument("--user", type=int, help="user who rates films; else one with few ratings")
    demo.add_argument(
        "--seconds", type=number(float, 0.1, 86400), default=10, help="time to measure freshness"
    )
    demo.add_argument(
        "--every", type=number(float, 0.001, 60), default=0.1,
        help="seconds from one delta to the next",
    )  # fmt: skip


def _demo(args: argparse.Namespace) -> int:
    set_threads(None)
    with training.reading("--data", args.data):
        data = movielens_100k(args.data)
    titles: dict[int, str] = {}
    if args.data is None:
        with contextlib.suppress(DatasetUnavailableError):
            titles = movielens_100k_titles()
    user, rated = _user(data, args.user)
    films, counts = data.items.unique(return_counts=True)
    popular = set(films[counts >= counts.float().quantile(0.75)].tolist())
    with (
        tempfile.TemporaryDirectory(prefix="sparsekit-") as parent,
        Training(folder := str(Path(parent) / "log"), data, args.every) as trainer,
    ):
        print(
            f"{args.data or 'MovieLens-100K'}: {len(data):,} ratings. Process "
            f"{trainer.process_id} trains, and writes a delta every {args.every:g} s",
            flush=True,
        )
        trainer.wait()
        with Snapshot(folder) as snapshot:
            _serve(Server(snapshot), trainer, user, rated, popular, titles, args.seconds)
    return 0


def _serve(
    server: Server,
    trainer: Training,
    user: int,
    rated: np.ndarray,
    popular: set[int],
    titles: dict[int, str],
    seconds: float,
) -> None:
    end = time.monotonic() + seconds
    trainer.alive_while(server.refresh, lambda: server.snapshot.step >= STEPS)
    before, scores = _without(rated, *server.recommend(user, rated))
    print(f"\nUser {user} has rated {len(rated)} films. The best of the others:")
    _show(titles, before[:SHOWN], [f"{score:.3f}" for score in scores[:SHOWN]])
    unrated = [film for film in before.tolist() if film in popular] or before.tolist()
    liked = unrated[len(unrated) // 10]
    new = np.array([film for film in server.alike(liked).tolist() if film in unrated][:RATED])
    start, step = time.monotonic(), trainer.rate(user, new, STARS)
    print(f"\nUser {user} rates {len(new)} films with {STARS:g} stars:")
    _show(titles, new, [_place(before, film) for film in new])
    trainer.alive_while(server.refresh, lambda: server.snapshot.step >= step + STEPS)
    films, scores = _without(np.concatenate([rated, new]), *server.recommend(user, rated))
    print(
        f"\n{time.monotonic() - start:.1f} s and {STEPS} steps later, the best of the others are:"
    )
    _show(
        titles,
        films[:SHOWN],
        [f"{score:.3f}, {_place(before, film)}" for film, score in zip(films, scores, strict=True)],
    )
    trainer.alive_while(server.refresh, lambda: time.monotonic() >= end)
    fresh = np.quantile(server.freshness, [0.5, 0.99])
    print(
        f"\n{len(server.freshness)} versions in {seconds:g} s, each served when its oldest change "
        f"was at most this old: p50 {fresh[0]:.3f} s, p99 {fresh[1]:.3f} s"
    )


def _user(data: Ratings, wanted: int | None) -> tuple[int, np.ndarray]:
    """Return a user and the films that this user has rated, the latest last."""
    order, users, counts, _ = data.by_user()
    if wanted is None:
        wanted = int(users[counts.argsort(stable=True)[len(counts) // 10]])
    elif wanted not in users:
        raise UsageError(f"--user {wanted}: has rated nothing")
    rated = data.items[order][data.users[order] == wanted]
    if len(rated.unique()) == len(data.items.unique()):
        raise UsageError(f"--user {wanted}: has rated everything")
    return wanted, rated.numpy()


def _without(
    rated: np.ndarray, films: np.ndarray, scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    kept = ~np.isin(films, rated)
    return films[kept], scores[kept]


def _place(before: np.ndarray, film: int) -> str:
    place = np.flatnonzero(before == film)
    return f"was number {place[0] + 1}" if len(place) else "was rated"


def _show(titles: dict[int, str], films: np.ndarray, notes: Sequence[str]) -> None:
    for film, note in zip(films.tolist(), notes, strict=False):
        print(f"  {film:>6}  {titles.get(film, '')}".rstrip() + f"  ({note})")
