"""Provides a rendezvous for ranks that torchrun has restarted.

torchrun's agent keeps one store for all attempts, so torch finds the addresses of dead ranks there
(https://github.com/pytorch/pytorch/issues/135712). No number known to all nodes identifies an
attempt, so the ranks agree on a name for it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import timedelta

# torch documents these names but does not list them in __all__.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

LOOK_S = 0.02
TIMEOUT_S = 600.0


def store_of_attempt(timeout: float = TIMEOUT_S) -> Store | None:
    """Return a store for this attempt within torchrun's store; None without torchrun.

    Args:
        timeout: seconds to wait for the other ranks.

    Raises:
        RuntimeError: another rank has not arrived within the timeout.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
        wait_for_workers=False, timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return PrefixStore(agree(store, rank, world_size, timeout), store)


def agree(store: Store, rank: int, world_size: int, timeout: float) -> str:
    """Agree on a name for this attempt, the same on all its ranks and never used before.

    Each rank stores a random word. Rank 0 lists the words that it finds, some of which may be from
    dead ranks, and stores the list under a new name. Whenever a word changes, it stores a new list.
    Each rank confirms a list that contains its own word. The name of a list that all ranks have
    confirmed is the result.
    """
    end = time.monotonic() + timeout
    word = secrets.token_hex(8)
    store.set(f"sparsekit/word/{rank}", word)
    words: list[str] = []
    name = ""
    while time.monotonic() < end:
        if rank == 0:
            found = [_get(store, f"sparsekit/word/{other}") for other in range(world_size)]
            if found != words:
                words, name = found, f"sparsekit/attempt/{secrets.token_hex(8)}"
                store.set("sparsekit/list", json.dumps([name, words]))
        else:
            name, words = json.loads(_get(store, "sparsekit/list") or '["", []]')
        if words[rank : rank + 1] == [word]:  # otherwise the list is from an earlier attempt
            store.set(f"{name}/confirmed/{rank}", "1")
            confirmed = [f"{name}/confirmed/{other}" for other in range(world_size)]
            if rank == 0 and store.check(confirmed):
                store.set(f"{name}/taken", "1")
            if store.check([f"{name}/taken"]):
                return name
        time.sleep(LOOK_S)
    missing = [r for r in range(world_size) if not store.check([f"{name}/confirmed/{r}"])]
    raise RuntimeError(f"ranks {missing} of {world_size} have not come within {timeout:g} s")


def _get(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
