"""Trains with Lightning and automatic optimization.

torchrun --nproc-per-node 2 examples/lightning_auto.py
"""

import os

import lightning
import torch
from model import Clicks, data, loss_of

import sparsekit


class Module(lightning.LightningModule):
    """A module that creates its model once the ranks are known."""

    def configure_model(self) -> None:  # __init__ runs before the ranks exist
        self.model = getattr(self, "model", None) or Clicks()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        user, tags, clicked = batch
        loss = loss_of(self.model(user, tags), clicked)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sparsekit.optim.LazyAdam(self.parameters(), lr=0.02)

    def configure_gradient_clipping(self, optimizer, *_, **__) -> None:  # torch cannot clip tables
        sparsekit.optim.clip_grad_norm_(self.parameters(), 1.0)


ranks = int(os.environ.get("WORLD_SIZE", 1))
# Disable Lightning's checkpoints: they would contain only rank 0's rows; see docs/trainers.md.
trainer = lightning.Trainer(
    accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=5, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
lightning.seed_everything(0, verbose=False)
trainer.fit(Module(), torch.utils.data.DataLoader(data(), batch_size=32, shuffle=True))
if trainer.is_global_zero:
    print(f"loss {trainer.callback_metrics['loss']:.4f}")
