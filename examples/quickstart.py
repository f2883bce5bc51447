"""Trains a model with two tables of raw 64-bit ids, on one rank or, under torchrun, on several.

torchrun --nproc-per-node 2 examples/quickstart.py
"""

import os

import torch
import torch.distributed as dist

import sparsekit

if "RANK" in os.environ:  # under torchrun; call this before creating layers
    dist.init_process_group()


class Clicks(torch.nn.Module):
    """Predicts whether a user clicks on an item, from the user, the item and items seen before."""

    def __init__(self) -> None:
        super().__init__()
        layers = {
            name: sparsekit.DistributedEmbedding("mean", None, 16, slot_num=1, name=name)
            for name in ("user", "item")
        }
        # Two features use the same table of items.
        features = {"user": "user", "item": "item", "seen": "item"}
        self.embeddings = sparsekit.EmbeddingGroup(layers, features, output="concatenated")
        self.dense = torch.nn.Sequential(
            torch.nn.Linear(3 * 16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def forward(self, inputs):
        return self.dense(self.embeddings(inputs))[:, 0]


torch.manual_seed(0)
users = torch.randint(0, 200, (4096,))
items = torch.randint(0, 200, (4096,))
seen = torch.randint(0, 200, (4096, 5))  # a bag of five items per sample
clicked = (users + items > 200).float()
users = users * 2**40 - 7  # any int64 is a key

model = sparsekit.distributed.wrap_ddp(Clicks())
optimizer = sparsekit.optim.LazyAdam(model.parameters(), lr=0.02)
rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
for _ in range(8):
    for batch in torch.randperm(4096).split(512):
        mine = batch.tensor_split(ranks)[rank]
        inputs = {"user": users[:, None], "item": items[:, None], "seen": seen}
        logits = model({name: keys[mine, None] for name, keys in inputs.items()})  # [n, 1, keys]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if rank == 0:
    print(f"loss {loss.item():.4f}")
if dist.is_initialized():
    dist.destroy_process_group()
