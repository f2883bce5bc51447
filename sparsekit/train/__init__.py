"""Trains models: a trainer, learning rate schedules, metrics, logs and plots."""

from ..errors import DivergedError, ResumeError
from .logs import JsonLines, TensorBoard
from .progress import Progress
from .resume import Epoch
from .schedule import linear_warmup
from .stopping import EarlyStopping
from .telemetry import Telemetry
from .trainer import Trainer

__all__ = [
    "DivergedError",
    "EarlyStopping",
    "Epoch",
    "JsonLines",
    "Progress",
    "ResumeError",
    "Telemetry",
    "TensorBoard",
    "Trainer",
    "linear_warmup",
]
