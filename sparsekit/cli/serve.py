"""``sparsekit serve``: snapshots of trained tables, for servers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone

from .._arguments import Parser
from ..checkpoint.folder import chain
from ..serving import LogError, Snapshot, SnapshotError, compact
from ..serving.export import export_checkpoint
from ..serving.format import MISSES, ROW_FORMATS
from ..train.progress import Progress
from . import serve_bench, serve_demo
from .checkpoints import checkpoint_at
from .common import UsageError, check_folder, told, writing


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit serve`` to the parser."""
    serve = commands.add_parser(
        "serve",
        help="write snapshots of trained tables for servers, and look at them",
        description="Write snapshots of trained tables for servers, and look at them.",
    )
    parts = serve.add_subparsers(required=True, metavar="WHAT")
    for each in (_add_export, _add_info, _add_compact, serve_bench.add, serve_demo.add):
        each(parts)


def _add_export(parts: argparse._SubParsersAction[Parser]) -> None:
    export = parts.add_parser(
        "export",
        help="write the tables of a checkpoint to a snapshot",
        description="Write the tables of a checkpoint, of any number of ranks, to a snapshot.",
    )
    export.set_defaults(run=_export)
    export.add_argument(
        "path", metavar="CHECKPOINT", help="a checkpoint, or the folder of --checkpoint or --save"
    )
    export.add_argument("file", metavar="FILE", help="snapshot to write; an older one is replaced")
    export.add_argument(
        "--rows", action="append", type=_choice_of(ROW_FORMATS), metavar="[TABLE=]FORMAT",
        help=f"format of rows, of all tables or of one: {', '.join(ROW_FORMATS)}; default: as in "
        f"the checkpoint, float64 as float32",
    )  # fmt: skip
    export.add_argument(
        "--miss", action="append", type=_choice_of(MISSES), metavar="[TABLE=]MISS",
        help=f"what a key without a row gives: {', '.join(MISSES)}; default: as in the layer",
    )  # fmt: skip
    export.add_argument(
        "--tables", nargs="+", metavar="TABLE", help="tables to write; default: all"
    )


def _choice_of(words: Sequence[str]) -> Callable[[str], tuple[str, str]]:
    """Return a function for argparse that parses ``WORD`` or ``TABLE=WORD``."""

    def parse(text: str) -> tuple[str, str]:
        table, _, word = text.rpartition("=")
        if word not in words:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(words)}")
        return table, word

    return parse


def _by_table(
    given: Sequence[tuple[str, str]] | None, names: Sequence[str]
) -> Mapping[str, str] | None:
    """Return the words by table; a word given for one table overrides the one for all tables."""
    if given is None:
        return None
    of_all = {name: word for table, word in given if not table for name in names}
    return of_all | {table: word for table, word in given if table}


def _export(args: argparse.Namespace) -> int:
    check_folder(args.file, "FILE")
    links = chain(checkpoint_at(args.path))
    folder, manifest = links[-1]
    names = list(manifest.tables) if args.tables is None else args.tables
    total = sum(file.bytes for _, each in links for file in each.files.values())
    try:
        with (
            writing("FILE", args.file),
            Progress("verify", total, sys.stderr, "bytes") as progress,
        ):
            export_checkpoint(
                folder,
                args.file,
                rows=_by_table(args.rows, names),
                miss=_by_table(args.miss, names),
                tables=args.tables,
                on_progress=progress.update,
            )
    except ValueError as error:
        raise UsageError(f"{args.path}: {error}") from None
    print(f"{args.file}: {len(set(names))} table(s) of {folder}")
    return 0


def _add_info(parts: argparse._SubParsersAction[Parser]) -> None:
    info = parts.add_parser(
        "info",
        help="tell what a snapshot has",
        description="Tell what a snapshot, or the newest base of a log, has.",
    )
    info.set_defaults(run=_info)
    info.add_argument("path", metavar="FILE", help="a snapshot, or the folder of a log")
    info.add_argument(
        "--verify", action="store_true", help="read the whole file, and compare all checksums"
    )


def _info(args: argparse.Namespace) -> int:
    try:
        with Snapshot(args.path, verify=args.verify) as snapshot:
            told = f"{args.path}: version {snapshot.version}"
            if snapshot.step >= 0:
                told += f", step {snapshot.step:,}"
            if snapshot.dense_version:
                told += f", dense version {snapshot.dense_version}"
            if snapshot.log_id:
                told += f", of log {snapshot.log_id:016x}"
            at = datetime.fromtimestamp(snapshot.written_at / 1e9, timezone.utc)
            print(f"{told}, written {at:%Y-%m-%d %H:%M:%S} UTC" + ", whole" * args.verify)
            for name, table in snapshot.tables.items():
                padding = "" if table.padding_key is None else f", padding key {table.padding_key}"
                size = table.rows * table.row_bytes
                print(f"  {name}: {table.rows:,} rows of dim {table.dim} in {table.row_format}, "
                      f"{size:,} bytes, pooled by {table.combiner}, misses: {table.miss}"
                      f"{padding}")  # fmt: skip
    except (OSError, SnapshotError) as error:
        raise UsageError(str(error)) from error
    return 0


def _add_compact(parts: argparse._SubParsersAction[Parser]) -> None:
    parser = parts.add_parser(
        "compact",
        help="merge the deltas of a log into a new base",
        description="Merge the deltas of a log into a new base, and remove them. The trainer and "
        "readers go on meanwhile. Keys that have been erased are gone from the new base.",
    )
    parser.set_defaults(run=_compact)
    parser.add_argument("path", metavar="FOLDER", help="the folder of a log")


def _compact(args: argparse.Namespace) -> int:
    try:
        version = compact(args.path)
    except (OSError, LogError) as error:
        raise UsageError(told(error, args.path)) from error
    print(f"{args.path}: the base has version {version}")
    return 0
