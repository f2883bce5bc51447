"""``sparsekit hash``: converts the raw values of a file to keys, in a Parquet file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .._arguments import Parser
from .._extras import needed
from .._replacing import replacing
from ..data import Batch, Keys
from ..data.columns import Kind
from ..data.formats import FORMATS
from ..data.reader import Reader
from ..train.progress import Progress
from .common import UsageError, check_folder, check_other_file, number, why

_BATCH = 65536
_KINDS: tuple[Kind, ...] = ("int", "hex", "hash")


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit hash`` to the parser."""
    parser = commands.add_parser(
        "hash",
        help="turn the raw values of a file into keys",
        description="Read CSV, TSV, Criteo's format (plain, compressed or from a pipe) or Parquet, "
        "and write Parquet: "
        "an int64 key in place of each categorical value, or a list of them; null where there is "
        "none. ParquetReader reads it with the kind 'int'.",
    )
    parser.set_defaults(run=_hash)
    parser.add_argument("file", metavar="FILE", help="what is read")
    parser.add_argument("--out", metavar="FILE", required=True, help="the Parquet file")
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


def _hash(args: argparse.Namespace) -> int:
    pyarrow, parquet = needed("pyarrow", "hash"), needed("pyarrow.parquet", "hash")
    check_folder(args.out, "--out")
    check_other_file("--out", args.out, args.file)
    try:
        reader, lists = _open(args)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise UsageError(f"{args.file}: {why(error, args.file)}") from error
        raise UsageError(str(error)) from error
    total = reader.count_rows() if reader.counts_fast else 0
    writer = None
    try:
        with Progress(args.out, total, sys.stdout, unit="rows") as progress:
            with replacing(args.out) as part:
                for batch in reader:
                    table = pyarrow.table(_columns(reader, batch, lists))
                    writer = writer or parquet.ParquetWriter(part, table.schema)
                    writer.write_table(table)
                    progress.update(batch.rows)
                if writer is None:
                    raise UsageError(f"{args.file}: no rows")
                writer.close()
            skipped = f", {reader.skipped:,} malformed left out" if args.skip_malformed else ""
            rate = progress.done / progress.seconds
            progress.finish(
                f"{progress.done:,} rows{skipped} in {progress.seconds:.1f} s, {rate:,.0f} rows/s"
            )
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{args.file} to {args.out}: {reason}") from error
    return 0


def _open(args: argparse.Namespace) -> tuple[Reader, Collection[str]]:
    """Return the reader, and the names of the features to write as lists."""
    form = FORMATS[args.format or _format_of(args.file)]
    options: dict[str, Any] = {"on_error": "skip" if args.skip_malformed else "raise"}
    if form.open is None:
        kind = form.keys if args.hash is None else "hash"
        keys = Keys(kind, args.separator, seed=args.seed)
        reader = form.reader(args.file, _BATCH, keys=keys, **options)
        return reader, reader.columns.sparse if args.separator else ()
    source, names, lists = form.open(args.file)
    asked = {kind: getattr(args, kind) for kind in ("dense", *_KINDS)}
    named = {kind: names.split(",") if names else [] for kind, names in asked.items()}
    if args.hash is None:
        taken = {args.label, *named["dense"], *named["int"], *named["hex"]}
        named["hash"] = [name for name in names if name not in taken]
    sparse = {
        name: Keys(kind, args.separator, seed=args.seed) for kind in _KINDS for name in named[kind]
    }
    options |= {"label": args.label, "dense": named["dense"], "sparse": sparse}
    return form.reader(source, _BATCH, **options), sparse if args.separator else lists


def _format_of(file: str) -> str:
    path = Path(file)
    packed = path.suffix in (".gz", ".bz2", ".xz")
    suffix = path.with_suffix("").suffix if packed else path.suffix
    for name, form in FORMATS.items():
        if form.suffix == suffix:
            return name
    raise UsageError(f"{file}: --format says what it is, if its name does not")


def _columns(reader: Reader, batch: Batch, lists: Collection[str]) -> dict[str, Any]:
    """Return the Arrow array of each column to write, by name."""
    import pyarrow

    label = reader.columns.label
    columns = {} if batch.label is None or label is None else {label: batch.label.numpy()}
    for i, name in enumerate(reader.columns.dense):
        columns[name] = batch.dense[:, i].numpy()
    for name, (values, offsets) in batch.sparse.to_dict().items():
        if name in lists:
            columns[name] = pyarrow.LargeListArray.from_arrays(offsets.numpy(), values.numpy())
        else:
            present = offsets.diff().bool()
            keys = values.new_zeros(batch.rows).masked_scatter(present, values)
            columns[name] = pyarrow.array(keys.numpy(), mask=~present.numpy())
    return columns
