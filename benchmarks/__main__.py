"""Command line for the benchmarks: runs them, compares runs, and makes tables and plots."""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsekit._arguments import Parser

from . import (
    bench_bucketize,
    bench_data,
    bench_dlrm,
    bench_embedding_bag,
    bench_gather_rows,
    bench_group,
    bench_hash_table,
    bench_init_rows,
    bench_overhead,
    bench_rank_tables,
    bench_ranks,
    bench_segment_sum,
    bench_step,
    bench_unique,
    bench_update_rows,
    bench_xxh64,
    curves,
    plots,
    report,
)
from .common import HEADER, Comparison
from .cpu import Cpu
from .gpu import Gpu

Benchmarks = dict[str, Callable[[Any], Iterator[Comparison]]]

# Each suite's benchmarks, keyed by their names on the command line.
SUITES: dict[str, Benchmarks] = {
    "cpu": {
        "hash_table": bench_hash_table.run,
        "unique": bench_unique.run,
        "bucketize": bench_bucketize.run,
        "segment_sum": bench_segment_sum.run,
        "embedding_bag": bench_embedding_bag.run,
        "update_rows": bench_update_rows.run,
        "step": bench_step.run,
        "group": bench_group.run,
        "xxh64": bench_xxh64.run,
        "data": bench_data.run,
        "overhead": bench_overhead.run,
    },
    "dist": {"ranks": bench_ranks.run, "rank_tables": bench_rank_tables.run},
    "curves": {
        "hash_table": curves.hash_table,
        "load": curves.load,
        "evict": curves.evict,
        "unique": curves.unique,
        "segment_sum": curves.segment_sum,
        "embedding_bag": curves.embedding_bag,
    },
    "gpu": {
        "hash_table": bench_hash_table.run_gpu,
        "unique": bench_unique.run_gpu,
        "bucketize": bench_bucketize.run_gpu,
        "segment_sum": bench_segment_sum.run_gpu,
        "embedding_bag": bench_embedding_bag.run_gpu,
        "gather_rows": bench_gather_rows.run_gpu,
        "init_rows": bench_init_rows.run_gpu,
        "update_rows": bench_update_rows.run_gpu,
        "step": bench_step.run_gpu,
        "dlrm": bench_dlrm.run_gpu,
    },
}


def main(arguments: Sequence[str] | None = None, prog: str = "python -m benchmarks") -> int:
    """Run `python -m benchmarks`, and return the exit status.

    Returns:
        0 for success; 1 if a benchmark failed, or `compare` found a slowdown; 2 if a file cannot be
        read.
    """
    options = _parser(prog).parse_args(arguments)
    try:
        return options.run(options)
    except report.ReportError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a suite and print what it finds")
    run.set_defaults(run=lambda options: _run(run, options))
    run.add_argument("names", nargs="*", metavar="NAME", help="benchmarks of the suite; else all")
    run.add_argument("--suite", choices=list(SUITES), default="cpu")
    run.add_argument("--quick", action="store_true", help="toy sizes: does it run at all?")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    run.add_argument("--threads", type=_positive, metavar="N", help="default: 2, or all if fewer")
    run.add_argument(
        "--rehearse",
        action="store_true",
        help="run what suite gpu runs on the CPU, at toy size: is every line of it sound?",
    )

    compare = commands.add_parser("compare", help="what has got slower between two runs")
    compare.set_defaults(run=_compare)
    compare.add_argument("before", type=Path, metavar="A.json")
    compare.add_argument("after", type=Path, metavar="B.json")
    compare.add_argument("--threshold", type=float, default=0.15, help="least change that counts")

    table = commands.add_parser("table", help="a table of the targets, of one or several runs")
    table.set_defaults(run=_table)
    table.add_argument("files", nargs="*", type=Path, metavar="FILE", help="none: an empty table")
    table.add_argument(
        "--into",
        type=Path,
        metavar="DOC.md",
        help=f"write it between {report.BEGIN} and {report.END} of this file",
    )

    keep = commands.add_parser(
        "keep",
        help="copy results without their samples, a line for each case",
        description="Copy results without their samples, a line for each case, as "
        "benchmarks/results has them: enough for `table` and `plot`, not for `compare`.",
    )
    keep.set_defaults(run=_keep)
    keep.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of `run --json`")
    keep.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for files of the same names"
    )

    plot = commands.add_parser("plot", help="PNG plots of the suite curves")
    plot.set_defaults(run=lambda options: _plot(plot, options))
    plot.add_argument("files", nargs="+", type=Path, metavar="FILE")
    plot.add_argument("--out", type=Path, default=Path(), metavar="DIR")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    suite = "gpu" if options.rehearse else options.suite
    benchmarks = SUITES[suite]
    unknown = sorted(set(options.names) - set(benchmarks))
    if unknown:
        parser.error(f"suite {suite} has no benchmark {unknown}; it has {list(benchmarks)}")
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")
    if suite == "gpu" and not options.rehearse and not torch.cuda.is_available():
        parser.error("suite gpu: torch finds no GPU; --rehearse runs it on the CPU")
    chosen = {name: benchmarks[name] for name in options.names or benchmarks}
    threads = torch.get_num_threads()  # restored below, since a suite sets its own thread count
    device: Cpu | Gpu
    if suite == "gpu":
        where = torch.device("cpu" if options.rehearse else "cuda")
        if options.rehearse:
            torch.set_num_threads(1)  # several threads would mostly wait for one another
        device = Gpu(where, options.quick or options.rehearse)
    else:
        # Plots have many points, so use fewer rounds for each.
        device = Cpu(options.quick, options.threads, brief=suite == "curves")
    try:
        return 1 if _run_all(suite, chosen, device, options.json) else 0
    finally:
        torch.set_num_threads(threads)


def _run_all(suite: str, benchmarks: Benchmarks, device: Cpu | Gpu, path: Path | None) -> list[str]:
    """Run all benchmarks, even after failures, and return the names of those that failed."""
    print(report.title(suite, device.describe(), device.quick))
    print(HEADER)
    rows: list[report.Row] = []
    failed: list[str] = []

    def write() -> None:
        run = {
            "suite": suite,
            "quick": device.quick,
            "machine": device.describe(),
            "failed": failed,
            "skipped": device.skipped,
            "results": rows,
        }
        if path:
            path.write_text(json.dumps(run, indent=1) + "\n")

    for name, benchmark in benchmarks.items():
        torch.manual_seed(0)
        try:
            for result in benchmark(device):
                print(result.text(), flush=True)
                rows.append({"benchmark": name, **result.row()})
                write()  # write each result now, since the run may be killed
        except Exception:
            # Continue, since the other benchmarks do not depend on this one and GPU time is scarce.
            traceback.print_exc()
            failed.append(name)
    write()
    print(f"\n{device.roofs()}\n\n{report.verdicts(rows)}")
    print(f"FAILED: {', '.join(failed)}" if failed else "all ran")
    return failed


def _compare(options: argparse.Namespace) -> int:
    before, after = report.read(options.before), report.read(options.after)
    lines, slower = report.compare(before, after, options.threshold)
    print("\n".join(lines))
    return 1 if slower else 0


def _table(options: argparse.Namespace) -> int:
    text = report.table([report.read(file) for file in options.files])
    if options.into:
        report.write_into(options.into, text)
    else:
        print(text)
    return 0


def _keep(options: argparse.Namespace) -> int:
    for file in options.files:
        (options.out / file.name).write_text(report.brief(report.read(file)))
    return 0


def _plot(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if plots.missing():
        parser.error(f"plots: {plots.missing()}")
    for path in plots.plot([report.read(file) for file in options.files], options.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
