"""Trains DLRM on Criteo-format data: `torchrun --nproc-per-node 2 examples/train_dlrm.py`."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsekit
from sparsekit.data import CriteoReader, write_criteo_sample
from sparsekit.models import DLRM
from sparsekit.train import JsonLines, Trainer, linear_warmup

if "RANK" in os.environ:  # under torchrun; call this before creating layers
    dist.init_process_group()


def losses(model, batch):
    scores = model(batch.dense.clamp(min=0).log1p(), batch.sparse)
    return binary_cross_entropy_with_logits(scores, batch.label, reduction="none"), 0.0


model = DLRM([f"C{i}" for i in range(1, 27)], 13, bottom=[64], top=[64], cross_rank=16)
sparse, dense = sparsekit.split_embedding_variable_from_others(model)
optimizers = [sparsekit.optim.LazyAdam(sparse, lr=0.01), torch.optim.Adam(dense, lr=0.002)]
with tempfile.TemporaryDirectory() as folder:
    # Every rank generates the same file, and reads its share of the rows.
    write_criteo_sample(f"{folder}/day_0", rows=20_000)
    trainer = Trainer(
        model,
        losses,
        optimizers,
        schedulers=[linear_warmup(optimizer, 1.0, 20) for optimizer in optimizers],
        logs=[JsonLines(f"{folder}/metrics.jsonl")],  # `sparsekit plot` reads this file
    )
    history = trainer.fit(CriteoReader(f"{folder}/day_0", 512, shuffle=True), epochs=3)
if not dist.is_initialized() or dist.get_rank() == 0:
    print(f"loss {history[-1].loss:.4f}")
if dist.is_initialized():
    dist.destroy_process_group()
