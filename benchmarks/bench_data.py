"""Compares our reader of Criteo's format with pyarrow.csv and pandas; also times training."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import sparsekit
from sparsekit.data import CriteoReader, Prefetcher, write_criteo_sample

from .bench_dlrm import Dense
from .common import Comparison
from .cpu import Cpu
from .targets import CPU_TARGETS, target_of

# Reads the file in a separate process, which prints its peak resident memory in KiB. The peak from
# getrusage would include the memory of the parent process.
_READ = """
import sys
from sparsekit.data import CriteoReader
for batch in CriteoReader(sys.argv[1], 8192): pass
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def run(cpu: Cpu) -> Iterator[Comparison]:
    """Time reading a file of 5 million rows, and training on a file of 500,000 rows."""
    with tempfile.TemporaryDirectory() as folder:
        rows = cpu.size(5_000_000, 500)
        path = Path(folder) / "day_0"
        write_criteo_sample(path, rows)
        yield from _read(cpu, path, rows)
        rows = cpu.size(500_000, 100)
        write_criteo_sample(path, rows)
        yield from _train(cpu, path, rows)


def _read(cpu: Cpu, path: Path, rows: int) -> Iterator[Comparison]:
    def ours() -> None:
        for _ in CriteoReader(path, cpu.size(8192, 64)):
            pass

    kib = subprocess.check_output([sys.executable, "-c", _READ, path], text=True)
    size = path.stat().st_size
    case = f"Criteo file of {rows:,} rows, {size / 1e6:,.0f} MB, to keys in batches"
    case += f" (process: {int(kib) / 1024:,.0f} MiB)"
    line, against = "Criteo file to keys", "pyarrow.csv into memory"
    samples: list[float] = []
    if cpu.has_module(against, "pyarrow"):
        samples, theirs = cpu.time([[ours], [partial(_arrow, path)]], rounds=3)
        target = target_of(CPU_TARGETS, line, against)
        yield Comparison(case, against, samples, theirs, line, target, size)
    if cpu.has_module("pandas", "pandas"):
        samples = samples or cpu.time([[ours]], rounds=3)[0]
        # Time pandas only once, since it takes most of a minute.
        start = time.perf_counter()
        _pandas(path)
        once = [1e3 * (time.perf_counter() - start)]
        yield Comparison(case, "pandas.read_csv + hash_array", samples, once, line, bytes=size)


def _arrow(path: Path) -> None:
    from pyarrow import csv

    csv.read_csv(
        path,
        read_options=csv.ReadOptions(autogenerate_column_names=True),
        parse_options=csv.ParseOptions(delimiter="\t"),
    )


def _pandas(path: Path) -> None:
    import pandas

    text = dict.fromkeys(range(14, 40), str)
    frame = pandas.read_csv(path, sep="\t", header=None, dtype=text)
    for column in text:
        pandas.util.hash_array(frame[column].to_numpy(object), categorize=True)


def _train(cpu: Cpu, path: Path, rows: int) -> Iterator[Comparison]:
    """Train a small DLRM for an epoch; compare its time waiting for batches with its step time."""
    dim, batch = cpu.size(16, 4), cpu.size(2048, 16)
    torch.manual_seed(0)
    reader = CriteoReader(path, batch, shuffle=True)
    layers = {
        name: sparsekit.DistributedEmbedding("sum", cpu.size(500_000, 500), dim, 1, name=name)
        for name in reader.columns.sparse
    }
    group = sparsekit.EmbeddingGroup(layers, {name: name for name in layers}, "concatenated")
    model = Dense(dim, (cpu.size(512, 8), cpu.size(256, 8)), torch.device("cpu"))
    of_group = sparsekit.optim.LazyAdam(group.parameters(), lr=0.01)
    of_model = torch.optim.SGD(model.parameters(), lr=0.01)
    waits, steps = [], []
    start = time.perf_counter()
    for label, dense, sparse in Prefetcher(reader):
        ready = time.perf_counter()
        vectors = group(sparse).view(len(label), 26, dim)
        logits = model(torch.log1p(dense.clamp(min=0)), vectors)
        F.binary_cross_entropy_with_logits(logits, label).backward()
        for optimizer in (of_group, of_model):
            optimizer.step()
            optimizer.zero_grad()
        end = time.perf_counter()
        waits.append(1e3 * (ready - start))
        steps.append(1e3 * (end - start))
        start = end
    case = f"waiting for batches of {batch:,} of that format, {rows:,} rows, DLRM of 26 x {dim}"
    line, against = "waiting for batches", "the whole step"
    target = target_of(CPU_TARGETS, line, against)
    # Average each fifth of the epoch, since only some batches wait for a block of the file.
    means = [
        [part.mean().item() for part in torch.tensor(times).tensor_split(5)]
        for times in (waits, steps)
    ]
    yield Comparison(case, against, means[0], means[1], line, target)
