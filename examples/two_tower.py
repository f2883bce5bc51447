"""Trains a retrieval model with two towers, for users and items, on one rank or under torchrun."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, normalize

import sparsekit

rank, ranks = (int(os.environ.get(name, only)) for name, only in (("RANK", 0), ("WORLD_SIZE", 1)))
if ranks > 1:  # under torchrun; call this before creating layers
    dist.init_process_group()


class Towers(torch.nn.Module):
    """Maps int64 ids of users [n] and items [m] to scores [n, m]."""

    def __init__(self):
        super().__init__()
        self.ids = torch.nn.ModuleList(sparsekit.Embedding(None, 16, name=n) for n in "ui")
        self.top = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in "ui")

    def forward(self, *keys):
        layers = zip(self.top, self.ids, keys, strict=True)
        users, items = (normalize(top(ids(each)), dim=1) for top, ids, each in layers)
        return users @ items.T / 0.1  # cosines divided by a temperature


torch.manual_seed(0)
users, items = torch.arange(400), torch.arange(200)  # user u likes item i if u % 20 == i % 20
liked = torch.rand(400, 200).where(users[:, None] % 20 == items % 20, 2).argsort(1)[:, :10]
liked, held_out = liked[:, :8], liked[:, 8:]  # [400, 8] for training, [400, 2] for testing
user_ids, item_ids = users * 2**40 - 7, items * 10**15 + 3  # any int64 is a key
model = sparsekit.distributed.wrap_ddp(Towers())
optimizer = sparsekit.optim.LazyAdam(model.parameters(), lr=0.1)
for batch in torch.cat([torch.randperm(3200) for _ in range(8)]).split(256):
    mine = batch.tensor_split(ranks)[rank]
    scores = model(user_ids[mine // 8], item_ids[liked.flatten()[mine]])
    # Treat other users' items in the batch as negatives.
    loss = cross_entropy(scores, torch.arange(len(mine)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    best = model.eval()(user_ids, item_ids).scatter(1, liked, -torch.inf).topk(10).indices
if rank == 0:
    found = (best[:, None] == held_out[:, :, None]).any(2).float().mean()
    print(f"loss {loss:.4f}\nrecall@10 {found:.4f}")
if ranks > 1:
    dist.destroy_process_group()
