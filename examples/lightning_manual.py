"""Trains with Lightning and manual optimization.

torchrun --nproc-per-node 2 examples/lightning_manual.py
"""

import os

import lightning
import torch
from model import Clicks, data, loss_of

import sparsekit


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_model(self) -> None:  # __init__ runs before the ranks exist
        self.model = getattr(self, "model", None) or Clicks()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        tables, dense = sparsekit.split_embedding_variable_from_others(self)
        return [sparsekit.optim.LazyAdam(tables, lr=0.02), torch.optim.Adam(dense, lr=0.02)]

    def training_step(self, batch: list[torch.Tensor]) -> None:
        user, tags, clicked = batch
        self.manual_backward(loss := loss_of(self.model(user, tags), clicked))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss)


ranks = int(os.environ.get("WORLD_SIZE", 1))
trainer = lightning.Trainer(
    accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=5, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
lightning.seed_everything(0, verbose=False)
trainer.fit(Module(), torch.utils.data.DataLoader(data(), batch_size=32, shuffle=True))
print(f"loss {trainer.callback_metrics['loss']:.4f}")
