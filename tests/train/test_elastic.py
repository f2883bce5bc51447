"""Ranks connect to ranks of the same attempt, not of an earlier attempt."""

import threading
import time

import pytest
import torch.distributed as dist

from sparsekit.train.elastic import agree, store_of_attempt


def names(store, world_size, delays, timeout=20.0):
    found = [None] * world_size

    def run(rank):
        time.sleep(delays[rank])
        try:
            found[rank] = agree(store, rank, world_size, timeout)
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("delays", [(0, 0, 0), (0.2, 0, 0.1), (0, 0.1, 0.2), (0.1, 0.2, 0)])
def test_each_attempt_has_a_name_of_its_own(delays):
    store = dist.HashStore()
    seen = set()
    for world_size in (3, 3, 2, 3):  # one attempt starts with fewer ranks
        found = names(store, world_size, delays)
        assert len(set(found)) == 1
        assert found[0] not in seen
        seen.add(found[0])


@pytest.mark.parametrize("used", [None, "False"])
def test_without_a_store_of_its_agent_there_is_none_to_agree_over(monkeypatch, used):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if used is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", used)
    assert store_of_attempt() is None


def test_a_rank_that_does_not_come():
    store = dist.HashStore()
    names(store, 2, (0, 0))
    with pytest.raises(RuntimeError, match=r"ranks \[1\] of 2 have not come within 0\.5 s"):
        agree(store, 0, 2, 0.5)
    with pytest.raises(RuntimeError, match="have not come"):
        agree(store, 1, 2, 0.5)


@pytest.mark.time_limit(30)
def test_attempts_have_keys_of_their_own_in_the_agents_store(monkeypatch):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(server.port), "RANK": "0", "WORLD_SIZE": "1",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    first, second = store_of_attempt(20), store_of_attempt(20)
    first.set("address", "of a dead rank")
    assert first.get("address") == b"of a dead rank"
    assert not second.check(["address"])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"of 2 have not come within 0\.1 s"):
        store_of_attempt(0.1)
