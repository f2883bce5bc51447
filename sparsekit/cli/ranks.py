"""Adds options for the number of ranks and threads, and runs commands on several ranks."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import DivergedError
from ..train import JsonLines
from ..train.elastic import store_of_attempt
from ..train.launch import RankError, run_on_ranks, start_rank
from ..train.logs import METRICS, Log
from ..train.progress import Progress
from . import checkpoints
from .common import (
    EXPECTED,
    UsageError,
    check_apart,
    check_folder,
    check_other_file,
    discard_output,
    number,
    rank,
    set_threads,
    writing,
)
from .first_steps import profile_fit

# A function that loads the data; it is called on one rank.
Load = Callable[[argparse.Namespace], Any]
# A function that trains on the data and returns the exit code; it is called on each rank.
Fit = Callable[[Any, argparse.Namespace], int]


def add_ranks(parser: argparse.ArgumentParser, ranks: int | None) -> None:
    """Add the options for the number of processes and for the number of threads in each."""
    parser.add_argument(
        "--ranks",
        type=number(int, 1, 1024),
        default=ranks,
        help="processes that share the tables and the batches; under torchrun there are as many "
        "as it has started" + (" (default: 1 or as needed)" if ranks is None else ""),
    )
    parser.add_argument(
        "--threads",
        type=number(int, 1, 1024),
        help="CPU threads of each rank (default: OMP_NUM_THREADS if that is set, else 1)",
    )


def train(args: argparse.Namespace, load: Load, fit: Fit) -> int:
    """Load the data once and train on ``args.ranks`` ranks; return the exit code.

    `load` and `fit` must be module-level functions, since they are pickled by name.
    """
    check_folder(args.save)
    check_other_file("--save", args.save, data if isinstance(data := args.data, str) else None)
    check_folder(args.log, "--log-to", folder=True)
    if args.log is not None:
        check_apart("--save", args.save, "--log-to", f"{args.log}/{METRICS}")
    if not dist.is_torchelastic_launched() or int(os.environ.get("RANK", 0)) == 0:
        checkpoints.prepare(args)
    return start(args, load, fit)


def start(args: argparse.Namespace, load: Load, fit: Fit) -> int:
    """Load the data once and process it on ``args.ranks`` ranks; return the exit code."""
    if dist.is_torchelastic_launched():  # torchrun has started this process as one of the ranks
        return run_as_rank(args, load, fit)
    data = load(args)
    if args.ranks == 1:
        return _fit(fit, data, args)
    try:
        # Pickle the data first: torch would put tensors into shared memory, which may be too small.
        run_on_ranks(args.ranks, run_as_rank, args, load, fit, pickle.dumps(data))
    except RankError as error:
        if error.kind in {kind.__name__ for kind in EXPECTED}:
            raise UsageError(error.reason) from None
        if error.kind == DivergedError.__name__:
            raise DivergedError(error.reason) from None
        if error.kind == BrokenPipeError.__name__:
            raise BrokenPipeError from None
        raise
    finally:
        # Clear a progress bar that a terminated rank may have left on the screen.
        Progress("", 0, sys.stdout).clear()
    return 0


def logs(args: argparse.Namespace) -> list[Log]:
    """Return the logs for a trainer: only rank 0 has one, in the folder ``--log-to``."""
    if args.log is None or rank() > 0:
        return []
    folder = Path(args.log)
    with writing("--log-to", args.log):
        folder.mkdir(exist_ok=True)
    return [JsonLines(folder / METRICS)]


def run_as_rank(args: argparse.Namespace, load: Load, fit: Fit, data: bytes | None = None) -> int:
    """Connect to the other ranks, load the data unless it is given, and call ``fit``."""
    start_rank()
    _join()
    loaded = _load_once(args, load) if data is None else pickle.loads(data)
    try:
        status = _fit(fit, loaded, args)
    except BrokenPipeError:
        discard_output()
        raise
    # Wait for all ranks: one that exits early would break connections that others still use.
    dist.barrier()
    # This is not reached after an error: the launcher must see the error before other ranks
    # lose their connections.
    dist.destroy_process_group()
    return status


def _fit(fit: Fit, data: Any, args: argparse.Namespace) -> int:
    """Call ``fit``; for `sparsekit profile`, profile only its first steps."""
    set_threads(args.threads)
    return profile_fit(fit, data, args) if hasattr(args, "trace") else fit(data, args)


def _join() -> None:
    store = store_of_attempt()
    if store is None:
        dist.init_process_group("gloo")
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _load_once(args: argparse.Namespace, load: Load) -> Any:
    """Load the data on rank 0, which may download it, and send it to the other ranks."""
    loaded: list[Any] = [False, None]  # a flag for success, and the data
    error: Exception | None = None
    if rank() == 0:
        try:
            loaded = [True, load(args)]
        except Exception as raised:
            error = raised
    dist.broadcast_object_list(loaded)
    if not loaded[0]:
        raise error or SystemExit(2)  # rank 0 reports the error
    return loaded[1]
