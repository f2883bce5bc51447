"""Options for commands that save checkpoints and can resume from them."""

from __future__ import annotations

import argparse
import json
import os
import zlib
from pathlib import Path
from typing import Any

from .._arguments import Parser
from .._nearest import did_you_mean_file
from ..checkpoint import CheckpointError, Checkpoints, latest
from ..checkpoint.folder import resolved
from ..checkpoint.manifest import MANIFEST
from .common import UsageError, count, rank

# Name of the checkpoint in a folder made by `sparsekit train --save`.
_MODEL = "model"
# Name of the file in the checkpoint folder that lists the options of the run.
RUN = "run.json"
# Options that may be changed when a run is resumed.
_FREE = {
    "run", "checkpoint", "checkpoint_every", "keep", "resume", "threads", "log", "ranks", "save",
    "run_folder", "recs", "show_config", "trainer.log_every", "trainer.tensorboard",
    "config", "settings",  # their settings are compared one by one, by full names
}  # fmt: skip
# Options with paths of data files: ``data`` for models that load the file into memory, the others
# for models that stream the files.
_DATA = ("data", "data.train", "data.validation", "data.test")
# Files larger than _WHOLE_BYTES are compared only by their first and last _END_BYTES.
_WHOLE_BYTES, _END_BYTES = 4 << 30, 64 << 20


def add_options(parser: Parser | argparse.ArgumentParser) -> None:
    """Add the checkpoint options to a parser."""
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="where to save the run after each epoch and every few steps",
    )
    parser.add_argument(
        "--checkpoint-every", type=count, default=1000, metavar="STEPS",
        help="steps between two checkpoints",
    )  # fmt: skip
    parser.add_argument("--keep", type=count, default=3, help="checkpoints that stay")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the latest checkpoint in --checkpoint, or begin if there is none",
    )


def prepare(args: argparse.Namespace) -> None:
    """Check the checkpoint folder before training, and write the options of the run into it.

    Raises:
        UsageError: the folder belongs to another run, or cannot be written.
    """
    if args.checkpoint is None:
        if args.resume:
            raise UsageError("--resume needs --checkpoint FOLDER")
        return
    folder = Path(args.checkpoint)
    try:
        exists = latest(folder) is not None
        if exists and not args.resume:
            raise UsageError(
                f"--checkpoint {folder}: has checkpoints already; pass --resume to go on from the "
                f"latest, or another folder"
            )
        if exists:
            _compare(folder, _shaping(args), _contents(args))
        elif rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            started = {**_shaping(args), "contents": _contents(args)}
            (folder / RUN).write_text(json.dumps(started, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"--checkpoint {folder}: {error.strerror or error}") from error
    except (CheckpointError, ValueError) as error:
        raise UsageError(f"--checkpoint {folder}: {error}") from error


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for a `Trainer` that saves checkpoints."""
    if args.checkpoint is None:
        return {}
    return {
        "checkpoints": Checkpoints(args.checkpoint, keep=args.keep),
        "checkpoint_every": args.checkpoint_every,
    }


def _shaping(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that affect the trained model."""
    chosen = {name: value for name, value in vars(args).items() if name not in _FREE}
    return json.loads(json.dumps(chosen, default=str))


def _contents(args: argparse.Namespace) -> dict[str, list[int]]:
    """Return the size and CRC-32 of each data file."""
    found = {}
    for option in _DATA:
        given = getattr(args, option, None) or ()
        for path in [given] if isinstance(given, str) else given:
            if os.path.isfile(path):  # a pipe can be read only once
                found[path] = _size_and_crc(path)
    return found


def _size_and_crc(path: str) -> list[int]:
    size, code = os.path.getsize(path), 0
    whole = size <= _WHOLE_BYTES
    with open(path, "rb") as file:
        for start, end in [(0, size)] if whole else [(0, _END_BYTES), (size - _END_BYTES, size)]:
            file.seek(start)
            while file.tell() < end and (piece := file.read(1 << 20)):
                code = zlib.crc32(piece, code)
    return [size, code]


def _compare(folder: Path, now: dict[str, Any], contents: dict[str, list[int]]) -> None:
    if not (folder / RUN).exists():
        return  # the folder was created by a script, which stores no options
    before = json.loads((folder / RUN).read_text())
    for path, was in before.pop("contents", {}).items():
        if contents.get(path, was) != was:
            size, before_size = contents[path][0], was[0]
            sizes = f" (it had {before_size:,} bytes, and has {size:,})" * (size != before_size)
            raise UsageError(
                f"{path}: has changed since the run in --checkpoint {folder} was started{sizes}; "
                f"put it back, or use another folder"
            )
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            option = f"--set {name}=" if "." in name else f"--{name.replace('_', '-')} "
            raise UsageError(
                f"{option}{now.get(name)}: the run in --checkpoint {folder} was started with "
                f"{before.get(name)}; pass the same, or another folder"
            )


def checkpoint_at(path: str) -> Path:
    """Return the checkpoint at a path.

    Raises:
        UsageError: there is none.
    """
    folder = resolved(path)
    for each in (folder, folder / _MODEL):
        if (each / MANIFEST).exists():
            return each
    if not folder.exists():
        raise UsageError(f"{path}: No such file or directory{did_you_mean_file(path)}")
    raise UsageError(
        f"{path}: is neither a checkpoint nor a folder that `sparsekit train --checkpoint` or "
        f"`sparsekit train dlrm --save` has written"
    )
