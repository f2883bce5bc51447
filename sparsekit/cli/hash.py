"""``sparsekit hash``: a file of raw values in, a Parquet file of keys out."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from .._arguments import Parser
from .._extras import needed
from ..data import Batch, CriteoReader, CsvReader, Keys, ParquetReader
from ..data.parquet_file import ParquetFiles
from ..data.reader import Reader
from ..data.text import open_text
from ..train.progress import Progress
from .common import UsageError, check_folder, check_other_file, number, why

_BATCH = 65536
_DELIMITERS = {"csv": ",", "tsv": "\t"}


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
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
    parser.add_argument(
        "--format",
        choices=("criteo", "csv", "tsv", "parquet"),
        help="of FILE (default: by its name, .csv, .tsv or .parquet, .gz, .bz2 or .xz left out)",
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
    parser.add_argument("--seed", type=number(int, 0, 2**64 - 1), default=0, help="of the hash (0)")
    parser.add_argument(
        "--skip-malformed", action="store_true", help="leave out malformed lines, and count them"
    )


def _hash(args: argparse.Namespace) -> int:
    try:
        pyarrow, parquet = needed("pyarrow", "hash"), needed("pyarrow.parquet", "hash")
    except ImportError as error:
        raise UsageError(str(error)) from error
    check_folder(args.out, "--out")
    check_other_file("--out", args.out, args.file)
    try:
        reader, lists = _open(args)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise UsageError(f"{args.file}: {why(error, args.file)}") from error
        raise UsageError(str(error)) from error
    partial = Path(f"{args.out}.{os.getpid()}.part")  # a name that nobody else has
    total = reader.count_rows() if reader.counts_fast else 0
    rows, writer = 0, None
    try:
        with Progress(args.out, total, sys.stdout, unit="rows") as progress:
            for batch in reader:
                table = pyarrow.table(_columns(reader, batch, lists))
                writer = writer or parquet.ParquetWriter(partial, table.schema)
                writer.write_table(table)
                rows += batch.rows
                progress.update(batch.rows)
            if writer is None:
                raise UsageError(f"{args.file}: no rows")
            writer.close()
            partial.replace(args.out)
            skipped = f", {reader.skipped:,} malformed left out" if args.skip_malformed else ""
            rate = rows / progress.seconds
            progress.finish(
                f"{rows:,} rows{skipped} in {progress.seconds:.1f} s, {rate:,.0f} rows/s"
            )
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{args.file} to {args.out}: {reason}") from error
    finally:
        partial.unlink(missing_ok=True)
    return 0


def _open(args: argparse.Namespace) -> tuple[Reader, set[str]]:
    """The reader, and which of its features are written as lists."""
    form = args.format or _format_of(args.file)
    on_error = "skip" if args.skip_malformed else "raise"
    if form == "criteo":
        keys = Keys("hex" if args.hash is None else "hash", args.separator, seed=args.seed)
        criteo = CriteoReader(args.file, _BATCH, keys=keys, on_error=on_error)
        return criteo, set(criteo.columns.sparse) if args.separator else set()
    types: dict[str, Any] = {}
    if form == "parquet":
        if not Path(args.file).is_file() and Path(args.file).exists():
            raise UsageError(f"{args.file}: is no regular file, from which alone Parquet is read")
        types = {field.name: field.type for field in ParquetFiles().shape(Path(args.file)).schema}
        names = list(types)
    else:
        text, names = open_text(Path(args.file), _DELIMITERS[form])
    named = {kind: _split(getattr(args, kind)) for kind in ("dense", "int", "hex", "hash")}
    if args.hash is None:
        taken = {args.label, *named["dense"], *named["int"], *named["hex"]}
        named["hash"] = [name for name in names if name not in taken]
    sparse = {
        name: Keys(kind, args.separator, seed=args.seed)
        for kind in ("int", "hex", "hash")
        for name in named[kind]
    }
    settings: dict[str, Any] = {
        "label": args.label,
        "dense": named["dense"],
        "sparse": sparse,
        "on_error": on_error,
    }
    if form == "parquet":
        lists = {name for name in sparse if name in types and hasattr(types[name], "value_field")}
        return ParquetReader(args.file, _BATCH, **settings), lists
    reader = CsvReader(text, _BATCH, delimiter=_DELIMITERS[form], **settings)
    return reader, set(sparse) if args.separator else set()


def _format_of(file: str) -> str:
    path = Path(file)
    packed = path.suffix in (".gz", ".bz2", ".xz")
    suffix = path.with_suffix("").suffix if packed else path.suffix
    if suffix not in (".csv", ".tsv", ".parquet"):
        raise UsageError(f"{file}: --format says what it is, if its name does not")
    return suffix[1:]


def _split(names: str | None) -> list[str]:
    return names.split(",") if names else []


def _columns(reader: Reader, batch: Batch, lists: set[str]) -> dict[str, Any]:
    """Name -> Arrow array of each column of the result."""
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
