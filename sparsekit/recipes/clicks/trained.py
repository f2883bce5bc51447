"""Saves a trained click model in a folder, with everything needed to predict on new files."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ... import checkpoint
from ..._content import lines_of
from ...checkpoint.manifest_file import read_manifest
from ...cli.common import UsageError, check_folder, rank, why, writing
from ...data import Batch, CsvReader, Keys
from ...data.columns import Columns
from ...data.formats import FORMATS
from ...data.reader import Reader
from ...errors import DataFormatError
from ..buckets import QuantileBuckets
from .config import DeepFMConfig, DLRMConfig, RunConfig
from .deepfm import DeepFM
from .dlrm import DLRM

MODELS = {"dlrm": (DLRM, DLRMConfig), "deepfm": (DeepFM, DeepFMConfig)}
FORMAT = "sparsekit clicks 1"
_MODEL = "model"
# Name of the file with the entries below, in the model's folder. It must not be run.json: in a
# checkpoint folder, run.json contains the options of the run.
NOTE = "model.json"
_ENTRIES = {"what", "model", "seed", "settings", "format", "dense", "sparse", "buckets"}


def scores(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Compute the scores ``[n]`` of a batch; their sigmoid is the probability of a click."""
    # Take the logarithm, since the numbers are counts and amounts, which may be in the millions.
    return model(batch.dense.clamp(min=0).log1p(), batch.sparse)


def check_new(args: argparse.Namespace) -> None:
    """Raise UsageError before the work begins if ``--save`` cannot be created as a new folder."""
    folder = args.run_folder
    check_folder(folder, folder=True)
    if folder is None:
        return
    if (Path(folder) / _MODEL).exists():
        raise UsageError(f"--save {folder}: has a model already; pass another folder")
    if args.checkpoint is not None and Path(args.checkpoint).resolve() == Path(folder).resolve():
        raise UsageError(f"--save {folder}: is the folder of --checkpoint; pass another one")


def save(
    args: argparse.Namespace,
    model: torch.nn.Module,
    config: RunConfig,
    columns: Columns,
    buckets: QuantileBuckets | None,
) -> None:
    """Write the model, and a note that describes how to read files for it (a collective call).

    Args:
        args: arguments of the command, including model, seed and ``--save``.
        model: the trained model.
        config: settings of the run.
        columns: columns that the model was trained on.
        buckets: buckets for computing the "NAME bucket" columns, which users' files lack; None
            if there are no such columns.
    """
    folder = Path(args.run_folder)
    run = {
        "what": FORMAT,
        "model": args.model,
        "seed": args.seed,
        "settings": {name: value for name, value in vars(config.model).items() if name != "rows"},
        "format": config.data.format,
        "dense": columns.dense,
        "sparse": {name: asdict(keys) for name, keys in columns.sparse.items()},
        "buckets": buckets and {name: cuts.tolist() for name, cuts in buckets.edges.items()},
    }
    if rank() == 0:
        with writing("--save", args.run_folder):
            folder.mkdir(exist_ok=True)
            (folder / NOTE).write_text(json.dumps(run, indent=1) + "\n")
    checkpoint.save(model, folder / _MODEL)  # last, so that an incomplete folder has no model


def read(folder: str) -> dict[str, Any]:
    """Read the note written by `save` in the model's folder.

    Raises:
        UsageError: the folder does not contain such a note, or cannot be read.
    """
    try:
        run = json.loads((Path(folder) / NOTE).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        run = None
    except OSError as error:
        raise UsageError(f"{folder}: {why(error, folder)}") from error
    whole = isinstance(run, dict) and run.keys() == _ENTRIES and run["what"] == FORMAT
    if not whole or not _model(folder).exists():
        raise UsageError(
            f"{folder}: no folder that `sparsekit train dlrm --save` or deepfm's has written"
        )
    return run


def load(folder: str, run: dict[str, Any]) -> torch.nn.Module:
    """Load the model and set it to evaluation mode (a collective call).

    Raises:
        CheckpointError: the model is damaged.
    """
    # Give each rank enough capacity for all rows: if there are fewer ranks than in training, each
    # one owns more rows. Prediction adds no rows.
    tables = read_manifest(_model(folder)).tables.values()
    rows = {table.layer: max(1, table.size) for table in tables}
    kind, _ = MODELS[run["model"]]
    model = kind(
        list(run["sparse"]), len(run["dense"]), rows=rows, seed=run["seed"], **run["settings"]
    )
    checkpoint.load(model, _model(folder))
    return model.eval()


def reader(run: dict[str, Any], files: Sequence[str], batch_size: int) -> Reader:
    """Make a reader as in training, but without labels and without shuffling."""
    sparse = {name: Keys(**keys) for name, keys in run["sparse"].items()}
    how: dict[str, Any] = {"dense": run["dense"], "sparse": sparse}
    form = FORMATS[run["format"]]
    if form.open is not None:
        return form.reader(files, batch_size, **how)
    # Use a general reader, since the format's own reader requires labels.
    names = ["label", *run["dense"], *sparse]
    return CsvReader(files, batch_size, columns=names, quote=None, delimiter="\t", **how)


def with_buckets(run: dict[str, Any], file: str, out: Path) -> None:
    """Copy a CSV file, adding the bucket columns that the model was trained on.

    Raises:
        DataFormatError, ValueError: a column is missing, or a row is malformed.
        OSError: the file cannot be read.
    """
    buckets = QuantileBuckets(run["buckets"])
    added = [f"{name} bucket" for name in buckets.edges]
    there = Columns(None, tuple(run["dense"]), {n: Keys() for n in run["sparse"] if n not in added})
    with out.open("w", newline="", encoding="utf-8") as copy:
        rows = csv.reader(lines_of(file), skipinitialspace=True)
        names = next(rows, [])
        there.check_there("predict", file, names)
        writer = csv.writer(copy)
        writer.writerow([*names, *added])
        for row in filter(None, rows):
            if len(row) != len(names):
                raise DataFormatError(
                    f"{file}, line {rows.line_num}: {len(row)} fields, where the first line has "
                    f"{len(names)}"
                )
            values = {name: [row[names.index(name)]] for name in buckets.edges}
            try:
                found = buckets(values)
            except ValueError as error:
                raise DataFormatError(f"{file}, line {rows.line_num}: {error}") from error
            writer.writerow([*row, *(found[name].item() for name in buckets.edges)])


def _model(folder: str) -> Path:
    return Path(folder) / _MODEL
