"""Tables sharded over the ranks of torch.distributed."""

from .exchange import Exchange, RemoteError
from .world import exchange_of, init, wrap_ddp

__all__ = ["Exchange", "RemoteError", "exchange_of", "init", "wrap_ddp"]
