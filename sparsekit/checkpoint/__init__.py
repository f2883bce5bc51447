"""Checkpoints that tell what they are, are whole or not there, and load on any number of ranks."""

from ..errors import CheckpointError
from .background import Background, async_save
from .folder import latest
from .load import Loaded, load
from .manager import Checkpoints
from .reshard import reshard, verify
from .save import save

__all__ = [
    "Background",
    "CheckpointError",
    "Checkpoints",
    "Loaded",
    "async_save",
    "latest",
    "load",
    "reshard",
    "save",
    "verify",
]
