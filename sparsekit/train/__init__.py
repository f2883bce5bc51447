"""Trains models: a trainer, learning rate schedules, metrics, logs and plots."""

from ..errors import DivergedError, ResumeError
from .captured_step import CapturedStep
from .logs import JsonLines, TensorBoard
from .progress import Progress
from .resume import Epoch
from .schedule import linear_warmup
from .stopping import EarlyStopping
from .telemetry import Telemetry
from .trainer import Trainer

__all__ = [
    "CapturedStep",
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
