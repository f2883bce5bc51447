"""Compares a table in a file, three times the size of its memory budget, with one in memory.

    python -m benchmarks.systems.beyond_memory [--rows 1000000] [--dim 64] [--batch 4096]
        [--optimizer LazyAdam] [--folder FOLDER]

The file is created in FOLDER, which should be on a disk. If run as root with control groups, the
process that uses the file is limited to 1.5 times the budget, plus 32 bytes per row, plus what it
needs without a table. The check also shows that a table in memory exceeds this limit. Batches take
90% or 99% of their keys from a twentieth of the rows, scattered over the file, and the rest from
all rows. Halfway through, the table in the file is saved, and a new process continues. Exits with 1
if the final bits of the two tables differ.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sparsekit
from sparsekit import checkpoint

SHARES = 0.9, 0.99  # fraction of a batch's keys that come from hot rows
STEPS = 200  # for each fraction; only the second half is measured
NEW_KEYS = 20_000  # in each step that fills the table
LINE = "{:<12}{:>10}{:>12}{:>14}{:>14}{:>14}"


class ControlGroup:
    """Limits the memory of a process, including file pages; cgroup v1 or v2."""

    def __init__(self, limit: int) -> None:
        root = Path("/sys/fs/cgroup")
        old = (root / "memory").is_dir()
        self.folder = (root / "memory" if old else root) / f"sparsekit-{time.time_ns()}"
        self.folder.mkdir()
        (self.folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
        self._peak = self.folder / ("memory.max_usage_in_bytes" if old else "memory.peak")

    def peak(self) -> int:
        """Return the peak memory in bytes."""
        return int(self._peak.read_text())

    def close(self) -> None:
        """Remove the group; its processes must have ended."""
        self.folder.rmdir()


def batch_of(step: int, share: float, rows: int, size: int) -> torch.Tensor:
    """Return the keys of a batch; hot keys are divisible by 20."""
    draw = np.random.default_rng([step, round(1000 * share)])
    hot = draw.integers(0, rows // 20, size) * 20
    keys = np.where(draw.random(size) < share, hot, draw.integers(0, rows, size))
    return torch.from_numpy(keys * 7919)


def present(layer: Any, keys: torch.Tensor) -> float:
    """Return the fraction of the distinct keys whose rows are in memory."""
    begins = layer.table.find(keys.unique()).numpy() * layer.files.record_bytes
    first, last = begins // 4096, (begins + layer.files.record_bytes - 1) // 4096
    known = layer.files._known
    return float(((known[first] > 0) & (known[last] > 0)).mean())


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Train for part of the run; return times, hit rates, memory and a digest of the table."""
    rows, dim, size = (settings[name] for name in ("rows", "dim", "batch"))
    storage = settings["storage"]
    layer = sparsekit.Embedding(rows, dim, name="table", **storage)
    optimizer = getattr(sparsekit.optim, settings["optimizer"])(layer.parameters())

    def step(keys: torch.Tensor) -> None:
        layer(keys).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    if settings["from"] is None:
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)) * 7919
        for keys in order.split(NEW_KEYS):
            step(keys)
    else:
        checkpoint.load(layer, settings["from"], optimizer)
    times: dict[str, list[float]] = {}
    hits: dict[str, list[float]] = {}
    for share in settings["shares"]:
        for i in range(STEPS):
            keys = batch_of(i, share, rows, size)
            if storage:
                hits.setdefault(str(share), []).append(present(layer, keys))
            start = time.perf_counter()
            step(keys)
            times.setdefault(str(share), []).append(1000 * (time.perf_counter() - start))
    files = layer.files
    resident = 0 if files is None else files.resident_bytes()
    if settings["to"] is not None:
        checkpoint.save(layer, settings["to"], optimizer)
    digest = hashlib.sha256()
    columns = [layer.weight, *(x for x in optimizer.state[layer.weight].values() if x.dim())]
    for column in columns:
        for part in column.detach()[:rows].split(1 << 16):
            digest.update(part.contiguous().numpy())
    return {
        "times": {share: statistics.median(each[STEPS // 2 :]) for share, each in times.items()},
        "hits": {share: statistics.mean(each[STEPS // 2 :]) for share, each in hits.items()},
        "resident": resident,
        "bits": digest.hexdigest(),
    }


def run(settings: dict[str, Any], group: ControlGroup | None = None) -> dict[str, Any] | None:
    """Run `train` in its own process; return None if the system killed it."""
    code = "import json, sys; from benchmarks.systems.beyond_memory import train; "
    code += "print(json.dumps(train(json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, json.dumps(settings)]
    if group is not None:
        enter = f'echo $$ > {group.folder}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", enter, "sh", *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == -9:
        return None
    done.check_returncode()
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--optimizer", default="LazyAdam")
    parser.add_argument("--folder", help="where to make files; default: that of tempfile")
    args = parser.parse_args()
    size = {"rows": args.rows, "dim": args.dim, "batch": args.batch}
    common = {**size, "optimizer": args.optimizer, "from": None, "to": None}
    tiny = {**common, "rows": 20_000, "shares": [], "storage": {}}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        layer: Any = sparsekit.Embedding(1, args.dim, storage=f"mmap:{folder}")
        getattr(sparsekit.optim, args.optimizer)(layer.parameters())
        table = args.rows * layer.files.record_bytes
        budget = table // 3
        groups = []
        try:
            probe = ControlGroup(1 << 40)
            run(tiny, probe)
            limit = probe.peak() + 32 * args.rows + budget + budget // 2
            probe.close()
            groups = [ControlGroup(limit) for _ in range(3)]
            print(f"table {table:,} bytes, budget {budget:,}, limit of the process {limit:,}")
        except OSError as error:
            print(f"table {table:,} bytes, budget {budget:,}; the process has no limit: {error}")
        in_file = {"storage": {"storage": f"mmap:{folder}", "max_resident_bytes": budget}}
        saved = f"{folder}/saved"
        within = [*groups, None, None, None]
        memory = run({**common, "storage": {}, "shares": SHARES})
        first = run({**common, **in_file, "shares": SHARES[:1], "to": saved}, within[0])
        second = run({**common, **in_file, "shares": SHARES[1:], "from": saved}, within[1])
        if memory is None or first is None or second is None:
            print("the system has killed a process")
            return 1
        print(LINE.format("", "hit rate", "step, ms", "in memory, ms", "resident, MB", "peak, MB"))
        for share, part, group in zip(map(str, SHARES), (first, second), within, strict=False):
            peak = "" if group is None else f"{group.peak() / 1e6:.0f}"
            cells = f"{part['hits'][share]:.3f}", f"{part['times'][share]:.1f}"
            more = f"{memory['times'][share]:.1f}", f"{part['resident'] / 1e6:.0f}", peak
            print(LINE.format(f"{share} hot", *cells, *more))
        if groups:
            killed = run({**common, "storage": {}, "shares": []}, groups[2]) is None
            print(f"a table in memory under that limit: {'killed' if killed else 'FITS'}")
            for group in groups:
                group.close()
    same = memory["bits"] == second["bits"]
    print(f"bits {'are the same' if same else 'DIFFER'}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
