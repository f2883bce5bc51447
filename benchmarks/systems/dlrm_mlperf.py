"""Trains an MLPerf-sized DLRM-DCNv2 on generated data; measures throughput only, unofficially.

The model has dim 128, and MLPerf's bag sizes (26 bags, 214 keys per sample) and dense layers. It is
trained with Adagrad. Tables have at most --rows rows; MLPerf's have up to 40 million.

python -m benchmarks.systems.dlrm_mlperf
"""

import argparse
import io
import tempfile

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsekit
from sparsekit.data import Batch, CriteoReader, Keys, write_criteo_sample
from sparsekit.data.criteo_sample import CARDINALITIES
from sparsekit.models import DLRM
from sparsekit.train import Trainer


def losses(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
    """Return each sample's loss, and 0 as the penalty."""
    assert batch.label is not None
    scores = model(batch.dense.clamp(min=0).log1p(), batch.sparse)
    return binary_cross_entropy_with_logits(scores, batch.label, reduction="none"), 0.0


def main() -> None:
    """Train for some steps, and print the samples per second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=800_000, help="most rows of a table")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = [f"C{i}" for i in range(1, 27)]
    model = DLRM(
        names,
        13,
        rows={n: min(args.rows, c + 2) for n, c in zip(names, CARDINALITIES, strict=True)},
        dim=128,
        bottom=[512, 256],
        top=[1024, 1024, 512, 256],
        cross_layers=3,
        cross_rank=512,
    )
    sparse, dense = sparsekit.split_embedding_variable_from_others(model)
    optimizers = [
        sparsekit.optim.Adagrad(sparse, lr=0.005),
        torch.optim.Adagrad(dense, lr=0.005),
    ]
    trainer = Trainer(model, losses, optimizers, stream=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        write_criteo_sample(f"{folder}/day", args.batch * args.steps, multi_hot=True)
        keys = Keys("hex", separator=",")
        reader = CriteoReader(f"{folder}/day", args.batch, keys=keys)
        first, second = trainer.fit(reader, epochs=2)
    rows = sum(int(table["rows"]) for table in second.tables.values())
    print(
        f"DLRM-DCNv2 at MLPerf's shape, unofficial, throughput only: batch {args.batch:,}, "
        f"{args.threads} threads, {rows:,} rows of 128 in 26 tables of at most {args.rows:,}\n"
        f"{second.samples_per_second:,.0f} samples/s ({first.samples_per_second:,.0f} in the first "
        f"epoch, whose keys are new)"
    )


if __name__ == "__main__":
    main()
