"""``sparsekit checkpoint``: inspects, verifies, compares, converts and rewrites checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TypeVar

from .._arguments import Parser
from ..checkpoint.convert import FORMATS, KINDS, export, import_tables, sources_of
from ..checkpoint.diff import diff, lines
from ..checkpoint.folder import chain, resolved
from ..checkpoint.forget import forget
from ..checkpoint.reshard import OnProgress, reshard, verify
from ..train.progress import Progress
from .common import UsageError, number

T = TypeVar("T")


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit checkpoint`` to the parser."""
    command = commands.add_parser(
        "checkpoint",
        help="look at checkpoints, verify, compare, reshard, import and export them, forget keys",
        description="Work on checkpoints as files, without a model and on one process.",
    )
    parts = command.add_subparsers(required=True, metavar="WHAT")
    texts = {
        "inspect": "tell what a checkpoint has",
        "verify": "read all files of a checkpoint and of those it follows, and compare checksums",
        "diff": "compare two checkpoints by key; exits with 1 if they differ",
        "reshard": "write a checkpoint anew for another number of ranks",
        "compact": "write a checkpoint and those it follows as one",
        "forget": "rewrite checkpoints without some keys, so that no file has anything of them",
        "export": "write each table to a file for other programs",
        "import": "make a checkpoint of tables that another library has saved",
    }
    for name, text in texts.items():
        part = parts.add_parser(name, help=text, description=f"{text.capitalize()}.")
        part.set_defaults(run=globals()[f"_{name}"])
        what = "a checkpoint, or a folder: its latest"
        if name == "import":
            what = "folder of a SOK dump or of .npz files, a .npz, or a file of torch.save"
        elif name == "forget":
            what = "a checkpoint, with all of its chain; or a folder: all in it"
        part.add_argument("path", metavar="PATH", help=what)
        if name == "diff":
            part.add_argument("other", metavar="OTHER", help="what it is compared with")
        elif name not in ("inspect", "verify", "forget"):
            part.add_argument("out", metavar="OUT", help="folder that is made")
        if name == "reshard":
            part.add_argument("--world", type=number(int, 1, 4096), required=True, help="ranks")
        elif name == "forget":
            key = number(int, -(2**63), 2**63 - 1)
            part.add_argument(
                "--keys", type=key, nargs="+", required=True, metavar="KEY", help="which keys"
            )
            part.add_argument(
                "--table", help="the only table to change; else all that have a hash table"
            )
        elif name == "export":
            part.add_argument("--format", choices=FORMATS, required=True, help="kind of file")
        elif name == "import":
            _import_options(part)


def _import_options(part: argparse.ArgumentParser) -> None:
    part.add_argument(
        "--from", choices=KINDS, required=True, dest="kind",
        help="which library; npz: arrays vectors and perhaps keys; torchrec: a state dict",
    )  # fmt: skip
    part.add_argument(
        "--dim", action="append", metavar="[TABLE=]N", type=_dim,
        help="elements of a vector, of all tables or of one; for sok1, whose files do not tell",
    )  # fmt: skip
    part.add_argument(
        "--rename", action="append", metavar="TABLE=LAYER", type=_rename,
        help="the layer's name in the module, where it is another than the table's",
    )  # fmt: skip


def _dim(text: str) -> tuple[str, int]:
    table, _, size = text.rpartition("=")
    if not size.isdecimal() or not 1 <= int(size) < 2**24:
        raise argparse.ArgumentTypeError(f"{text!r} is neither N nor TABLE=N, with N >= 1")
    return table, int(size)


def _rename(text: str) -> tuple[str, str]:
    table, equals, layer = text.rpartition("=")
    if not (table and equals and layer):
        raise argparse.ArgumentTypeError(f"{text!r} is not TABLE=LAYER")
    return table, layer


def _inspect(args: argparse.Namespace) -> int:
    links = chain(resolved(args.path))
    path, manifest = links[-1]
    size = sum(file.bytes for file in manifest.files.values())
    step = "no step" if manifest.step is None else f"step {manifest.step:,}"
    print(f"{path}: {step}, {manifest.world_size} rank(s), {size:,} bytes, sparsekit "
          f"{manifest.version}")  # fmt: skip
    for older, _ in links[-2::-1]:
        print(f"  follows {older.name}")
    for name, table in manifest.tables.items():
        rows = " + ".join(f"{shard.rows:,}" for shard in table.shards)
        kind = "hash table" if table.hash_table else "row numbers"
        part = "rows" if table.complete else f"changed rows of {table.size:,}"
        if removed := sum(shard.removed for shard in table.shards):
            part += f", {removed:,} keys removed"
        print(f"  {name}: {rows} {part}, dim {table.dim}, {table.dtype}, {kind}, "
              f"placement {table.placement}, capacity {table.capacity:,}")  # fmt: skip
        if table.optimizer is not None:
            kept = ", ".join(table.states) or "nothing for each row"
            print(f"    {manifest.optimizers[table.optimizer].get('kind')}: {kept}")
        if table.scores is not None:
            print(f"    scores: {table.scores.kind}, clock {table.scores.clock:,}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    folders = _verifying(lambda bar: verify(args.path, bar), args.path)
    print(f"{folders[-1]}: whole" + f", with {len(folders) - 1} before it" * (len(folders) > 1))
    return 0


def _reshard(args: argparse.Namespace) -> int:
    made = _verifying(lambda bar: reshard(args.path, args.out, args.world, bar), args.path)
    print(f"{made}: for {args.world} rank(s)")
    return 0


def _compact(args: argparse.Namespace) -> int:
    world_size = chain(resolved(args.path))[-1][1].world_size
    return _reshard(argparse.Namespace(path=args.path, out=args.out, world=world_size))


def _forget(args: argparse.Namespace) -> int:
    try:
        removed = forget(args.path, args.keys, args.table)
    except ValueError as error:  # there is no such table, or it has no hash table
        raise UsageError(str(error)) from None
    print(f"{args.path}: {removed:,} row(s) removed, from all files together")
    return 0


def _diff(args: argparse.Namespace) -> int:
    found = _verifying(lambda bar: diff(args.path, args.other, bar), args.path, args.other)
    for line in lines(found, {"a": args.path, "b": args.other}):
        print(line)
    return int(bool(found))


def _export(args: argparse.Namespace) -> int:
    made = _verifying(lambda bar: export(args.path, args.out, args.format, bar), args.path)
    for file in sorted(made.iterdir()):
        print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


def _import(args: argparse.Namespace) -> int:
    sources = sources_of(args.kind, args.path, dict(args.dim or ()))
    total = sum(source.rows * source.dim * source.dtype.itemsize for source in sources)
    with Progress("import", total, sys.stderr, "bytes") as progress:
        made = import_tables(sources, args.out, dict(args.rename or ()), progress.update)
    for source in sources:
        left = f"; left behind: {source.left}" if source.left else ""
        print(f"{source.name}: {source.rows:,} rows, dim {source.dim}{left}")
    print(f"{made}: load it with strict=False, and without optimizers")
    return 0


def _verifying(work: Callable[[OnProgress], T], *paths: str) -> T:
    """Call a function that first verifies these checkpoints; show the verification's progress."""
    folders = [chain(resolved(path)) for path in paths]
    total = sum(
        file.bytes for links in folders for _, manifest in links for file in manifest.files.values()
    )
    with Progress("verify", total, sys.stderr, "bytes") as progress:
        return work(progress.update)
