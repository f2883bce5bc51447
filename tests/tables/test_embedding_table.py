"""A rank's table keeps its options in copies and pickles, and can be reset and moved."""

import copy
import gc
import itertools
import pickle
import re
import types
import weakref

import pytest
import torch

from sparsekit.distributed.world import settings
from sparsekit.nn import Normal, Uniform
from sparsekit.tables import embedding_table as module
from sparsekit.tables.embedding_table import EmbeddingTable
from sparsekit.tables.hash_table import HashTable
from sparsekit.tables.owners import even_map
from sparsekit.tables.weight import EmbeddingWeight

from .made import of_rank, table_of

T = torch.tensor
CPU = torch.device("cpu")
OPTIONS = {
    "key_dtype": torch.int32, "padding_key": 3, "gradient_reduction": "sum", "seed": 5,
    "name": "users", "placement": "modulo", "max_keys_per_rank": 7, "insert": False,
    "wire_dtype": torch.bfloat16, "embedding_initializer": Normal(2.0), "dtype": torch.float64,
    "capacity": 11, "dim": 3,
}  # fmt: skip


def attributes(table):
    own = (
        "rank world_size dedupe strategy wire_dtype max_keys_per_rank insert capacity padding_key "
        "embedding_vec_size key_dtype initializer on_full gradient_reduction placement name "
        "max_norm norm_type _named"
    )
    return {name: getattr(table, name) for name in own.split()}


DEFAULTS = {
    "rank": 0, "world_size": 1, "dedupe": True, "strategy": "all_to_all", "wire_dtype": None,
    "max_keys_per_rank": None, "insert": True, "capacity": 9, "padding_key": None,
    "embedding_vec_size": 2, "key_dtype": torch.int64, "initializer": Uniform(),
    "on_full": "error", "gradient_reduction": "mean", "placement": "hash", "name": "n",
    "max_norm": None, "norm_type": 2.0, "_named": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "copied",
    [lambda one: one, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
    ids=["made", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("given", [{}, OPTIONS], ids=["defaults", "options"])
def test_options_are_kept_in_copies_too(given, copied):
    table = copied(table_of(**given))
    renamed = {"dim": "embedding_vec_size", "embedding_initializer": "initializer"}
    expected = {renamed.get(name, name): value for name, value in given.items()}
    seed, dtype = expected.pop("seed", None), expected.pop("dtype", torch.float32)
    assert attributes(table) == {**DEFAULTS, **expected}
    assert seed is None or int(table.seed) == seed
    assert table._given_seed == int(table.seed)
    assert (table.weight.dtype, table.weight.shape) == (
        dtype, (table.capacity, table.embedding_vec_size),
    )  # fmt: skip
    assert type(table.weight) is EmbeddingWeight
    assert (table.seed.dtype, table.seed.shape) == (torch.int64, (1,))
    assert (table.shard.dtype, table.shard.tolist()) == (torch.int64, [0, 1])
    assert table.owners is None
    assert (table.table.capacity, table.table.name) == (table.capacity, table.name)
    assert table.table.rows_of._layer() is table
    assert table.weight._table() is table.table
    assert table.checked_modes == set()


def test_a_table_without_a_name_is_numbered():
    one, other = table_of(name=None), table_of(name=None)
    numbers = [int(re.fullmatch(r"EmbeddingTable_(\d+) \(9 rows of 2\)", t.name)[1])
               for t in (one, other)]  # fmt: skip
    assert numbers[1] == numbers[0] + 1
    assert one._short_name == f"EmbeddingTable_{numbers[0]}"
    assert one.table.name == one.name
    assert (one._named, one._given_seed) == (False, None)
    assert table_of(name="a (b)")._short_name == "a (b)"
    with pytest.raises(ValueError, match=r"^EmbeddingTable_\d+ \(0 rows of 2\): max_vocabulary"):
        table_of(name=None, capacity=0)


def test_the_group_is_shared_by_copies_and_dropped_by_pickles(monkeypatch):
    group, of_init = object(), object()
    monkeypatch.setattr(settings, "process_group", of_init)
    table = table_of(process_group=group)
    assert table.process_group is copy.deepcopy(table).process_group is group
    assert table_of().process_group is of_init
    assert pickle.loads(pickle.dumps(table)).process_group is None


def test_where_a_table_is(monkeypatch):
    asked, world = [], types.SimpleNamespace(rank=lambda: 2, size=lambda: 5)
    exchange = types.SimpleNamespace(rank=1, world_size=3)
    monkeypatch.setattr(module, "exchange_of", lambda *given: asked.append(given) or exchange)
    monkeypatch.setattr(module, "group_of", lambda group: asked.append(group) or world)
    assert module._place("group", CPU) == (1, 3)
    assert module._place("group", torch.device("meta")) == (2, 5)
    assert asked == [("group", CPU), "group"]
    exchange = world = None
    assert module._place("group", CPU) == module._place("group", torch.device("meta")) == (0, 1)


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 3), (2, 3)])
def test_a_rank_of_several(rank, world_size, use_hashtable, monkeypatch):
    of_rank(monkeypatch, rank, world_size)
    table = table_of(use_hashtable=use_hashtable, seed=4)
    assert (table.rank, table.world_size, table.shard.tolist()) == (
        rank, world_size, [rank, world_size],
    )  # fmt: skip
    placed = use_hashtable and world_size > 1
    assert table.owners is (even_map(world_size, CPU) if placed else None)
    assert ("owners" in table.state_dict()) == placed
    assert table_of(placement="modulo").owners is None
    keys = torch.arange(60)
    of_ranks = []
    for own in range(world_size):
        of_rank(monkeypatch, own, world_size)
        of_ranks.append(table_of(use_hashtable=use_hashtable).owned(keys).tolist())
    assert sorted(itertools.chain(*of_ranks)) == keys.tolist()
    assert all(each == sorted(each) for each in of_ranks)
    assert table.owned(keys).tolist() == of_ranks[rank]
    if use_hashtable:
        assert table.table.rank == rank
        assert not table.weight.any()
        if placed:  # all keys are on this rank
            table.owners = torch.full_like(table.owners, rank)
            assert table.owned(keys).tolist() == keys.tolist()
        return
    assert of_ranks[rank] == keys[rank::world_size].tolist()
    expected = torch.zeros(9 * world_size, 2)
    Uniform().fill_(expected, 0, 1, seed=4)
    assert torch.equal(table.weight, expected[rank::world_size])


def test_an_initializer_is_asked_for_the_table_of_all_ranks(monkeypatch):
    of_rank(monkeypatch, 1, 3)
    shapes = []
    table_of(embedding_initializer=lambda t: (shapes.append(tuple(t.shape)), t.normal_())[1])
    assert shapes == [(27, 2)]
    with pytest.raises(TypeError, match=r"^n: embedding_initializer eye_ does not tell"):
        table_of(embedding_initializer=torch.nn.init.eye_)
    table_of(embedding_initializer=torch.nn.init.eye_, use_hashtable=False)


# Resets and moves


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize(
    ("options", "same"), [({}, True), ({"name": None}, False), ({"name": None, "seed": 0}, True)]
)
def test_a_reset(options, same, use_hashtable):
    table = table_of(*([1, 2] if use_hashtable else []), use_hashtable=use_hashtable, **options)
    calls = []
    table.weight.before_read = lambda weight, rows: calls.append(rows)
    first = table.weight.detach().clone(), int(table.seed)
    table.weight.moved, table.checked_modes = True, {False}
    table.shard.zero_()
    with torch.no_grad():
        table.weight.fill_(7)
    calls.clear()
    table.reset_parameters()
    assert calls[0] is None
    assert table.weight.moved is False
    assert table.checked_modes == set()
    assert table.shard.tolist() == [0, 1]
    assert (int(table.seed) == first[1]) == same
    if use_hashtable:
        assert len(table.table) == 0
        assert not table.weight.any()
        assert not table.weight.written()
    else:
        assert torch.equal(table.weight, first[0]) == same
        assert not (table.weight == 7).any()


def test_a_table_on_meta_is_reset_where_it_gets_memory(monkeypatch):
    of_rank(monkeypatch, 1, 2)
    table = table_of(device="meta")
    assert {each.device.type for each in (table.weight, *table.buffers())} == {"meta"}
    table.reset_parameters()
    assert repr(table).splitlines()[1].strip() == (
        "name='n', capacity=9, dim=2, dtype=torch.float32"
    )
    for call in (table.refuse_meta, table.process_exchange, lambda: table.exchange):
        with pytest.raises(RuntimeError, match=r"^n: the layer is on meta, and has no vectors"):
            call()
    with torch.device("meta"):
        table.to_empty(device="cpu")
    table.refuse_meta()
    assert {each.device.type for each in table.state_dict().values()} == {"cpu"}
    assert table.shard.tolist() == [1, 2]
    assert int(table.seed) == table._given_seed
    assert table.owners is even_map(2, CPU)
    assert (len(table.table), bool(table.weight.any())) == (0, False)
    assert type(table.weight) is EmbeddingWeight
    assert table.weight._table() is table.table


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_no_seed_is_drawn_on_meta(use_hashtable):
    state = torch.get_rng_state()
    table = table_of(name=None, device="meta", use_hashtable=use_hashtable)
    table.reset_parameters()
    assert torch.equal(torch.get_rng_state(), state)
    for call in (table.refuse_meta, table.process_exchange):
        with pytest.raises(RuntimeError, match=r"EmbeddingTable_.*: the layer is on meta"):
            call()
    table.to_empty(device="cpu")
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_move_keeps_type_keys_and_marks(frozen):
    table = table_of(4, 5).requires_grad_(not frozen)
    calls, before = [], table.changes
    table.weight.before_read = lambda weight, rows: calls.append(weight.dtype)
    assert table.double() is table
    assert calls == [torch.float32]
    assert table.changes > before
    assert (table.weight.dtype, type(table.weight)) == (torch.float64, EmbeddingWeight)
    assert table.weight.requires_grad != frozen
    assert table.table.keys().tolist() == table.weight.keys().tolist() == [4, 5]
    assert table.weight[:2].tolist() == [[1, 1], [2, 2]]
    seed = int(table.seed)
    for _ in range(2):
        table.to("meta")
        assert type(table.weight) is EmbeddingWeight
        assert table.weight.requires_grad != frozen
    table.to_empty(device="cpu")
    assert (type(table.weight), table.weight.requires_grad) == (EmbeddingWeight, not frozen)
    assert (len(table.table), int(table.seed)) == (0, seed)
    rows = table_of(use_hashtable=False).to("meta").to_empty(device="cpu")
    assert torch.equal(rows.weight, table_of(use_hashtable=False).weight)


class Other(torch.nn.Parameter):
    pass


def test_another_kind_of_weight_is_left(monkeypatch):
    table = table_of(4)
    table._parameters["weight"] = Other(torch.zeros(9, 2))
    table.double()
    assert type(table.weight) is not EmbeddingWeight
    table.reset_parameters()


def test_a_map_of_owners_moves(monkeypatch):
    of_rank(monkeypatch, 0, 2)
    table, own = table_of(), even_map(2, CPU).flip(0)
    table._apply(torch.clone)
    assert table.owners is even_map(2, CPU)
    table.owners = own
    table._apply(torch.clone)
    assert table.owners is not own
    assert torch.equal(table.owners, own)
    table.to("meta")
    assert table.owners.is_meta
    table.to_empty(device="cpu")
    assert table.owners is even_map(2, CPU)
    modulo = table_of(placement="modulo")
    modulo.to("meta").to_empty(device="cpu")
    assert modulo.owners is None


def test_a_table_is_freed_with_its_last_reference():
    table = table_of(4)
    gone, weight, inner = weakref.ref(table), table.weight, table.table
    gc.disable()
    try:
        del table
        assert gone() is None
    finally:
        gc.enable()
    inner.clear_()
    assert weight[0].tolist() == [1, 1]


def test_attributes_that_are_set_count_as_changes():
    table, before = table_of(4), 0
    for name, value in (("insert", False), ("strategy", "x"), ("weight", table_of().weight)):
        before = table.changes
        setattr(table, name, value)
        assert table.changes == before + 1
    assert EmbeddingTable.changes == 0
    assert table.weight._table() is table.table
    other = table_of(7, 8).table
    table.table = other
    assert table.weight._table() is other
    assert other.rows_of._layer() is table
    table.weight = torch.nn.Parameter(torch.zeros(9, 2))
    assert other.rows_of._layer() is table
    sharded = torch.zeros(9, 2)
    sharded.device_mesh = 1
    with pytest.raises(
        RuntimeError, match=r"^n: fully_shard would take the table apart, .*ignored"
    ):
        table.weight = sharded
    table.other = sharded  # only the weight


def test_an_older_pickle_is_tied():
    table = table_of(4)
    table.table.rows_of, table.weight._table = HashTable.rows_of, None
    other = EmbeddingTable.__new__(EmbeddingTable)
    state = {n: value for n, value in vars(table).items() if n not in ("_named", "changes")}
    other.__setstate__({**state, "name": "n (b)"})
    assert (other._short_name, other.changes) == ("n (b)", 0)
    assert other.table.rows_of._layer() is other
    assert other.weight._table() is other.table


def test_scripts_are_refused():
    with pytest.raises(NotImplementedError, match=r"^n: "):
        table_of().__prepare_scriptable__()
