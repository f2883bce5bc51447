"""Measures the time and the peak memory of save, load and reshard for a large table.

python benchmarks/systems/checkpoint.py [--gib 4] [--folder FOLDER]

Exits with 1 if a requirement is not met. save must be at least 0.7 times as fast as cp and sync on
the same bytes, and faster than torch.save. save, load and reshard may use at most 256 MiB of memory
in addition to the table. async_save may delay training by at most a tenth of the time that save
takes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import sparsekit
from sparsekit import checkpoint

DIM = 64
GOLDEN = -7046029254386353131  # keys are multiples of this number, so that they spread over 64 bits
MOST_EXTRA_MIB = 256
LEAST_OF_CP = 0.7
MOST_HELD_UP = 0.1


def main() -> int:
    """Print the results; return 1 if a requirement is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="of vectors and states")
    parser.add_argument("--folder", help="where to write (default: a temporary one)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        return _run(Path(folder), args)


def _run(folder: Path, args: argparse.Namespace) -> int:
    rows = int(args.gib * (1 << 30) / (3 * 4 * DIM))
    layer, optimizer = _layer(rows)
    _fill(layer, optimizer, rows)
    saves, copies, pickles = [], [], []
    extra_of_save = 0
    for _ in range(args.repeats):
        shutil.rmtree(folder / "saved", ignore_errors=True)
        seconds, extra = _measured(lambda: checkpoint.save(layer, folder / "saved", optimizer))
        saves.append(seconds)
        extra_of_save = max(extra_of_save, extra)
        copies.append(_timed(lambda: _copy(folder / "saved", folder / "copied")))
        pickles.append(_timed(lambda: _torch_save(layer, optimizer, folder / "pickled")))
        shutil.rmtree(folder / "copied")
        (folder / "pickled").unlink()
    size = sum(file.stat().st_size for file in (folder / "saved").iterdir())
    save, copy, pickle = map(statistics.median, (saves, copies, pickles))
    first, *others = _held_up(layer, optimizer, folder, 1 + args.repeats)
    held_up = statistics.median(others)
    print(f"{rows:,} rows of dim {DIM} with LazyAdam: {size / (1 << 30):.2f} GiB")
    print(f"save         {save:6.2f} s, {extra_of_save} MiB beside the table")
    print(f"cp and sync  {copy:6.2f} s: save has {copy / save:.2f} times its speed")
    print(f"torch.save   {pickle:6.2f} s: save has {pickle / save:.2f} times its speed")
    print(f"async_save   {held_up:6.2f} s of training lost, {held_up / save:.1%} of a save; "
          f"{first:.2f} s the first time, for its memory is new")  # fmt: skip
    # The table's memory is already resident, so this measures only the extra memory of load.
    seconds, extra_of_load = _measured(lambda: checkpoint.load(layer, folder / "saved", optimizer))
    print(f"load         {seconds:6.2f} s, {extra_of_load} MiB beside the table")
    begin = time.perf_counter()
    extra_of_reshard = _reshard(folder)
    seconds = time.perf_counter() - begin
    print(f"reshard to 3 {seconds:6.2f} s, {extra_of_reshard} MiB beside an idle process")
    held = {
        f"save >= {LEAST_OF_CP} of cp": copy / save >= LEAST_OF_CP,
        "save faster than torch.save": pickle > save,
        f"async_save holds up <= {MOST_HELD_UP:.0%}": held_up <= MOST_HELD_UP * save,
        f"<= {MOST_EXTRA_MIB} MiB": max(extra_of_save, extra_of_load, extra_of_reshard)
        <= MOST_EXTRA_MIB,
    }
    for line, holds in held.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {line}")
    return 0 if all(held.values()) else 1


def _layer(rows: int) -> tuple[sparsekit.DistributedEmbedding, sparsekit.optim.LazyAdam]:
    layer = sparsekit.DistributedEmbedding("sum", rows, DIM, 1, name="large")
    return layer, sparsekit.optim.LazyAdam(layer.parameters(), lr=0.01)


def _fill(
    layer: sparsekit.DistributedEmbedding, optimizer: torch.optim.Optimizer, rows: int
) -> None:
    """Fill all rows of the layer with keys, random vectors and random optimizer states."""
    generator = torch.Generator().manual_seed(0)
    for begin in range(0, rows, 1 << 18):
        keys = torch.arange(begin, min(begin + (1 << 18), rows)) * GOLDEN
        layer.assign(keys, torch.rand(len(keys), DIM, generator=generator))
    _train(layer, optimizer, 1)
    for name in ("exp_avg", "exp_avg_sq"):
        for part in optimizer.state[layer.weight][name].split(1 << 18):
            part.uniform_(generator=generator)


def _train(
    layer: sparsekit.DistributedEmbedding, optimizer: torch.optim.Optimizer, steps: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        keys = torch.randint(layer.capacity, (4096, 1, 1), generator=generator) * GOLDEN
        optimizer.zero_grad()
        layer(keys).square().sum().backward()
        optimizer.step()


def _held_up(
    layer: sparsekit.DistributedEmbedding,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    saves: int,
) -> list[float]:
    """Return how many seconds each async_save delays training, during the call and later."""
    lost = []
    keep = checkpoint.Checkpoints(folder / "async", keep=1)
    for step in range(saves):
        alone = _timed(lambda: _train(layer, optimizer, 50))
        begin = time.perf_counter()
        keep.async_save(step, layer, optimizer)
        _train(layer, optimizer, 50)
        lost.append(time.perf_counter() - begin - alone)
        keep.wait()
    keep.close()
    shutil.rmtree(folder / "async")
    return lost


def _timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _measured(function: Callable[[], object]) -> tuple[float, int]:
    """Return a call's duration in seconds, and how far memory rose at its peak, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _memory("VmRSS")
    seconds = _timed(function)
    return seconds, (_memory("VmHWM") - before) // 1024


def _memory(name: str) -> int:
    """Return an entry of /proc/self/status, such as VmRSS, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise LookupError(name)


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in target.iterdir():
        subprocess.run(["sync", file], check=True)


def _torch_save(layer: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    with open(path, "wb") as file:
        torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


# The child prints its own peak memory last. The peak from wait4 would include the parent's memory.
_COMMAND = """
import sys
from sparsekit.cli import main
status = main(["checkpoint", *sys.argv[1:]])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(status)
"""


def _reshard(folder: Path) -> int:
    """Return the peak memory in MiB of `checkpoint reshard`, minus that of `checkpoint inspect`."""
    idle = _peak("inspect", str(folder / "saved"))
    return _peak("reshard", str(folder / "saved"), str(folder / "three"), "--world", "3") - idle


def _peak(*command: str) -> int:
    text = subprocess.check_output(
        [sys.executable, "-c", _COMMAND, *command], text=True, stderr=subprocess.DEVNULL
    )
    return int(text.split()[-1]) // 1024


if __name__ == "__main__":
    sys.exit(main())
