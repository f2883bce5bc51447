"""Runs the benchmarks and prints a table."""

import argparse
from pathlib import Path

from . import (
    bench_bucketize,
    bench_embedding_bag,
    bench_hash_table,
    bench_lazy_adam,
    bench_segment_sum,
    bench_step,
    bench_unique,
)
from .common import Result, machine, write_json

BENCHMARKS = {
    "hash_table": bench_hash_table.run,
    "unique": bench_unique.run,
    "bucketize": bench_bucketize.run,
    "segment_sum": bench_segment_sum.run,
    "embedding_bag": bench_embedding_bag.run,
    "lazy_adam": bench_lazy_adam.run,
    "step": bench_step.run,
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `python -m benchmarks`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {list(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="toy sizes: does it run at all?")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown benchmark {sorted(unknown)}; there are {list(BENCHMARKS)}")

    stamp = machine()
    print(f"{stamp['cpu']}, {stamp['threads']} threads, torch {stamp['torch']}")
    print(f"{'case':<52}{'ms':>9}{'spread':>8}  {'peer':<34}{'ms':>9}{'spread':>8}{'faster':>8}")
    results: list[Result] = []
    for name in options.names or BENCHMARKS:
        for result in BENCHMARKS[name](options.quick):
            print(
                f"{result.case:<52}{result.ms:>9.3f}{result.spread:>7.0%}   {result.peer:<34}"
                f"{result.peer_ms:>9.3f}{result.peer_spread:>7.0%}{result.ratio:>7.2f}x",
                flush=True,
            )
            results.append(result)
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
