"""Checkpoints of tables that evict, written on N ranks and loaded on M."""

import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.evicting import joined, made, state_of, train
from checkpoint.models import assert_equal
from checkpoint.numpy_reader import read_table
from checkpoint.test_forget import row_bytes, scan, some_keys, without

import sparsekit
from sparsekit import checkpoint
from sparsekit.checkpoint import Checkpoints, DcpState
from sparsekit.checkpoint.manifest_file import read_manifest

from .pool import Ranks

WORLDS = (1, 2, 3)
STEPS = 14


@pytest.fixture(scope="module")
def pools():
    made = {world: Ranks(world) for world in WORLDS}
    yield made
    for pool in made.values():
        pool.close()


def save_chain(rank, world, folder, score, in_background):
    """Train and save after each step; return this rank's states."""
    layer, optimizer = made(score)
    keep, states = Checkpoints(folder, complete_every=999, keep=999), []
    for step in range(STEPS):
        train(layer, optimizer, step, step + 1, slice(rank, None, world))
        if step == 8:
            assert layer.evict(keep=25 if score == "admission" else 45) > 0
        saving = keep.async_save if in_background else keep.save
        saving(step, layer, optimizer)
        keep.wait()
        states.append(state_of(layer, optimizer))
    keep.close()
    return states


def load(rank, world, path, score):
    layer, optimizer = made(score, seed=9)
    train(layer, optimizer, 40, 43, slice(rank, None, world))
    checkpoint.load(layer, path, optimizer)
    return state_of(layer, optimizer)


def go_on(rank, world, path, score):
    """Load a checkpoint; return this rank's states then and after more steps."""
    layer, optimizer = made(score, seed=9)
    checkpoint.load(layer, path, optimizer)
    loaded = state_of(layer, optimizer)
    train(layer, optimizer, STEPS, STEPS + 8, slice(rank, None, world))
    return loaded, state_of(layer, optimizer)


# With each score, each world's chain goes on on as many ranks and on one other world, by turns.
@pytest.mark.parametrize(
    ("score", "turn"), [("lru", 1), ("lfu", 2), ("user", 1), ("ttl", 2), ("admission", 1)]
)
def test_a_chain_of_n_ranks_on_m(pools, tmp_path, score, turn):
    after = {}
    for source, change in itertools.product(WORLDS, (0, turn)):
        folder, world = tmp_path / str(source), WORLDS[(source - 1 + change) % 3]
        if world == source:
            of_ranks = pools[source](save_chain, source, folder, score, source == 2)
            states = [joined(list(parts)) for parts in zip(*of_ranks, strict=True)]
            tables = [read_manifest(p).tables["table"] for p in sorted(folder.glob("step-*"))]
            assert [table.complete for table in tables] == [True] + [False] * (STEPS - 1)
            for rank in range(source):
                assert sum(table.shards[rank].removed for table in tables) > 10
        path = folder / f"step-{STEPS - 1:012d}"
        loaded, trained = zip(*pools[world](go_on, world, path, score), strict=True)
        earlier = (3, 8)[(source + world) // 2 % 2]
        parts = pools[world](load, world, folder / f"step-{earlier:012d}", score)
        for step, of_step in ((STEPS - 1, loaded), (earlier, parts)):
            assert_equal(joined(of_step), states[step])
            if world == source:  # every key has its old row
                for rank, part in enumerate(of_step):
                    assert_equal(part, of_ranks[rank][step])
        if world != source:
            out = checkpoint.reshard(path, tmp_path / f"{source} to {world}", world)
            assert_equal(joined(pools[world](load, world, out, score)), states[-1])
        found = joined(trained)
        first = after.setdefault(source, found)
        for name in {"keys", "scores", "clock", "counts"} & set(found):
            assert torch.equal(found[name], first[name])
        assert torch.allclose(found["vectors"], first["vectors"], rtol=0, atol=1e-6)


def save_once(rank, world, folder, score):
    """Train, and save by both ways."""
    layer, optimizer = made(score)
    train(layer, optimizer, 0, STEPS, slice(rank, None, world))
    checkpoint.save(layer, folder / "own", optimizer)
    dcp.save({"app": DcpState(layer, optimizer)}, checkpoint_id=folder / "torch")
    return state_of(layer, optimizer)


def load_by_dcp(rank, world, folder, score):
    layer, optimizer = made(score, seed=9)
    app = DcpState(layer, optimizer, load_from=folder)
    dcp.load({"app": app}, checkpoint_id=folder)
    return state_of(layer, optimizer)


@pytest.mark.parametrize("score", ["lfu", "admission", "sketch"])
def test_scores_and_counts_of_n_ranks_on_m(pools, tmp_path, score):
    expected = made(score)
    train(*expected, 0, STEPS + 8)
    for source in WORLDS:
        folder = tmp_path / str(source)
        state = joined(pools[source](save_once, source, folder, score))
        for world in WORLDS:
            parts = pools[world](load_by_dcp, world, folder / "torch", score)
            assert_equal(joined(parts), state)
            if score == "sketch":  # chains have the others
                assert_equal(joined(pools[world](load, world, folder / "own", score)), state)
            if score == "sketch" and source + world == 4:
                parts = pools[world](go_on, world, folder / "own", score)
                found = joined([trained for _, trained in parts])
                assert torch.equal(found["keys"], state_of(*expected)["keys"])
                assert torch.equal(found["scores"], state_of(*expected)["scores"])


def test_a_chain_of_two_ranks_forgets(pools, tmp_path):
    of_ranks = pools[2](save_chain, 2, tmp_path, "lru", False)
    states = [joined(list(parts)) for parts in zip(*of_ranks, strict=True)]
    keys = some_keys(states)
    texts = set.union(*(row_bytes(states, key) for key in keys))
    assert scan(tmp_path, texts) == texts
    assert checkpoint.forget(tmp_path, keys) > len(keys)
    assert scan(tmp_path, texts) == set()
    for world, step in itertools.product(WORLDS, (0, 6, STEPS - 1)):
        parts = pools[world](load, world, tmp_path / f"step-{step:012d}", "lru")
        assert_equal(joined(parts), without(states[step], keys))


def other_clocks(rank, world, folder):
    layer, _ = made()
    layer.clock.fill_(rank)
    with pytest.raises(RuntimeError, match="table: rank 1 has other scores than rank 0"):
        checkpoint.save(layer, folder)
    sparsekit.set_clock(layer, 5 + rank)
    checkpoint.save(layer, folder)
    return int(layer.clock)


def test_ranks_with_other_clocks(pools, tmp_path):
    assert pools[2](other_clocks, 2, tmp_path / "a") == [6, 6]
    (table,) = read_manifest(tmp_path / "a").tables.values()
    assert (table.scores.clock, table.scores.set_by_user) == (6, True)


def removed_by_one(rank, world, folder):
    """Only rank 1 has removed keys; another rank's table is written in full."""
    layer, optimizer = made()
    train(layer, optimizer, 0, 3, slice(rank, None, world))
    keep = Checkpoints(folder, complete_every=9)
    keep.save(0, layer, optimizer)
    layer.erase(layer.table.keys()[:3] if rank else torch.empty(0, dtype=torch.int64))
    keep.save(1, layer, optimizer)
    if rank == 0:
        keep._marks = None  # as after an interrupt
    keep.save(2, layer, optimizer)
    keep.close()
    return state_of(layer, optimizer)


def test_one_rank_alone_has_removed_keys(pools, tmp_path):
    state = joined(pools[2](removed_by_one, 2, tmp_path))
    tables = [read_manifest(p).tables["table"] for p in sorted(tmp_path.glob("step-*"))]
    assert [[s.removed for s in table.shards] for table in tables] == [[0, 0], [0, 3], [0, 0]]
    assert [table.complete for table in tables] == [True, False, True]
    for world in WORLDS:
        for step in (1, 2):
            path = tmp_path / f"step-{step:012d}"
            assert_equal(joined(pools[world](load, world, path, "lru")), state)


def other_owners(rank, world, folder):
    """Have keys change places between ranks: each rank's file removes what another's file has."""
    layer, optimizer = made()
    train(layer, optimizer, 0, 3, slice(rank, None, world))
    keep = Checkpoints(folder, complete_every=9)
    keep.save(0, layer, optimizer)
    mine = layer.table.keys()[:4]
    vectors = layer.vectors(mine)
    layer.erase(mine)
    owners = layer.owners.clone()
    owners[:] = owners.flip(0)
    layer.owners = owners
    layer.assign(mine, vectors + 1)
    keep.save(1, layer, optimizer)
    keep.close()
    return mine, state_of(layer, optimizer)


@pytest.mark.parametrize("world", [2, 3])
def test_keys_that_have_moved_to_other_ranks(pools, tmp_path, world):
    moved, states = zip(*pools[world](other_owners, world, tmp_path), strict=True)
    state, path = joined(list(states)), tmp_path / "step-000000000001"
    table = read_manifest(path).tables["table"]
    assert not table.complete
    assert sum(shard.removed > 0 for shard in table.shards) == 2
    owners_changed = [
        not torch.isin(mine, own["keys"]).all() for mine, own in zip(moved, states, strict=True)
    ]
    assert any(owners_changed)
    out = checkpoint.reshard(path, tmp_path / "out", 2)
    for to in WORLDS:
        for each in (path, out):
            assert_equal(joined(pools[to](load, to, each, "lru")), state)
    rows = read_table(path, "table")
    assert sorted(rows) == state["keys"].tolist()
    texts = row_bytes([state], int(moved[0][0]))
    assert checkpoint.forget(path, moved[0]) > 0
    assert scan(tmp_path / "step-000000000000", texts) == set()
    found = joined(pools[world](load, world, path, "lru"))
    assert_equal(found, without(state, moved[0].tolist()))
