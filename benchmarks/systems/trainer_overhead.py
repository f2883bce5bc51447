"""Checks that a step of `Trainer` takes at most 1.05 times as long as a handwritten one.

python -m benchmarks.systems.trainer_overhead
"""

import io
import statistics
import sys
import time

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsekit
from sparsekit.data import Batch, KeyedJaggedTensor
from sparsekit.models import DLRM
from sparsekit.train import Trainer

TABLES, STEPS, REPEATS, MOST = 26, 100, 7, 1.05


def batches(rows: int) -> list[Batch]:
    """Generate batches of `rows` rows; all calls return the same batches."""
    generator = torch.Generator().manual_seed(0)
    names = [f"C{i}" for i in range(TABLES)]
    made = []
    for _ in range(STEPS):
        keys = (50_000 ** torch.rand(TABLES * rows, generator=generator)).long()
        bags = KeyedJaggedTensor(names, keys, torch.arange(len(keys) + 1))
        label = torch.randint(2, (rows,), generator=generator).float()
        made.append(Batch(label, torch.rand(rows, 13, generator=generator), bags))
    return made


def losses(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
    """Return each sample's loss, and 0 as the penalty."""
    assert batch.label is not None
    scores = model(batch.dense, batch.sparse)
    return binary_cross_entropy_with_logits(scores, batch.label, reduction="none"), 0.0


def model_and_optimizers() -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    """Return a DLRM and its optimizers; a small dense part makes the trainer's overhead visible."""
    names = [f"C{i}" for i in range(TABLES)]
    model = DLRM(names, 13, rows=60_000, bottom=[64], top=[64], cross_layers=1, cross_rank=16)
    sparse, dense = sparsekit.split_embedding_variable_from_others(model)
    return model, [
        sparsekit.optim.LazyAdam(sparse, lr=0.01),
        torch.optim.Adam(dense, lr=0.001),
    ]


def measure(rows: int) -> float:
    """Time the trainer and the loop alternately; print and return the ratio of their times."""
    data = batches(rows)
    model, optimizers = model_and_optimizers()
    trainer = Trainer(model, losses, optimizers, stream=io.StringIO())
    other, of_other = model_and_optimizers()

    def by_trainer() -> None:
        trainer.fit(data, epochs=1)

    def by_hand() -> None:
        for batch in data:
            for optimizer in of_other:
                optimizer.zero_grad()
            losses(other, batch)[0].mean().backward()
            for optimizer in of_other:
                optimizer.step()

    def seconds(run: object) -> float:
        begin = time.perf_counter()
        run()  # type: ignore[operator]
        return time.perf_counter() - begin

    pairs = [(seconds(by_trainer), seconds(by_hand)) for _ in range(REPEATS + 2)][2:]
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    step = statistics.median(theirs for _, theirs in pairs) / STEPS
    print(f"batch {rows:5}: {ratio:.3f}x of a loop by hand, {step * 1e3:.2f} ms a step")
    return ratio


def main() -> int:
    """Print the ratios; return 1 if one of them exceeds the limit."""
    torch.set_num_threads(1)
    print(f"a step of Trainer, {TABLES} tables of dim 16, one thread, at most {MOST}x")
    return int(max([measure(rows) for rows in (256, 2048)]) > MOST)


if __name__ == "__main__":
    sys.exit(main())
