"""Training loops."""

from .progress import Progress
from .trainer import Epoch, Trainer

__all__ = ["Epoch", "Progress", "Trainer"]
