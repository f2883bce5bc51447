"""``sparsekit recommend``: writes the items that a trained model scores highest for each user."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from pathlib import Path

from ..._arguments import Parser
from ...cli.common import (
    UsageError,
    check_folder,
    check_other_file,
    number,
    set_threads,
    why,
    writing,
)
from ...datasets import DatasetUnavailableError, movielens_100k_titles
from ...serving import Snapshot, SnapshotError
from .model import Autoencoder
from .recommendations import Recommendations, Recommender, load_recommender, recommend
from .served import recommend_from

# Value of ``source`` in models that were trained on MovieLens-100K.
MOVIELENS = "MovieLens-100K"


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit recommend`` to the parser."""
    parser = commands.add_parser(
        "recommend",
        help="write the best items of each user to a file",
        description="Write the best items of each user, by a model of `sparsekit train autoencoder "
        "--save`, to a file with a line for each: user, item and score, with tabs between them and "
        "no header; users rising, scores falling. Items that the user has rated in training, or "
        "nobody has, are not among them.",
    )
    parser.set_defaults(run=_recommend)
    parser.add_argument("model", metavar="MODEL", help="file of the trained model")
    parser.add_argument(
        "--snapshot",
        metavar="FILE",
        help="read the vectors from this snapshot, or from the folder of a delta log, instead of "
        "MODEL",
    )
    parser.add_argument("--out", metavar="FILE", default="recs.tsv", help="where to write")
    parser.add_argument("--k", type=number(int, 1, 2**20), default=10, help="most items of a user")
    parser.add_argument(
        "--show", type=number(int, 0, 2**31), default=10, help="lines that are printed as well"
    )


def _recommend(args: argparse.Namespace) -> int:
    check_folder(args.out, "--out")
    check_other_file("--out", args.out, args.model)
    check_other_file("--out", args.out, args.snapshot)
    set_threads(None)
    if Path(args.model).is_dir():
        raise UsageError(
            f"{args.model}: is a folder; needed is the file that `sparsekit train autoencoder "
            f"--save` has written (folders are what train dlrm and deepfm save, for `sparsekit "
            f"predict`)"
        )
    try:
        model = load_recommender(args.model)
    except OSError as error:
        raise UsageError(f"{args.model}: {why(error, args.model)}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    # k must not exceed the number of items.
    k = min(args.k, len(model.history.items))
    best = recommend(model, k) if args.snapshot is None else _served(args, model, k)
    with writing("--out", args.out):
        best.write(args.out)
    print(f"{args.out}: {len(best):,} items for {len(best.users):,} users")
    if args.show:
        titles: dict[int, str] = {}
        with contextlib.suppress(DatasetUnavailableError):  # without this data, show no titles
            titles = movielens_100k_titles() if model.source == MOVIELENS else {}
        _show(best, args.show, titles)
    return 0


def _served(args: argparse.Namespace, model: Recommender, k: int) -> Recommendations:
    """Recommend from the newest version of a snapshot."""
    if not isinstance(model, Autoencoder):
        raise UsageError(f"--snapshot {args.snapshot}: {args.model} has no tables, as it is dense")
    try:
        with Snapshot(args.snapshot) as snapshot:
            if Path(args.snapshot).is_dir():
                snapshot.refresh()
            return recommend_from(snapshot, model, k)
    except (OSError, SnapshotError, ValueError) as error:
        raise UsageError(f"--snapshot {error}") from error


def _show(best: Recommendations, lines: int, titles: dict[int, str]) -> None:
    rows = list(itertools.islice(best.rows(), lines))
    table = [("user", "item", "score", "title" if titles else "")]
    for user, item, score in rows:
        table.append((str(user), str(item), f"{score:.4f}", titles.get(item, "")))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for *numbers, title in table:
        cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[:-1], strict=True)]
        print("  ".join([*cells, title]).rstrip())
