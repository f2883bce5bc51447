"""``sparsekit scaling``: measures how training speeds up with more ranks on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from .._arguments import Parser
from ..train.launch import run_on_ranks, start_rank
from ..train.plots import plot_scaling
from ..train.scaling import Case, predicted, samples_per_second
from .common import check_apart, check_folder, count, rank, writing

WORLDS = (8, 64, 512)  # numbers of ranks to predict the speed-up for


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit scaling`` to the parser."""
    scaling = commands.add_parser(
        "scaling",
        help="measure how training speeds up with ranks",
        description="Train a DLRM on generated keys on 1, 2, … ranks of this machine with the same "
        "batch, and print samples a second, speed-up and efficiency, and a prediction for more "
        "ranks.",
    )
    scaling.set_defaults(run=_scaling)
    scaling.add_argument("--ranks", type=_numbers, default="1,2", metavar="N,N", help="worlds")
    scaling.add_argument("--threads", type=count, default=1, help="CPU threads of each rank")
    for option in dataclasses.fields(Case):
        scaling.add_argument(
            f"--{option.name}", type=count, default=option.default, help=HELP[option.name]
        )
    for name in ("json", "plot"):
        scaling.add_argument(
            f"--{name}",
            metavar="FILE",
            help="where to write the figures as " + ("JSON" if name == "json" else "PNG"),
        )


HELP = {
    "tables": "how many",
    "rows": "distinct keys of each table",
    "dim": "elements of a vector",
    "batch": "samples in a step, of all ranks together",
    "epochs": "of 8 steps, timed; their median counts",
}


def _numbers(text: str) -> tuple[int, ...]:
    worlds = tuple(sorted({int(each) for each in text.split(",")}))
    if not worlds or worlds[0] != 1 or worlds[-1] > 1024:
        raise argparse.ArgumentTypeError(f"{text} must begin with 1 and end at most with 1024")
    return worlds


_numbers.__name__ = "numbers"  # argparse shows this name: "invalid numbers value"


def _scaling(args: argparse.Namespace) -> int:
    check_folder(args.json, "--json")
    check_folder(args.plot, "--plot")
    check_apart("--plot", args.plot, "--json", args.json)
    case = Case(**{option.name: getattr(args, option.name) for option in dataclasses.fields(Case)})
    cores = len(os.sched_getaffinity(0))
    print(
        f"{case.tables} tables of {case.rows:,} keys, dim {case.dim}, batch {case.batch:,} over "
        f"all ranks, {args.threads} thread(s) each, on {cores} cores\n"
    )
    print(f"{'ranks':>6}{'samples/s':>12}{'speed-up':>10}{'efficiency':>12}")
    measured: dict[int, float] = {}
    for ranks in args.ranks:
        measured[ranks] = rate = _measure(ranks, case, args.threads)
        speed_up = rate / measured[1]
        shared = "  (more than cores)" if ranks * args.threads > cores else ""
        print(f"{ranks:6}{rate:12,.0f}{speed_up:9.2f}x{speed_up / ranks:12.0%}{shared}", flush=True)
    forecast = _forecast({n: rate for n, rate in measured.items() if n * args.threads <= cores})
    figures = {
        "case": dataclasses.asdict(case),
        "threads": args.threads,
        "cores": cores,
        "samples_per_second": measured,
        "predicted_speed_up": forecast,
    }
    if args.json is not None:
        with writing("--json", args.json):
            Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    if args.plot is not None:
        with writing("--plot", args.plot):
            plot_scaling(measured, forecast, args.plot)
    return 0


def _forecast(measured: dict[int, float]) -> dict[int, tuple[float, float]]:
    """Print and return the lowest and highest predicted speed-up, by number of ranks.

    The predictions use only runs where each thread had its own core.
    """
    largest = max(measured, default=1)
    if largest == 1:
        print("\nno prediction: no two of these worlds had a core for each thread")
        return {}
    if measured[largest] >= largest * measured[1]:
        print(f"\nno prediction: {largest} ranks lost no time that could be extrapolated")
        return {}
    forecast = {ranks: predicted(measured, ranks) for ranks in WORLDS}
    print(f"\nPredicted from 1 and {largest} ranks, not measured:")
    for ranks, (worst, best) in forecast.items():
        print(f"{ranks:6}{'':12}{worst:9.2f}x to {best:.2f}x")
    print(
        "Assumed: a step of M ranks takes that of one rank divided by M, plus what it took\n"
        f"longer than that on {largest} ranks: at worst as long on any number, as if all of it\n"
        "were waiting; at best falling as the bytes that a rank sends. Links are as fast as\n"
        "here, cores share no memory bandwidth, and the batch is the same."
    )
    return forecast


def _measure(ranks: int, case: Case, threads: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples_per_second"
        run_on_ranks(ranks, _run_as_rank, case, threads, str(file))
        return float(file.read_text())


def _run_as_rank(case: Case, threads: int, file: str) -> None:
    start_rank()
    torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    rate = samples_per_second(case)
    if rank() == 0:
        Path(file).write_text(repr(rate))
    dist.barrier()
    dist.destroy_process_group()
