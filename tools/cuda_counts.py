"""Counts a GPU's work in a training step: `python -m tools.cuda_counts [--write]`.

Launches, memsets, waits, atomics and bytes of each op are counted while the kernels run on the CPU
(tests/simt_counts.py). --write writes the tables into docs/gpu-status.md. A test compares the
launches and waits in that document with new counts.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import sparsekit
from sparsekit.optim import LazyAdam, fuse_in_backward

ROOT = Path(__file__).resolve().parents[1]
STATUS = ROOT / "docs" / "gpu-status.md"
BEGIN, END = "<!-- begin: make cuda-counts -->\n", "<!-- end: make cuda-counts -->\n"
sys.path.insert(0, str(ROOT / "tests"))

from deferred_errors import deferred_errors  # noqa: E402
from simt_counts import Count, Counts, counted  # noqa: E402

TABLES, MANY_TABLES = 26, 500
# EXACT columns are the same in every run. BY_CHANCE columns depend on the seeds of hash tables and
# on the interleaving of threads.
EXACT = ("calls", "kernels", "memsets", "scans, sorts", "torch", "waits", "copies in")
BY_CHANCE = ("atomics", "KB accessed", "KB moved")


class Step:
    """A training step to count, with LazyAdam and constant gradients for the outputs.

    Args:
        tables: 1 for a single layer, more for an EmbeddingGroup.
        fused: True if backward updates the rows.
        batch: number of bags per table.
        nnz: number of keys per bag.
        dim: number of elements in a vector.
        keys: number of distinct keys, and of rows unless `rows` is given.
        rows: number of rows of each table.
        options: options of the tables.
    """

    def __init__(
        self,
        tables: int,
        fused: bool,
        batch: int = 128,
        nnz: int = 4,
        dim: int = 128,
        keys: int = 1000,
        rows: int | None = None,
        **options: Any,
    ) -> None:
        layers = {
            f"table{i}": sparsekit.DistributedEmbedding(
                "sum", rows or keys, dim, 1, nnz, name=f"table{i}", seed=i, **options
            )
            for i in range(tables)
        }
        self.module: torch.nn.Module
        self.module = sparsekit.EmbeddingGroup(layers) if tables > 1 else layers["table0"]
        self.optimizer = LazyAdam(self.module.parameters(), lr=0.01)
        if fused:
            fuse_in_backward(self.optimizer, self.module)
        random = torch.Generator().manual_seed(0)
        self.batches = [
            {name: torch.randint(keys, (batch, 1, nnz), generator=random) for name in layers}
            for _ in range(2)
        ]
        self._grads = [torch.ones(batch, 1, dim) for _ in layers]

    def __call__(self, keys: dict[str, torch.Tensor]) -> None:
        """Run forward, backward and update."""
        if isinstance(self.module, sparsekit.EmbeddingGroup):
            outputs = list(self.module(keys).values())
        else:
            outputs = [self.module(*keys.values())]
        torch.autograd.backward(outputs, self._grads)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def count(self) -> Counts:
        """Return the counts of the second step, when states already exist and some keys are new."""
        waits: list[int] = []
        with deferred_errors(on_wait=lambda: waits.append(1)):
            with counted():
                self(self.batches[0])
            waits.clear()
            with counted() as counts:
                self(self.batches[1])
        if waits:
            counts.add("reports", "", Count(waits=len(waits)))
        return counts


def cases() -> Iterator[tuple[str, Callable[[], Counts]]]:
    """Yield the title of each table, and a function that returns its counts."""
    yield "One layer", Step(1, fused=False).count
    yield f"EmbeddingGroup of {TABLES}", Step(TABLES, fused=False).count
    yield f"EmbeddingGroup of {TABLES}, updates in backward", Step(TABLES, fused=True).count
    many = Step(MANY_TABLES, fused=True, batch=8, dim=16)
    yield f"EmbeddingGroup of {MANY_TABLES}, updates in backward, 8 bags of dim 16", many.count


def row(name: str, count: Count) -> str:
    """Format an op's counts as a table row."""
    cells: list[object] = [count.calls, count.kernels, count.memsets, count.library]
    cells += [count.torch, count.waits, count.copies_in, rounded(count.atomics)]
    cells += [rounded(count.accessed / 1000), rounded(count.moved / 1000)]
    return f"| {name} | {' | '.join(str(cell or '') for cell in cells)} |"


def rounded(number: float) -> str:
    """Format a number with two significant digits, as further digits vary by run; 0 becomes ""."""
    if number == 0:
        return ""
    return f"{float(f'{number:.2g}'):.10g}" if number < 100 else str(int(float(f"{number:.2g}")))


def table(counts: Counts, kernels: bool) -> str:
    """Format a table of our ops (if wanted, with their kernels), torch's ops, and the total."""
    columns = ("op", *EXACT, *BY_CHANCE)
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    of_torch, torch_calls = Count(), {}
    for op in counts.ops():
        if "::" in op or "." in op:
            of_torch += counts.sum(op)
            torch_calls[op.split("::")[-1].split(".")[-1]] = counts.sum(op).calls
            continue
        lines.append(row(f"`{op}`", counts.sum(op)))
        if kernels:
            lines += [row(f"- {name}", counts.sum(op, name)) for name in counts.names(op)]
    lines.append(row("torch", of_torch))
    lines.append(row("**all**", counts.sum()))
    named = ", ".join(f"{name} {calls}" for name, calls in torch_calls.items())
    return "\n".join(lines) + f"\n\ntorch: {named}"


def tables() -> str:
    """Count all cases, and format their tables in Markdown."""
    parts = []
    for i, (title, count) in enumerate(cases()):
        counts = count()
        total = counts.sum()
        parts.append(
            f"**{title}**: {total.launches} launches, {total.waits} waits; {total.operations} "
            f"operations of the device with those of CUB.\n\n{table(counts, kernels=i == 0)}\n"
        )
    return "\n".join(parts)


def in_status(text: str) -> str:
    """Return the text between the two markers in docs/gpu-status.md."""
    return text.split(BEGIN)[1].split(END)[0].strip("\n") + "\n"


def exact(text: str) -> str:
    """Remove the BY_CHANCE columns from tables."""
    lines = text.splitlines()
    return "\n".join(
        line.rsplit("|", len(BY_CHANCE) + 1)[0] if line.startswith("|") else line for line in lines
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; --write also writes them to docs/gpu-status.md."""
    parser = argparse.ArgumentParser(prog="python -m tools.cuda_counts", description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/gpu-status.md")
    options = parser.parse_args(arguments)
    text = tables()
    print(text, end="")
    if options.write:
        before, rest = STATUS.read_text().split(BEGIN)
        STATUS.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
