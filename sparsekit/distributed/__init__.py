"""Tables sharded over the ranks of torch.distributed."""

from .exchange import Exchange
from .reports import RemoteError
from .sharded import ignored_parameters, wrap_ddp
from .world import exchange_of, init

__all__ = ["Exchange", "RemoteError", "exchange_of", "ignored_parameters", "init", "wrap_ddp"]
