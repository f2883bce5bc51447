"""``sparsekit capacity``: predicts hit rates of tables, and divides memory among them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import optim
from .._arguments import Parser
from .._replacing import replacing
from .._sizes import size_of_text, size_text
from ..capacity import CapacityCurve, Policy
from ..capacity.divide import bytes_per_row, divide
from ..capacity.measure import Measure
from ..capacity.report import (
    Feature,
    allotted_as_json,
    allotted_as_text,
    as_json,
    as_text,
    plot,
    total_hit_rate,
)
from ..data.reader import Reader
from ..recipes.clicks.config import CONFIG, TrainerConfig
from ..recipes.clicks.run_folder import read_run
from ..train.progress import Progress
from .columns import add_columns, open_reader
from .common import (
    UsageError,
    check_apart,
    check_folder,
    check_other_file,
    count,
    number,
    set_threads,
    why,
    writing,
)

_SCORES = ("lru", "lfu", "ttl")
_OPTIMIZERS = [
    name
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, optim.RowOptimizer | optim.Adam)
    and kind is not optim.RowOptimizer
]  # fmt: skip


class _Source(NamedTuple):
    """The keys to read, and the tables they belong to.

    Attributes:
        reader: yields one batch for each lookup.
        epochs: number of passes over the batches.
        row_bytes: returns the size in bytes of a row in a feature's table.
    """

    reader: Reader
    epochs: int
    row_bytes: Callable[[str], float]


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit capacity`` to the parser."""
    parser = commands.add_parser(
        "capacity",
        help="predict hit rates by the rows of tables, and divide memory among them",
        description="Predict, for the table of each feature, how many of its keys have a row, by "
        "its number of rows and its policy, from a sample of the keys. With --budget, divide "
        "memory among all tables.",
    )
    parser.set_defaults(run=_capacity)
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="+",
        help="files to read; or a folder that was given to --log-to of `sparsekit train dlrm` or "
        "deepfm, which says what it has read, and how",
    )
    add_columns(parser)
    parser.add_argument(
        "--batch-size", type=count, metavar="N",
        help=f"samples in a lookup, of all ranks together (default: {_BATCH}, or the run's)",
    )  # fmt: skip
    parser.add_argument("--epochs", type=count, help="passes (default: 1, or the run's)")
    parser.add_argument(
        "--rows", type=_counts, metavar="N,N", help="sizes to predict (default: some that double)"
    )
    parser.add_argument(
        "--ttl", type=_counts, metavar="N,N", help="values of ttl (default: powers of two)"
    )
    parser.add_argument(
        "--policy", type=_policies, default=_SCORES, metavar="P,P",
        help=f"which of {', '.join(_SCORES)} to predict (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--admission", type=_counts, default=(1, 2), metavar="N,N",
        help="how often a key comes before it gets a row, 1 for no admission (default: 1,2)",
    )  # fmt: skip
    parser.add_argument(
        "--sample", type=number(int, 1, 2**24), default=1 << 15, metavar="N",
        help="most keys of a feature to look at",
    )  # fmt: skip
    parser.add_argument("--dim", type=count, help="elements of a vector (default: 16, the run's)")
    parser.add_argument(
        "--optimizer", choices=_OPTIMIZERS,
        help="whose states a row has (default: LazyAdam, or the run's)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=number(int, 1, 1024), default=1, metavar="N", help="that share the tables"
    )
    parser.add_argument(
        "--budget", type=_size, metavar="SIZE",
        help="memory of all tables on all ranks to divide, such as 2GiB",
    )  # fmt: skip
    parser.add_argument(
        "--measure", action="store_true", help="read again, into tables, and show what they hit"
    )
    parser.add_argument("--json", metavar="FILE", help="file to write, for programs")
    parser.add_argument("--plot", metavar="FILE", help="PNG to write")


_BATCH = TrainerConfig.global_batch_size


def _capacity(args: argparse.Namespace) -> int:
    for option, out in (("--json", args.json), ("--plot", args.plot)):
        check_folder(out, option)
        for file in args.source:
            check_other_file(option, out, file)
    check_apart("--plot", args.plot, "--json", args.json)
    again = "--measure" if args.measure else f"--epochs {args.epochs}"
    if (args.measure or (args.epochs or 1) > 1) and any(Path(x).is_fifo() for x in args.source):
        raise UsageError(f"{again} reads again, and a pipe can be read once")
    set_threads(None)
    source = _source(args)
    features = _predicted(args, source)
    if not features:
        raise UsageError(f"{' '.join(args.source)}: no rows")
    if args.measure:
        features = _measured(source, features)
    for name, feature in features.items():
        print(f"{as_text(name, feature, args.ranks)}\n")
    found: dict[str, Any] = {"ranks": args.ranks, "features": as_json(features, args.ranks)}
    allotted = None
    if args.budget is not None:
        allotted = _divided(args, features)
        rate = total_hit_rate(allotted, features)
        print(f"{size_text(args.budget)} over {args.ranks} rank(s):")
        print(allotted_as_text(allotted, features))
        tables = allotted_as_json(allotted)
        found["budget"] = {"bytes": args.budget, "hit_rate": rate, "tables": tables}
    if args.json is not None:
        with writing("--json", args.json), replacing(args.json) as part:
            part.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot is not None:
        with writing("--plot", args.plot), replacing(args.plot) as part:
            plot(features, part, allotted)
    return 0


def _source(args: argparse.Namespace) -> _Source:
    """Return the source that the arguments specify."""
    if not any(Path(each).is_dir() for each in args.source):
        reader, _ = open_reader(args, args.source, args.batch_size or _BATCH)
        optimizer = getattr(optim, args.optimizer or "LazyAdam")
        size = bytes_per_row(args.dim or 16, optimizer)
        return _Source(reader, args.epochs or 1, lambda _: size)
    if len(args.source) > 1:
        raise UsageError(f"{' '.join(args.source)}: a run is read alone")
    if chosen := [
        f"--{name}"
        for name in ("format", "label", "dense", "int", "hex", "hash", "separator")
        if getattr(args, name) is not None
    ]:
        raise UsageError(f"{chosen[0]}: {args.source[0]}/{CONFIG} says what is read")  # fmt: skip
    run = read_run(args.source[0], args.batch_size)
    optimizer = getattr(optim, args.optimizer) if args.optimizer else run.optimizer
    sizes = {dim: bytes_per_row(dim, optimizer) for dim in {args.dim, *run.dims.values()} if dim}
    return _Source(
        run.reader, args.epochs or run.epochs, lambda name: sizes[args.dim or run.dims[name]]
    )


def _lookups(source: _Source, title: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the keys for each lookup, by feature."""
    reader = source.reader
    reader.set_epoch(0)
    total = reader.count_rows() * source.epochs if reader.counts_fast else 0
    with Progress(title, total, sys.stderr, unit="rows") as progress:
        for _ in range(source.epochs):
            try:
                for batch in reader:
                    yield {name: keys for name, (keys, _) in batch.sparse.to_dict().items()}
                    progress.update(batch.rows)
            except OSError as error:
                file = str(error.filename)
                raise UsageError(f"{file}: {why(error, file)}") from error


def _predicted(args: argparse.Namespace, source: _Source) -> dict[str, Feature]:
    scores = [score for score in args.policy if score != "ttl"]
    policies = [Policy(score, least) for least in args.admission for score in scores]
    ttls = args.ttl if "ttl" in args.policy else ()
    curves: dict[str, CapacityCurve] = {}
    for lookup in _lookups(source, "predict"):
        for name, keys in lookup.items():
            if name not in curves:
                curves[name] = CapacityCurve(policies, args.rows, ttls, sample=args.sample)
            curves[name].add(keys)
    return {name: Feature(each.read(), source.row_bytes(name)) for name, each in curves.items()}


def _measured(source: _Source, features: dict[str, Feature]) -> dict[str, Feature]:
    tables = {name: Measure(feature.curve) for name, feature in features.items()}
    for lookup in _lookups(source, "measure"):
        for name, keys in lookup.items():
            tables[name].add(keys)
    return {
        name: feature._replace(measured=tables[name].hit_rates())
        for name, feature in features.items()
    }


def _divided(args: argparse.Namespace, features: dict[str, Feature]) -> dict[str, Any]:
    if not any(score != "ttl" for score in args.policy):
        raise UsageError("--budget: needs a --policy other than ttl, which bounds no rows")
    curves = {name: feature.curve for name, feature in features.items()}
    sizes = {name: feature.row_bytes for name, feature in features.items()}
    try:
        return divide(args.budget, curves, sizes, args.ranks)
    except ValueError as error:
        raise UsageError(f"--budget {size_text(args.budget)}: {error}") from error


def _counts(text: str) -> tuple[int, ...]:
    values = tuple(number(int, 1, 2**31 - 1)(each) for each in text.split(","))
    return tuple(map(int, values))


_counts.__name__ = "list of int"


def _policies(text: str) -> tuple[str, ...]:
    for each in text.split(","):
        if each not in _SCORES:
            raise argparse.ArgumentTypeError(f"{each!r} is none of {', '.join(_SCORES)}")
    return tuple(dict.fromkeys(text.split(",")))


def _size(text: str) -> int:
    try:
        return size_of_text(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
