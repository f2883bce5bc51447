"""Options that select the columns to read from files, and the reader for them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ..data import Keys
from ..data.columns import Kind
from ..data.formats import FORMATS
from ..data.reader import Reader
from .common import UsageError, number, why

_KINDS: tuple[Kind, ...] = ("int", "hex", "hash")


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    known = [form.suffix for form in FORMATS.values() if form.suffix is not None]
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help=f"of FILE (default: by its name, {', '.join(known)}, .gz, .bz2 or .xz left out)",
    )
    parser.add_argument("--label", metavar="COLUMN", help="the column of labels, kept as float32")
    for kind, words in (
        ("dense", "numbers, kept as float32"),
        ("int", "64-bit integers, which are the keys"),
        ("hex", "hexadecimal numbers of at most 16 digits, which are the keys"),
        ("hash", "values whose xxh64 is the key (default: all that no other option names)"),
    ):
        parser.add_argument(
            f"--{kind}", metavar="COLUMNS", help=f"columns of {words}, separated by commas"
        )
    parser.add_argument(
        "--separator", metavar="CHARACTER", help="between several values in a field of text"
    )
    parser.add_argument("--seed", type=number(int, 0, 2**64 - 1), default=0, help="of the hash")
    parser.add_argument(
        "--skip-malformed", action="store_true", help="leave out malformed lines, and count them"
    )


def open_reader(
    args: argparse.Namespace, files: Sequence[str], batch_size: int
) -> tuple[Reader, Collection[str]]:
    """Make the reader; also return the names of the features that are lists.

    Raises:
        UsageError: a file cannot be read, or an option does not fit it.
    """
    try:
        return _open(args, files, batch_size)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            file = str(error.filename) if str(error.filename) in files else files[0]
            raise UsageError(f"{file}: {why(error, file)}") from error
        raise UsageError(str(error)) from error


def _open(
    args: argparse.Namespace, files: Sequence[str], batch_size: int
) -> tuple[Reader, Collection[str]]:
    form = FORMATS[args.format or format_of(files[0])]
    options: dict[str, Any] = {"on_error": "skip" if args.skip_malformed else "raise"}
    if form.open is None:
        kind = form.keys if args.hash is None else "hash"
        keys = Keys(kind, args.separator, seed=args.seed)
        reader = form.reader(files, batch_size, keys=keys, **options)
        return reader, reader.columns.sparse if args.separator else ()
    source, names, lists = form.open(files[0])
    if not any(names):
        raise ValueError(f"{files[0]} is empty, or begins with an empty line")
    asked = {kind: getattr(args, kind) for kind in ("dense", *_KINDS)}
    named = {kind: names.split(",") if names else [] for kind, names in asked.items()}
    if args.hash is None:
        taken = {args.label, *named["dense"], *named["int"], *named["hex"]}
        named["hash"] = [name for name in names if name not in taken]
    sparse = {
        name: Keys(kind, args.separator, seed=args.seed) for kind in _KINDS for name in named[kind]
    }
    options |= {"label": args.label, "dense": named["dense"], "sparse": sparse}
    # Pass a single file as it was opened above: if it is a pipe, it cannot be opened again.
    reader = form.reader(source if len(files) == 1 else files, batch_size, **options)
    return reader, sparse if args.separator else lists


def format_of(file: str) -> str:
    """Return the format that a file's name indicates.

    Raises:
        UsageError: the name indicates no known format.
    """
    path = Path(file)
    packed = path.suffix in (".gz", ".bz2", ".xz")
    suffix = path.with_suffix("").suffix if packed else path.suffix
    for name, form in FORMATS.items():
        if form.suffix == suffix:
            return name
    raise UsageError(f"{file}: --format says what it is, if its name does not")
