"""Tables placed by hash: balance, the map of owners in states, and ranks that agree about it."""

import copy
import io

import pytest
import torch
import torch.distributed as dist

import sparsekit

from .owners import rank_of
from .pool import Raised

N = 10_000
IDS = {
    "sequential": lambda n, ranks: torch.arange(n),
    "random": lambda n, ranks: torch.randint(
        -(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(1)
    ),
    "snowflake": lambda n, ranks: torch.arange(n) * 2**22,
    "multiples": lambda n, ranks: torch.arange(n) * ranks,
}


def vectors(name="v", **keywords):
    return sparsekit.All2AllDenseEmbedding(50, 3, 1, 1, dynamic_input=True, name=name, **keywords)


def turned(layer):
    """Give the layer a map of its own, with the ranks in reverse."""
    layer.owners = layer.world_size - 1 - layer.owners
    return layer


def rows_of(rank):
    """How many keys of each kind this rank has."""
    ranks, sizes = dist.get_world_size(), {}
    for kind, ids in IDS.items():
        layer = sparsekit.DistributedEmbedding("sum", 2 * N, 1, 1, 1, name=kind)
        layer(ids(N * ranks, ranks)[rank::ranks].view(-1, 1, 1))
        sizes[kind] = len(layer.table)
    return sizes


def test_ranks_have_equally_many_keys(ranks):
    of_ranks = ranks(rows_of)
    for kind in IDS:
        sizes = [sizes[kind] for sizes in of_ranks]
        assert sum(sizes) == N * ranks.world_size
        assert max(sizes) <= 1.1 * N, kind


KEYS = torch.arange(-20, 20)


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def round_trip(rank, use_modulo):
    """States find their way into layers of the same map and of another one."""
    ranks = dist.get_world_size()
    made = vectors(placement="modulo") if use_modulo else turned(vectors())
    even = vectors("even", seed=3)
    shared = even.owners
    made(KEYS).sum().backward()
    with torch.no_grad():
        made.weight += torch.arange(50.0).view(50, 1)
    expected = made(KEYS)
    if not use_modulo:
        own = {key for key in KEYS.tolist() if ranks - 1 - rank_of(key, ranks) == rank}
        assert set(made.table.keys().tolist()) == own
    for state in (saved_and_loaded(made), made.state_dict()):
        for assign in (False, True):
            loaded = vectors(placement=made.placement, seed=5)
            loaded(KEYS)  # with the map that it was made with
            loaded.load_state_dict(state, assign=assign)
            assert torch.equal(loaded.eval()(KEYS), expected)
            assert torch.equal(loaded.train()(KEYS), expected)
            assert len(loaded.table) == len(made.table)
            assert use_modulo == ("owners" not in state)
            assert use_modulo or torch.equal(loaded.owners, made.owners)
            loaded(KEYS).sum().backward()
    # Other layers have kept theirs.
    assert even.owners is shared
    assert shared.tolist() == [shard * ranks >> 16 for shard in range(65536)]


@pytest.mark.parametrize("use_modulo", [False, True])
def test_a_state_brings_its_map(ranks, use_modulo):
    ranks(round_trip, use_modulo)


def given_vectors(rank):
    """Each rank keeps the given vectors that it owns."""
    for layer in (turned(vectors("a")), vectors("b"), vectors("c", placement="modulo")):
        given = torch.arange(3.0 * len(KEYS)).view(-1, 3)
        layer.assign_(KEYS, given)
        counts = torch.tensor(len(layer.table))
        dist.all_reduce(counts)
        assert counts == len(KEYS)
        assert torch.equal(layer.eval()(KEYS), given)


def test_given_vectors_go_to_their_owners(ranks):
    ranks(given_vectors)


def sharing(rank):
    one, other = vectors("one"), vectors("other", dtype=torch.float64)
    assert one.owners is other.owners
    for moved in (copy.deepcopy(one).double(), one.share_memory(), one.bfloat16()):
        assert moved.owners is other.owners
    assert vectors("third", placement="modulo").owners is None
    assert "owners" in set(one.sharded_state())
    loaded = vectors("loaded")
    loaded.load_state_dict(one.state_dict())
    assert loaded.owners is other.owners
    loaded.load_state_dict(saved_and_loaded(other), assign=True)
    assert loaded.owners is other.owners


def test_layers_share_one_map(two_ranks):
    two_ranks(sharing)


def another_map(rank, how):
    """Ranks have looked up together before rank 1 gets another map."""
    layer = vectors("users", placement="modulo" if how == "modulo" and rank == 1 else None)
    if how != "modulo":
        state = turned(vectors()).state_dict()
        layer(KEYS)
        if rank == 1:
            if how == "replaced":
                turned(layer)
            elif how == "written to":
                layer.owners = layer.owners.clone()
                layer.plan()  # which keeps a hash of the map
                layer.owners[7] = 1
            else:
                layer.load_state_dict(state, assign=how == "assigned")
    layer(KEYS)


@pytest.mark.parametrize("how", ["replaced", "written to", "loaded", "assigned", "modulo"])
def test_ranks_with_different_maps_do_not_look_up(two_ranks, how):
    for outcome in two_ranks.outcomes(another_map, how):
        assert isinstance(outcome, Raised), outcome
        assert outcome.type == "RuntimeError", outcome.trace
        assert "different things" in outcome.message
        assert outcome.message.count("placed by hash to ") == (1 if how == "modulo" else 2)


def refused_states(rank):
    by_hash, by_modulo = vectors("hash"), vectors("modulo", placement="modulo")
    rows = vectors("rows", use_hashtable=False)
    for layer in (by_hash, by_modulo, rows):
        layer(KEYS.abs()[:20])
    state = by_hash.state_dict()
    low, high, short = state["owners"].clone(), state["owners"].clone(), state["owners"][:-1]
    low[5], high[9] = -1, 2
    without = {name: value for name, value in state.items() if name != "owners"}
    cases = [
        (by_hash, by_modulo.state_dict(), r"hash: the state has no map of owners.*'modulo'"),
        (by_hash, without, r"hash: the state has no map of owners.*placement='modulo'"),
        (by_modulo, state, r"modulo: the state has a map of owners.*placement='hash'"),
        (
            by_hash,
            state | {"owners": low},
            r"hash: owners\[5\] in the state is -1, but .* \[0, 2\)",
        ),
        (by_hash, state | {"owners": high}, r"hash: owners\[9\] in the state is 2, but"),
        (by_hash, state | {"owners": short}, r"hash: owners .* shape \[65536\], got \[65535\]"),
        (by_hash, state | {"owners": low.int()}, r"hash: owners .* must be int16, got torch.int32"),
        (rows, state, "rows: the state has a hash table"),
        (by_hash, rows.state_dict(), "hash: the state has no buckets"),
    ]
    for layer, wrong, message in cases:
        before = copy.deepcopy(layer.state_dict())
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=message):
                layer.load_state_dict(wrong, assign=assign)
            after = layer.state_dict()
            assert after.keys() == before.keys()
            assert all(torch.equal(after[name], before[name]) for name in before)


def test_states_that_do_not_fit(two_ranks):
    two_ranks(refused_states)


def test_one_rank_has_no_map():
    for placement in (None, "hash", "modulo"):
        layer = vectors(placement=placement)
        layer(KEYS)
        assert layer.owners is None
        assert layer.placement == (placement or "hash")
        names = {"weight", "seed", "shard", "table.buckets", "table.hash_seed", "table.size"}
        assert set(layer.state_dict()) == names
    assert vectors(use_hashtable=False).placement == "modulo"
    with pytest.raises(RuntimeError, match=r"v: the state has a map of owners.* 1 rank"):
        layer.load_state_dict(layer.state_dict() | {"owners": torch.zeros(65536).short()})
