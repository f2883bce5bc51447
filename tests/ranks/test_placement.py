"""The map of owners balances ranks, is saved in states and is the same on all ranks."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

import sparsekit
from sparsekit.lookup.plan import TableBatch
from sparsekit.tables.owners import even_map

from .pool import Ranks
from .test_faults import raised


def layer(name="layer", capacity=60, **keywords):
    return sparsekit.DistributedEmbedding("sum", capacity, 3, 1, 1, name=name, **keywords)


def keys(count):
    return (torch.arange(count) - 3).view(-1, 1, 1)


def reversed_map(made):
    """Return a map by which almost all keys live on another rank."""
    return (made.world_size - 1 - made.owners).to(torch.int16)


IDS = {
    "sequential": lambda n, _: torch.arange(n),
    "random": lambda n, _: torch.randint(2**62, (n,), generator=torch.Generator()),  # seeded with 0
    "snowflake": lambda n, _: 2**60 + torch.arange(n) * 2**22,
    "multiples": lambda n, world_size: torch.arange(n) * world_size,
}


def loads(rank, placement):
    """Look up 10,000 keys per rank, spread over ranks; return the rows stored on this rank."""
    world_size = dist.get_world_size()
    rows = {}
    for name, of in IDS.items():
        made = sparsekit.All2AllDenseEmbedding(
            10_000 * world_size, 1, 1, 1, dynamic_input=True, name=name, placement=placement
        )
        made(of(10_000 * world_size, world_size)[rank::world_size])
        rows[name] = len(made.table)
    return rows


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_hold_about_as_many_rows_each(world_size):
    pool = Ranks(world_size)
    try:
        by_hash = pool(loads, None)
        by_modulo = pool(loads, "modulo")
    finally:
        pool.close()
    for name in IDS:
        rows = [of_rank[name] for of_rank in by_hash]
        assert sum(rows) == 10_000 * world_size
        assert max(rows) <= 11_000, name
    # The hash exists for this case: modulo would put all rows on one rank.
    assert sorted(of_rank["multiples"] for of_rank in by_modulo)[-2] == 0


def round_trip(rank, assign):
    """Check that a layer uses the map of a loaded state, even if its own map was different."""
    made, twin, loaded = layer("a"), layer("twin", seed=3), layer("b", seed=7)
    assert made.owners is twin.owners is loaded.owners is even_map(2, torch.device("cpu"))
    assert made.state_dict()["owners"].data_ptr() == made.owners.data_ptr()
    assert "owners" in made.sharded_state()
    made.owners = reversed_map(made)
    expected = made(keys(20)).detach()
    own = made.owned(keys(20).flatten())
    assert sorted(made.table.keys().tolist()) == sorted((own - 3).tolist())
    assert set(own.tolist()).isdisjoint(twin.owned(keys(20).flatten()).tolist())
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    loaded(keys(20))
    loaded.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert torch.equal(loaded.owners, made.owners)
    assert torch.equal(loaded(keys(20)), expected)
    assert len(loaded.table) == len(made.table) == len(own)
    # Other layers keep their map.
    assert twin.owners is even_map(2, torch.device("cpu"))
    assert torch.equal(twin.owners, torch.arange(65536).mul(2).bitwise_right_shift(16).short())
    # Load a state with the shared map again.
    loaded.load_state_dict(copy.deepcopy(twin.state_dict()), assign=assign)
    assert torch.equal(loaded.owners, twin.owners)
    assert not assign or loaded.owners is twin.owners
    assert torch.equal(loaded(keys(20)), twin(keys(20)))


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_brings_its_map(two_ranks, assign):
    two_ranks(round_trip, assign)


def copies(rank):
    made = layer("copied")
    made.owners = reversed_map(made)
    expected = made(keys(9))
    for other in (copy.deepcopy(made), copy.deepcopy(made).double()):
        assert torch.equal(other.owners, made.owners)
        torch.testing.assert_close(other(keys(9)).float(), expected)
    moved = layer("moved")._apply(torch.clone)  # as a move to another device does
    assert moved.owners is even_map(2, torch.device("cpu"))
    # An averaged layer has the map of the layer that it averages, not of another layer.
    model = torch.nn.ModuleList([layer("one"), layer("other")])
    averaged = AveragedModel(model)
    model[1].owners = reversed_map(model[1])
    for each in model:
        each(keys(9))
    averaged.update_parameters(model)
    for mine, theirs in zip(averaged.module, model, strict=True):
        assert torch.equal(mine.owners, theirs.owners)
        assert torch.equal(mine.eval()(keys(9)), theirs.eval()(keys(9)))


def made_on_meta(rank, use_hashtable):
    made, expected = (
        layer("met", use_hashtable=use_hashtable, device=device) for device in ("meta", "cpu")
    )
    assert (made.rank, made.world_size) == (rank, 2)
    made.to_empty(device="cpu")
    assert made.shard.tolist() == [rank, 2]
    if use_hashtable:
        assert made.owners is expected.owners
    ids = torch.arange(9).view(-1, 1, 1)
    assert torch.equal(made(ids), expected(ids))


@pytest.mark.parametrize("use_hashtable", [False, True])
def test_a_layer_made_on_meta(two_ranks, use_hashtable):
    two_ranks(made_on_meta, use_hashtable)


def test_copies_have_the_map(two_ranks):
    two_ranks(copies)


def refused_states(rank):
    states = {
        placement: layer(placement=placement).state_dict() for placement in ("hash", "modulo")
    }
    made = {placement: layer(placement=placement) for placement in ("hash", "modulo")}
    assert set(states["hash"]) - set(states["modulo"]) == {"owners"}
    for mine, other in (("hash", "modulo"), ("modulo", "hash")):
        message = f"layer: the state was saved with placement='{other}'.* has placement='{mine}'"
        with pytest.raises(RuntimeError, match=message):
            made[mine].load_state_dict(states[other])
    good = states["hash"]
    for bad, message in (
        (good["owners"][1:], r"owners in the state must have shape \[65536\], got \[65535\]"),
        (good["owners"].int(), "owners in the state must be int16, got torch.int32"),
        (good["owners"] + 1, r"layer: in the state: owners\[32768\] is 2, but there are 2 rank"),
        (good["owners"] - 1, r"layer: in the state: owners\[0\] is -1, but there are 2 rank"),
    ):
        before = made["hash"].owners
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=message):
                made["hash"].load_state_dict({**good, "owners": bad}, assign=assign)
        assert made["hash"].owners is before


def test_states_that_are_refused(two_ranks):
    two_ranks(refused_states)


def other_map_on_one(rank):
    module = layer()
    module(keys(9))
    if rank == 1:
        module.owners = module.owners.flip(0).contiguous()
    module(keys(9))


def written_to_on_one(rank):
    module = layer()
    module.owners = module.owners.clone()
    module(keys(9))
    if rank == 1:
        module.owners[5] = 1
    module(keys(9))


def other_placement_on_one(rank):
    layer(placement=("hash", "modulo")[rank])(keys(9))


@pytest.mark.parametrize("function", [other_map_on_one, written_to_on_one, other_placement_on_one])
def test_ranks_with_two_maps(two_ranks, function):
    raised(two_ranks.outcomes(function), "RuntimeError", "layer", "placement")


def no_rank(rank):
    module = layer()
    module.owners = module.owners + rank
    module(keys(9))


def test_a_map_with_something_that_is_no_rank(two_ranks):
    outcomes = two_ranks.outcomes(no_rank)
    for outcome in outcomes:
        assert "layer: owners[32768] is 2, but there are 2 rank(s)" in outcome.message


def kept(rank):
    """Check that the map's hash is computed once, and not in each lookup."""
    module = layer()
    made = []
    with pytest.MonkeyPatch.context() as patch:
        xxh64 = sparsekit.tables.owners.hashing.xxh64

        def count(values, *rest):
            made.extend(value for value in values if len(value) == 2 * 65536)
            return xxh64(values, *rest)

        patch.setattr(sparsekit.tables.owners.hashing, "xxh64", count)
        for _ in range(3):
            module(keys(9))
        assert len(made) == 1
        module.owners = module.owners.clone()
        module(keys(9))
        assert len(made) == 2


def test_a_map_is_hashed_once(two_ranks):
    two_ranks(kept)


def groups_may_mix(rank):
    tables = [
        layer("a"),
        layer("b", placement="modulo"),
        layer("c"),
        layer("d", use_hashtable=False),
        layer("e"),
    ]
    tables[4].owners = reversed_map(tables[4])
    maps, numbers = TableBatch(range(6), [*tables, tables[0]], True).owners()
    assert numbers == [0, -1, 0, -1, 1]
    assert maps[0] is tables[0].owners
    assert maps[1] is tables[4].owners
    assert len(maps) == 2
    group = sparsekit.EmbeddingGroup({table.name: table for table in tables})
    positive = keys(9) + 3
    outputs = group({table.name: positive for table in tables})
    for table in tables:
        assert torch.equal(outputs[table.name], table(positive)), table.name


def test_a_group_of_several_placements(two_ranks):
    two_ranks(groups_may_mix)


def test_one_rank_has_no_map():
    for placement in ("hash", "modulo", None):
        made = layer(placement=placement)
        assert made.owners is None
        assert "owners" not in made.state_dict()
        assert made.placement == (placement or "hash")
    assert layer(use_hashtable=False).placement == "modulo"
    state = {**made.state_dict(), "owners": even_map(2, torch.device("cpu"))}
    with pytest.raises(RuntimeError, match="layer: the state has owners, though"):
        made.load_state_dict(state)


def test_placements_that_are_refused():
    message = "layer: placement='hash' needs the hash table"
    with pytest.raises(ValueError, match=message):
        layer(use_hashtable=False, placement="hash")
    with pytest.raises(ValueError, match="layer: placement must be one of hash, modulo; got 'mod'"):
        layer(placement="mod")
    with pytest.raises(ValueError, match=message):
        sparsekit.All2AllDenseEmbedding(
            9, 2, 1, 1, use_hashtable=False, placement="hash", name="layer"
        )
