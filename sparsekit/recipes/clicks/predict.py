"""``sparsekit predict``: predicts the probabilities of clicks with a trained model."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..._arguments import Parser
from ..._replacing import replacing
from ...cli import ranks
from ...cli.checkpoints import RUN
from ...cli.common import UsageError, check_folder, check_other_file, rank, why, writing
from ...data import Prefetcher
from ...train.metrics import gather
from . import trained

BATCH = 4096


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit predict`` to the parser."""
    parser = commands.add_parser(
        "predict",
        help="write a probability for each row of a file",
        description="Write the probability of a click for each row of a file, by a model of "
        "`sparsekit train dlrm --save` or deepfm's, to a file with a line for each row, in their "
        "order. Rows are read as in training, and need no label.",
    )
    parser.set_defaults(run=_run)
    parser.add_argument("folder", metavar="RUN", help="folder of the trained model")
    parser.add_argument(
        "--data",
        metavar="FILE",
        nargs="+",
        required=True,
        help="files with the columns that the model was trained on",
    )
    parser.add_argument("--out", metavar="FILE", default="predictions.txt", help="where to write")
    ranks.add_ranks(parser, 1)


def _run(args: argparse.Namespace) -> int:
    check_folder(args.out, "--out")
    for file in (*args.data, f"{args.folder}/{trained.NOTE}", f"{args.folder}/{RUN}"):
        check_other_file("--out", args.out, file)
    return ranks.start(args, _load, _predict)


def _load(args: argparse.Namespace) -> dict[str, Any]:
    return trained.read(args.folder)


def _predict(run: dict[str, Any], args: argparse.Namespace) -> int:
    files = args.data
    with tempfile.TemporaryDirectory() as folder:
        try:
            if run["buckets"]:
                files = [f"{folder}/{number}.csv" for number in range(len(args.data))]
                for file, copy in zip(args.data, files, strict=True):
                    trained.with_buckets(run, file, Path(copy))
            reader = trained.reader(run, files, BATCH)
        except OSError as error:
            said = f"{error.filename}: {why(error, error.filename)}" if error.filename else error
            raise UsageError(f"--data: {said}") from error
        except (TypeError, ValueError, ImportError) as error:
            raise UsageError(f"--data: {error}") from error
        model = trained.load(args.folder, run)
        with torch.no_grad():
            found = [trained.scores(model, batch).sigmoid() for batch in Prefetcher(reader)]
    probabilities = gather(torch.cat([torch.empty(0), *found]))  # each rank's rows are consecutive
    if len(probabilities) == 0:
        raise UsageError(f"--data {' '.join(args.data)}: no rows")
    if rank() == 0:
        with writing("--out", args.out), replacing(args.out) as part:
            part.write_text("".join(f"{each:.6g}\n" for each in probabilities.tolist()))
        print(f"{args.out}: {len(probabilities):,} probabilities, by {run['model']}")
    return 0
