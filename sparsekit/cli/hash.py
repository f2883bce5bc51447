"""``sparsekit hash``: converts raw values from a file to keys in a Parquet file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from typing import Any

from .._arguments import Parser
from .._extras import needed
from .._replacing import replacing
from ..data import Batch
from ..data.reader import Reader
from ..train.progress import Progress
from .columns import add_columns, open_reader
from .common import UsageError, check_folder, check_other_file

_BATCH = 65536


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
    add_columns(parser)


def _hash(args: argparse.Namespace) -> int:
    pyarrow, parquet = needed("pyarrow", "hash"), needed("pyarrow.parquet", "hash")
    check_folder(args.out, "--out")
    check_other_file("--out", args.out, args.file)
    reader, lists = open_reader(args, [args.file], _BATCH)
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
