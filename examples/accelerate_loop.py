"""Trains with Accelerate: `torchrun --nproc-per-node 2 examples/accelerate_loop.py`."""

import torch
from accelerate import Accelerator
from model import Clicks, data, loss_of

import sparsekit

accelerator = Accelerator(cpu=True)  # must come first: the tables need to know the ranks
torch.manual_seed(0)
model = Clicks()
optimizer = sparsekit.optim.LazyAdam(model.parameters(), lr=0.02)
batches = torch.utils.data.DataLoader(data(), batch_size=32, shuffle=True)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for _ in range(5):
    for user, tags, clicked in batches:
        optimizer.zero_grad()
        loss = loss_of(model(user, tags), clicked)
        accelerator.backward(loss)
        # accelerator.clip_grad_norm_ calls torch's function, which does not support sharded tables.
        sparsekit.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
if accelerator.is_main_process:
    print(f"loss {loss.item():.4f}")
accelerator.end_training()
