"""Runs the benchmarks and prints a table."""

import argparse
import sys
import traceback
from pathlib import Path

import torch

from . import (
    bench_bucketize,
    bench_embedding_bag,
    bench_gather_rows,
    bench_hash_table,
    bench_init_rows,
    bench_segment_sum,
    bench_step,
    bench_unique,
    bench_update_rows,
)
from .common import Result, machine, write_json
from .gpu import Comparison, Gpu, write_gpu_json

BENCHMARKS = {
    "hash_table": bench_hash_table.run,
    "unique": bench_unique.run,
    "bucketize": bench_bucketize.run,
    "segment_sum": bench_segment_sum.run,
    "embedding_bag": bench_embedding_bag.run,
    "update_rows": bench_update_rows.run,
    "step": bench_step.run,
}

# The same on a GPU, with the ops that are too small a part of a CPU's step to have one there.
GPU_BENCHMARKS = {
    "hash_table": bench_hash_table.run_gpu,
    "unique": bench_unique.run_gpu,
    "bucketize": bench_bucketize.run_gpu,
    "segment_sum": bench_segment_sum.run_gpu,
    "embedding_bag": bench_embedding_bag.run_gpu,
    "gather_rows": bench_gather_rows.run_gpu,
    "init_rows": bench_init_rows.run_gpu,
    "update_rows": bench_update_rows.run_gpu,
    "step": bench_step.run_gpu,
}


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `python -m benchmarks`; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {list(GPU_BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="toy sizes: does it run at all?")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run what --device cuda runs on the CPU, at toy size: is every line of it sound?",
    )
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda" or options.rehearse
    benchmarks = GPU_BENCHMARKS if on_gpu else BENCHMARKS
    unknown = set(options.names) - set(benchmarks)
    if unknown:
        parser.error(f"unknown benchmark {sorted(unknown)}; there are {list(benchmarks)}")
    names = options.names or list(benchmarks)
    if not on_gpu:
        _run_on_cpu(names, options.quick, options.json)
        return 0
    device = torch.device("cpu" if options.rehearse else "cuda")
    failed = _run_on_gpu(names, Gpu(device, options.quick or options.rehearse), options.json)
    return 1 if failed else 0


def _run_on_cpu(names: list[str], quick: bool, json: Path | None) -> None:
    stamp = machine()
    print(f"{stamp['cpu']}, {stamp['threads']} threads, torch {stamp['torch']}")
    print(f"{'case':<52}{'ms':>9}{'spread':>8}  {'peer':<34}{'ms':>9}{'spread':>8}{'faster':>8}")
    results: list[Result] = []
    for name in names:
        for result in BENCHMARKS[name](quick):
            print(
                f"{result.case:<52}{result.ms:>9.3f}{result.spread:>7.0%}   {result.peer:<34}"
                f"{result.peer_ms:>9.3f}{result.peer_spread:>7.0%}{result.ratio:>7.2f}x",
                flush=True,
            )
            results.append(result)
    if json:
        write_json(json, results)


def _run_on_gpu(names: list[str], gpu: Gpu, json: Path | None) -> list[str]:
    """Names of the benchmarks that failed; the others run all the same."""
    title = gpu.describe()["device"] if gpu.on_gpu else "a rehearsal: no time here means anything"
    print(f"{title}, torch {torch.__version__}")
    print(f"R1, copy: {gpu.copy_roof / 1e9:,.0f} GB/s\n")
    print(
        f"{'case':<76}{'clock':<7}{'ms':>9}{'spread':>8}  {'against':<26}{'ms':>9}{'ratio':>8}"
        f"{'target':>8}"
    )
    results: list[Comparison] = []
    failed: list[str] = []
    for name in names:
        try:
            for result in GPU_BENCHMARKS[name](gpu):
                print(_line(result), flush=True)
                results.append(result)
                if json:  # at once, since this may be cut short
                    write_gpu_json(json, results, gpu.describe(), failed)
        except Exception:
            # A later benchmark has its own inputs, and time on a GPU is scarce.
            traceback.print_exc()
            failed.append(name)
    if json:
        write_gpu_json(json, results, gpu.describe(), failed)
    for table_bytes, roof in gpu.gather_roofs.items():
        print(f"R2, 64-byte lines of {64 * table_bytes / 1e6:,.0f} MB: {roof / 1e6:,.0f} M/s")
    judged = [result for result in results if result.met is not None]
    print(f"{sum(bool(result.met) for result in judged)} of {len(judged)} targets met", end="")
    print(f"; FAILED: {', '.join(failed)}" if failed else "")
    return failed


def _line(result: Comparison) -> str:
    verdict = "" if result.target is None else f"{result.target:>7.2f}x"
    verdict += {None: "", True: "  met", False: "  NOT MET"}[result.met]
    return (
        f"{result.case:<76}{result.clock:<7}{result.ms:>9.3f}{result.spread:>7.0%}   "
        f"{result.against:<26}{result.against_ms:>9.3f}{result.ratio:>7.2f}x{verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
