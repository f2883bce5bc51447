"""Atomic, self-describing checkpoints that any number of ranks can load."""

from ..errors import CheckpointError
from .background import Background, async_save
from .convert import export, import_tables, sources_of
from .dcp import DcpState
from .diff import diff
from .folder import latest
from .forget import forget
from .load import Loaded, load
from .manager import Checkpoints
from .reshard import reshard, verify
from .save import save

__all__ = [
    "Background",
    "CheckpointError",
    "Checkpoints",
    "DcpState",
    "Loaded",
    "async_save",
    "diff",
    "export",
    "forget",
    "import_tables",
    "latest",
    "load",
    "reshard",
    "save",
    "sources_of",
    "verify",
]
