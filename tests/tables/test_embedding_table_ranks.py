"""A table sends other ranks all facts on which they must agree, and checks its weight."""

import re
import types

import pytest
import torch

from sparsekit.nn import Constant
from sparsekit.tables import embedding_table as module
from sparsekit.tables.owners import even_map

from .made import of_rank, table_of

T = torch.tensor
CPU = torch.device("cpu")


def test_the_exchange_is_that_of_the_same_ranks(monkeypatch):
    of_rank(monkeypatch, 1, 3)
    table, asked = table_of(process_group="group"), []
    exchange = types.SimpleNamespace(rank=1, world_size=3)
    monkeypatch.setattr(module, "exchange_of", lambda *given: asked.append(given) or exchange)
    assert table.process_exchange() is table.exchange is exchange
    assert asked == [("group", CPU)] * 2
    for rank, world_size in ((2, 3), (1, 2), (0, 1)):
        exchange = types.SimpleNamespace(rank=rank, world_size=world_size)
        if world_size == 1:
            exchange = None
        assert table.process_exchange() is exchange
        with pytest.raises(RuntimeError) as raised:
            table.exchange  # noqa: B018
        assert str(raised.value) == (
            f"n: made on rank 1 of 3, whose part of the table it holds, but this is rank {rank} of "
            f"{world_size}; make layers after torch.distributed has been initialised"
        )
    of_rank(monkeypatch, 0, 1)
    table_of().check_ranks(None)


@pytest.mark.parametrize(
    ("dtype", "wire", "on_wire", "of_sums"),
    [
        (torch.float32, None, torch.float32, torch.float32),
        (torch.float64, None, torch.float64, torch.float64),
        (torch.bfloat16, None, torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64, torch.float32, torch.float32),
    ],
)
def test_dtypes_on_the_wire(dtype, wire, on_wire, of_sums):
    table = table_of(dtype=dtype)
    table.wire_dtype = wire
    assert (table.dtype_on_wire, table.sum_dtype_on_wire) == (on_wire, of_sums)


@pytest.mark.parametrize(("reduction", "divisor"), [("mean", 3), ("sum", 1)])
def test_the_divisor_of_gradients(reduction, divisor, monkeypatch):
    of_rank(monkeypatch, 1, 3)
    assert table_of(gradient_reduction=reduction).gradient_divisor == divisor


@pytest.mark.parametrize("insert", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_only_training_inserts(training, insert):
    assert table_of(insert=insert).train(training).inserts == (training and insert)


SIGNATURE = (
    "n (dim 2, torch.float32, training, hash table, placement modulo, all_to_all, mean, "
    "torch.float32 between ranks, seed 7, max_keys_per_rank None, inserting, "
    "Uniform(low=-0.05, high=0.05), padding_key None)"
)
MODULO = {"placement": "modulo"}


def test_ranks_compare_a_text_of_all_facts(monkeypatch):
    made = table_of()
    assert made.signature(7, [0, 1], False) == SIGNATURE
    assert made.signature(7, [0, 1], True) == SIGNATURE.replace("modulo", "modulo, gradients")
    assert made.signature(8, [0, 1], False) == SIGNATURE.replace("seed 7", "seed 8")
    changed = {
        "dim 5": table_of(dim=5),
        "torch.float64, training": table_of(dtype=torch.float64),
        "torch.float64 between ranks": table_of(dtype=torch.float64),
        "torch.bfloat16 between ranks": table_of(wire_dtype=torch.bfloat16),
        "torch.float32, evaluation": table_of().eval(),
        ", sum, ": table_of(gradient_reduction="sum"),
        "max_keys_per_rank 3": table_of(max_keys_per_rank=3),
        "insert=False": table_of(insert=False),
        "Constant(value=3.0)": table_of(embedding_initializer=Constant(3.0)),
        "padding_key -1)": table_of(padding_key=-1),
        "other (dim": table_of(name="other"),
    }
    texts = {each.signature(7, [0, 1], False) for each in changed.values()}
    assert len(texts) == len(changed) - 1  # one has two facts
    for said, each in changed.items():
        assert said in each.signature(7, [0, 1], False)
    rows = table_of(use_hashtable=False, seed=1)
    assert rows.signature(7, [0, 1], False) == SIGNATURE.replace(
        "hash table", "row numbers"
    ).replace("None)", "None, 9 rows)")
    made.max_norm = 0.5
    assert ", max_norm 0.5 of 2.0)" in made.signature(7, [0, 1], False)
    made.strategy = "reduce_scatter"
    assert ", reduce_scatter, mean" in made.signature(7, [0, 1], False)
    anonymous = table_of(name=None)
    assert re.match(
        r"EmbeddingTable_\d+ \(dim .* seed 7 drawn by torch, for want of a name; name the layer to "
        r"have one on all ranks, max_keys",
        anonymous.signature(7, [0, 1], False),
    )
    assert "drawn" not in table_of(name=None, seed=3).signature(7, [0, 1], False)
    of_rank(monkeypatch, 1, 2)
    one, other = table_of(), table_of()
    other.owners = even_map(2, CPU).flip(0)
    codes = [re.search("placement hash ([0-9a-f]{16}), ", each.signature(7, [1, 2], False))[1]
             for each in (one, other)]  # fmt: skip
    assert codes[0] == one._code_of_map.of("n", one.owners, 2)
    assert codes[0] != codes[1]
    assert table_of(**MODULO).signature(7, [1, 2], False) == SIGNATURE
    other.owners = other.owners + 1
    with pytest.raises(ValueError, match=r"^n: owners\[0\] is 2, but there are 2 rank"):
        other.signature(7, [1, 2], False)


@pytest.mark.parametrize("shard", [[0, 2], [1, 3], [2, 1]])
def test_the_table_of_another_rank_is_noticed(shard, monkeypatch):
    of_rank(monkeypatch, 1, 2)
    said = (
        f"^n: this is rank 1 of 2, but holds the table of rank {shard[0]} of {shard[1]}: something "
        f"has copied a model over the others', tables included. Wrap models with "
    )
    with pytest.raises(RuntimeError, match=said):
        table_of().signature(7, shard, False)


# Checks of the weight


def test_a_weight_is_checked_after_writes_and_once_in_each_mode(monkeypatch):
    table, checks = table_of(4), []
    monkeypatch.setattr(module, "refuse_lost_values", lambda *given: checks.append(given))
    for inserts, written, expected in [
        (True, False, [(table, False)]),
        (False, False, [(table, False)]),
        (False, False, []),  # found to be right before
        (False, True, [(table, True)]),
        (True, False, [(table, False)]),
        (True, False, [(table, False)]),  # inserts are checked each time
        (False, False, []),
    ]:
        if written:
            with torch.no_grad():
                table.weight[0] = 3
        table.prepare(inserts)
        assert checks == expected
        checks.clear()
        table.weight.note_version()
    assert table.checked_modes == {False}
    table.checked_modes = {True}
    table.prepare(True)
    assert checks == []
    table._parameters["weight"] = torch.nn.Parameter(torch.zeros(9, 2))
    table.prepare(False)
    assert checks == [(table, False)]
    table_of(use_hashtable=False).prepare(True)
    assert len(checks) == 1


def test_texts_of_tables():
    line = "name='n', capacity=9, dim=2, dtype=torch.float32"
    assert table_of(4, 5).extra_repr() == f"{line}, rows=2"
    assert table_of(use_hashtable=False).extra_repr() == f"{line}, use_hashtable=False"
    assert table_of(name=None).extra_repr().startswith("name='EmbeddingTable_")
    assert " (" not in table_of(name=None).extra_repr()
