"""Trains with DistributedDataParallel: `torchrun --nproc-per-node 2 examples/ddp.py`."""

import torch
import torch.distributed as dist
from model import Clicks, data, loss_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import sparsekit

dist.init_process_group()  # must come first: the model's tables need to know the ranks
torch.manual_seed(0)
model = DistributedDataParallel(Clicks())  # leaves the tables alone: they are sharded
optimizer = sparsekit.optim.LazyAdam(model.parameters(), lr=0.02)
batches = DataLoader(data(), batch_size=32, sampler=DistributedSampler(data()))
for epoch in range(5):
    batches.sampler.set_epoch(epoch)
    for user, tags, clicked in batches:
        optimizer.zero_grad()
        loss = loss_of(model(user, tags), clicked)
        loss.backward()
        sparsekit.optim.clip_grad_norm_(model.parameters(), 1.0)  # norm over the rows on all ranks
        optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f}")
# To save the model, write one file per rank: a state_dict contains only the rank's own rows.
dist.destroy_process_group()
