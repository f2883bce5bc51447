"""``sparsekit checkpoint``: look at checkpoints, verify them, make them anew for other ranks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .._arguments import Parser
from ..checkpoint.folder import chain, resolved
from ..checkpoint.reshard import reshard, verify
from ..train.progress import Progress
from .common import number


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "checkpoint",
        help="look at checkpoints, verify them, make them anew for other ranks",
        description="Work on checkpoints as files, without a model and on one process.",
    )
    parts = command.add_subparsers(required=True, metavar="WHAT")
    texts = {
        "inspect": "tell what a checkpoint has",
        "verify": "read all files of a checkpoint and of those it follows, and compare checksums",
        "reshard": "write a checkpoint anew for another number of ranks",
        "compact": "write a checkpoint and those it follows as one",
    }
    for name, text in texts.items():
        part = parts.add_parser(name, help=text, description=f"{text.capitalize()}.")
        part.set_defaults(run=globals()[f"_{name}"])
        part.add_argument("path", metavar="PATH", help="a checkpoint, or a folder: its latest")
        if name in ("reshard", "compact"):
            part.add_argument("out", metavar="OUT", help="folder of the new one")
        if name == "reshard":
            part.add_argument("--world", type=number(int, 1, 4096), required=True, help="ranks")


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
        print(f"  {name}: {rows} {part}, dim {table.dim}, {table.dtype}, {kind}, "
              f"placement {table.placement}, capacity {table.capacity:,}")  # fmt: skip
        if table.optimizer is not None:
            kept = ", ".join(table.states) or "nothing for each row"
            print(f"    {manifest.optimizers[table.optimizer].get('kind')}: {kept}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    folders = _with_bar(args.path, "verify", lambda told: verify(args.path, told))
    print(f"{folders[-1]}: whole" + f", with {len(folders) - 1} before it" * (len(folders) > 1))
    return 0


def _reshard(args: argparse.Namespace) -> int:
    made = _with_bar(
        args.path, "verify", lambda told: reshard(args.path, args.out, args.world, told)
    )
    print(f"{made}: for {args.world} rank(s)")
    return 0


def _compact(args: argparse.Namespace) -> int:
    world_size = chain(resolved(args.path))[-1][1].world_size
    return _reshard(argparse.Namespace(path=args.path, out=args.out, world=world_size))


def _with_bar(path: str, title: str, work: Any) -> Any:
    links = chain(resolved(Path(path)))
    total = sum(file.bytes for _, manifest in links for file in manifest.files.values())
    with Progress(title, total, sys.stderr, "bytes") as progress:
        return work(progress.update)
