"""Training loops."""

from ..errors import DivergedError
from .logs import JsonLines, TensorBoard
from .progress import Progress
from .schedule import linear_warmup
from .stopping import EarlyStopping
from .telemetry import Telemetry
from .trainer import Epoch, Trainer

__all__ = [
    "DivergedError",
    "EarlyStopping",
    "Epoch",
    "JsonLines",
    "Progress",
    "Telemetry",
    "TensorBoard",
    "Trainer",
    "linear_warmup",
]
