"""Training loops."""

from ..errors import DivergedError
from .progress import Progress
from .trainer import Epoch, Trainer

__all__ = ["DivergedError", "Epoch", "Progress", "Trainer"]
