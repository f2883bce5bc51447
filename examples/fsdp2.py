"""Trains with FSDP2, torch's fully_shard: `torchrun --nproc-per-node 2 examples/fsdp2.py`."""

import torch
import torch.distributed as dist
from model import Clicks, data, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import sparsekit

dist.init_process_group()  # must come first: the model's tables need to know the ranks
torch.manual_seed(0)
model = Clicks()
tables = set(sparsekit.distributed.ignored_parameters(model).values())  # already sharded
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params=tables)
# This optimizer accepts both DTensors and tables.
optimizer = sparsekit.optim.LazyAdam(model.parameters(), lr=0.02)
batches = DataLoader(data(), batch_size=32, sampler=DistributedSampler(data()))
for epoch in range(5):
    batches.sampler.set_epoch(epoch)
    for user, tags, clicked in batches:
        optimizer.zero_grad()
        loss = loss_of(model(user, tags), clicked)
        loss.backward()
        sparsekit.optim.clip_grad_norm_(model.parameters(), 1.0)  # one norm over shards and tables
        optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f}")
dist.destroy_process_group()
