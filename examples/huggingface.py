"""Trains with Hugging Face's Trainer: `torchrun --nproc-per-node 2 examples/huggingface.py`."""

import torch
from model import Clicks, data, loss_of
from transformers import Trainer, TrainingArguments

import sparsekit


class WithLoss(Clicks):
    def forward(self, user, tags, clicked):
        logits = super().forward(user, tags)
        return {"loss": loss_of(logits, clicked), "logits": logits}


# Create the arguments before the model: they initialize torch.distributed, and the model's tables
# need to know the ranks.
args = TrainingArguments(
    "unused", use_cpu=True, per_device_train_batch_size=32, num_train_epochs=5, report_to=[],
    save_strategy="no",  # Trainer would save only rank 0's rows: docs/trainers.md
    logging_strategy="no", disable_tqdm=True, ddp_backend="gloo",
)  # fmt: skip
args.device  # noqa: B018 (initialises torch.distributed)
torch.manual_seed(0)
model = WithLoss()
optimizer = sparsekit.optim.LazyAdam(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
rows = [dict(zip(("user", "tags", "clicked"), row, strict=True)) for row in data()]
trainer = Trainer(model, args, train_dataset=rows, optimizers=(optimizer, schedule))
# Replace torch's clip_grad_norm_, which does not support sharded tables.
trainer.accelerator.clip_grad_norm_ = sparsekit.optim.clip_grad_norm_
trainer.train()
with torch.no_grad():
    loss = model.eval()(*data().tensors)["loss"].item()  # a collective: run on all ranks
if trainer.is_world_process_zero():
    print(f"loss {loss:.4f}")
