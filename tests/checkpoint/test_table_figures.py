"""Figures of tables in checkpoints: known answers, unknown ones, chains, ranks and memory."""

import gc
import math
from dataclasses import replace

import pytest
import torch
from peak_memory import forget_peak, peak

import sparsekit
from sparsekit import checkpoint, optim
from sparsekit.checkpoint.manifest_file import read_manifest, write_manifest
from sparsekit.checkpoint.table_figures import table_figures
from sparsekit.checkpoint.table_lines import findings, lines

from . import evicting
from .models import OPTIMIZERS, saved_chain
from .models import made as made_model
from .models import train as train_model


def embedding(rows=100, dim=8, name="users", **options):
    return sparsekit.Embedding(rows, dim, name=name, **options)


def step(layer, optimizer, keys):
    layer(torch.tensor(keys)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def figures_of(layer, folder, optimizer=None, **options):
    path = checkpoint.save(torch.nn.ModuleDict({"t": layer}), folder / "saved", optimizer)
    (found,) = table_figures(folder / "saved", **options)
    assert found.name == "t", path
    return found


def test_rows_keys_norms_and_vectors_that_stand_out(tmp_path):
    layer = embedding()
    vectors = torch.zeros(9, 8)
    vectors[:, 0] = torch.tensor([3.0, 0, -4, 1, 1, math.inf, math.nan, 2, 5])
    vectors[6, 1] = math.inf  # counts as nan alone
    vectors[7, 2] = math.nan
    layer.assign(torch.tensor([5, -7, 2**62, 11, 12, 13, 14, 15, 16]), vectors)
    found = figures_of(layer, tmp_path)
    assert (found.rows, found.capacity, found.load) == (9, 100, 0.09)
    assert (found.dim, found.dtype, found.hash_table) == (8, "float32", True)
    assert (found.rows_of_ranks, found.skew) == ([9], 1.0)
    assert (found.lowest_key, found.highest_key) == (-7, 2**62)
    assert (found.zero.rows, found.zero.keys) == (1, [-7])
    assert (found.nan.rows, found.nan.keys) == (2, [14, 15])
    assert (found.inf.rows, found.inf.keys) == (1, [13])
    assert found.norms.quantiles == {0: 0, 0.01: 0, 0.1: 0, 0.5: 1, 0.9: 4, 0.99: 4, 1: 5}
    assert sum(found.norms.counts) == 6
    assert found.alike.compared == found.alike.of == 5
    assert found.alike.equal == 2  # keys 11 and 12
    assert found.alike.near == 4  # all but -4
    assert found.alike.pairs[0][2] == 1
    assert found.colliding_pairs == 9 * 8 / 2**65
    assert found.score_kind is found.ages is found.scores is found.clock is None
    assert findings(found) == [
        "3 vector(s) with nan or inf: 14, 15, 13",
        "2 of 5 compared vectors are equal to another",
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("saves_states", [True, False])
def test_dead_rows_are_those_that_no_update_has_changed(name, saves_states, tmp_path):
    layer = embedding()
    optimizer = OPTIMIZERS[name](layer.parameters())
    step(layer, optimizer, [1, 2, 3])
    layer(torch.tensor([10, 11]))  # get rows in training, and no gradient
    step(layer, optimizer, [3, 4])
    layer.erase(torch.tensor([2]))
    layer(torch.tensor([20]))  # gets a row that has had another key
    found = figures_of(layer, tmp_path, optimizer if saves_states else None)
    assert (found.rows, found.dead.rows, sorted(found.dead.keys)) == (6, 3, [10, 11, 20])
    assert found.alike.of == 3


@pytest.mark.parametrize(
    ("options", "full"),
    [({}, True), ({"use_hashtable": False}, False), ({"on_full": "evict", "max_rows": 99}, False)],
)
def test_a_full_table_is_mentioned_unless_it_evicts(options, full, tmp_path):
    layer = embedding(**options)
    layer.assign(torch.arange(96), torch.randn(96, 8))
    found = figures_of(layer, tmp_path)
    expected = ["nearly full: the fullest rank has 96.0% of its capacity in use"]
    assert findings(found) == (expected if full else [])


def test_a_skewed_table_is_mentioned(tmp_path):
    layer = embedding()
    layer.assign(torch.arange(8) * 4, torch.randn(8, 8))
    figures_of(layer, tmp_path)
    made = checkpoint.reshard(tmp_path / "saved", tmp_path / "two", 2)
    (found,) = table_figures(made)
    assert found.skew == max(found.rows_of_ranks) / 4
    found = replace(found, skew=1.75)
    assert findings(found) == ["skewed: the fullest rank has 1.75 times the mean of rows"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "initializer",
    [None, sparsekit.nn.Normal(0.5, 2), sparsekit.nn.Constant(1), torch.nn.init.xavier_uniform_],
    ids=["default", "normal", "constant", "function"],
)
def test_dead_rows_of_all_initializers_and_dtypes(initializer, dtype, tmp_path):
    layer = embedding(dtype=dtype, embedding_initializer=initializer)
    layer(torch.arange(50))
    with torch.no_grad():
        layer.weight[3, 7] *= 1.125
    found = figures_of(layer, tmp_path)
    assert (found.dead.rows, found.dead.keys) == (49, [0, 1, 2, 4, 5])
    assert any(line == "98% of the rows are dead: never updated" for line in findings(found))


def test_a_normal_vector_may_differ_in_the_last_bit(tmp_path):
    layer = embedding(embedding_initializer=sparsekit.nn.Normal(0, 1))
    layer(torch.arange(3))
    with torch.no_grad():
        layer.weight[0] = torch.nextafter(layer.weight[0], torch.tensor(math.inf))
        layer.weight[1, 0] *= 1 + 1e-5
    assert figures_of(layer, tmp_path).dead.keys == [0, 2]


def test_a_vector_that_an_update_has_left_in_its_place_is_not_dead(tmp_path):
    """FTRL with l1 makes a vector 0 again; its states tell that the row was updated."""
    layer = embedding(embedding_initializer=sparsekit.nn.Constant(0))
    optimizer = optim.Ftrl(layer.parameters(), l1=1e6, initial_accumulator_value=0.25)
    layer(torch.tensor([1, 2]))
    layer(torch.tensor([2])).sum().backward()
    optimizer.step()
    found = figures_of(layer, tmp_path, optimizer)
    assert (found.zero.rows, found.dead.keys) == (2, [1])
    assert figures_of(layer, tmp_path / "without").dead.rows == 2


def test_dead_rows_are_unknown_where_vectors_do_not_start_by_key(tmp_path):
    layer = embedding(use_hashtable=False, embedding_initializer=torch.nn.init.orthogonal_)
    found = figures_of(layer, tmp_path)
    assert found.dead is None
    assert "orthogonal_" in found.why_unknown
    assert found.colliding_pairs is None
    made = checkpoint.export(tmp_path / "saved", tmp_path / "out", "npz")
    checkpoint.import_tables(checkpoint.sources_of("npz", made), tmp_path / "imported")
    (found,) = table_figures(tmp_path / "imported")
    assert found.dead is None
    assert found.alike.of == found.rows == 100
    assert any(
        line.startswith("  dead    unknown: the checkpoint does not") for line in lines([found])
    )


def test_a_table_without_hash_table(tmp_path):
    layer = embedding(rows=20, use_hashtable=False)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    step(layer, optimizer, [0, 19])
    found = figures_of(layer, tmp_path, optimizer)
    assert (found.rows, found.capacity, found.dead.rows) == (20, 20, 18)
    assert found.parts["index"].in_memory == (0, 0)
    assert not any("full" in finding for finding in findings(found))


def test_an_empty_table(tmp_path):
    found = figures_of(embedding(score="lfu", on_full="evict"), tmp_path, modulo=5)
    assert (found.rows, found.load, found.skew, found.dead.rows) == (0, 0, 1, 0)
    assert found.norms is found.ages is found.scores is found.lowest_key is None
    assert found.alike.compared == 0
    assert found.sharing_ids == 0
    assert findings(found) == []
    assert "  norms   none" in list(lines([found]))


@pytest.mark.parametrize("score", ["lru", "lfu", "user", "ttl", "admission", "sketch"])
def test_ages_and_scores_are_those_of_the_layer(score, tmp_path):
    layer, optimizer = evicting.made(score)
    evicting.train(layer, optimizer, 0, 9)
    found = figures_of(layer, tmp_path, optimizer)
    rows = len(layer.table)
    words, kind = layer.scores[:rows], layer.life.score
    ages = (9 - kind.touched(words)).sort().values
    assert (found.score_kind, found.clock, found.clock_by_user) == (kind.name, 9, False)
    assert found.ages.quantiles[0] == ages[0]
    assert found.ages.quantiles[0.5] == ages[(rows - 1) // 2]
    assert found.ages.quantiles[1] == ages[-1]
    if kind.name == "lru":
        assert found.scores is None
    else:
        scores = (words >> 32).sort().values
        assert found.scores.quantiles[0.5] == scores[(rows - 1) // 2]
        assert found.scores.quantiles[1] == scores[-1]
    assert ("counts" in found.parts) == (score in ("admission", "sketch"))
    text = "\n".join(lines([found]))
    assert "(lookups; clock 9)" in text
    sparsekit.set_clock(layer, 100)
    found = figures_of(layer, tmp_path / "later")
    assert found.clock_by_user
    assert found.ages.quantiles[0] == ages[0] + 91
    assert "(units of set_clock; clock 100)" in "\n".join(lines([found]))


def test_a_chain_has_the_rows_of_all_its_checkpoints(tmp_path):
    model, _ = saved_chain(tmp_path / "chain")
    found = table_figures(tmp_path / "chain")
    assert [each.name for each in found] == ["users", "rows"]
    for each in found:
        layer = getattr(model, each.name)
        rows = layer.capacity if layer.table is None else len(layer.table)
        norms = layer.weight.detach()[:rows].norm(dim=1).sort().values
        assert each.rows == rows
        assert each.norms.quantiles[1] == pytest.approx(norms[-1])
        assert each.norms.quantiles[0.5] == pytest.approx(norms[(rows - 1) // 2], rel=2**-11)
        assert each.parts["vectors"].in_files > each.parts["vectors"].in_memory.in_use
    made = checkpoint.reshard(tmp_path / "chain", tmp_path / "whole", 1)
    for ours, whole in zip(found, table_figures(made), strict=True):
        for name in ("rows", "dead", "zero", "norms", "lowest_key", "highest_key"):
            assert getattr(ours, name) == getattr(whole, name), name


def test_rows_removed_in_a_chain_are_gone(tmp_path):
    layer = embedding()
    keep = checkpoint.Checkpoints(tmp_path, complete_every=9)
    layer.assign(torch.arange(10), torch.full((10, 8), math.nan))
    keep.save(1, layer)
    layer.erase(torch.arange(4))
    keep.save(2, layer)
    keep.close()
    (found,) = table_figures(tmp_path)
    assert (found.rows, found.nan.rows) == (6, 6)
    assert set(found.nan.keys) < set(range(4, 10))
    assert found.parts["changes"].in_files > 4 * 8
    assert found.parts["changes"].in_memory is None


def test_files_of_several_ranks_are_one_table(tmp_path):
    model, optimizers = made_model()
    train_model(model, optimizers, 0, 3)
    checkpoint.save(model, tmp_path / "one", optimizers)
    one = table_figures(tmp_path / "one")
    three = table_figures(checkpoint.reshard(tmp_path / "one", tmp_path / "three", 3))
    for ours, theirs in zip(one, three, strict=True):
        assert len(theirs.rows_of_ranks) == 3
        assert sum(theirs.rows_of_ranks) == ours.rows == theirs.rows
        assert theirs.skew == max(theirs.rows_of_ranks) * 3 / ours.rows
        assert theirs.capacity == 3 * ours.capacity
        assert theirs.norms == ours.norms
        assert (theirs.dead.rows, theirs.alike.equal) == (ours.dead.rows, ours.alike.equal)


def test_sizes_in_memory_are_those_of_the_memory_report(tmp_path):
    layer = embedding(1000, on_full="evict")
    optimizer = optim.PartialRowWiseAdam(layer.parameters())
    step(layer, optimizer, list(range(30)))
    found = figures_of(layer, tmp_path, optimizer)
    (memory,) = sparsekit.memory_report(layer).tables
    states = {name.partition(".")[2]: size for name, size in memory.states.items()}
    expected = {"index": memory.index, "vectors": memory.vectors, "scores": memory.scores, **states}
    assert {name: part.in_memory for name, part in found.parts.items()} == expected
    assert {name: part.in_files for name, part in found.parts.items()} == {
        **{name: size.in_use for name, size in expected.items()},
        "index": 30 * 8,
    }


def test_ids_sharing_ids(tmp_path):
    """Hash 30,000 ids modulo 20,000, and compare the estimate with the true fraction."""
    keys = torch.as_tensor(sparsekit.hashing.xxh64([f"id {i}" for i in range(30_000)]))
    keys = keys.remainder(20_000)
    layer = embedding(20_000, dim=1)
    layer(keys)
    found = figures_of(layer, tmp_path, modulo=20_000)
    true = (keys.bincount()[keys] > 1).double().mean()
    assert found.colliding_pairs is None
    assert found.sharing_ids == (found.rows - 1) / 19_999
    assert found.sharing_ids == pytest.approx(true.item(), abs=0.01)
    with pytest.raises(ValueError, match=r"modulo 100: table t has the key \d+"):
        table_figures(tmp_path / "saved", modulo=100)
    layer.assign(torch.tensor([-3]), torch.ones(1, 1))
    with pytest.raises(ValueError, match="modulo 20000: table t has the key -3"):
        figures_of(layer, tmp_path / "negative", modulo=20_000)


def test_names_choose_tables(tmp_path):
    saved_chain(tmp_path)
    names = [each.name for each in table_figures(tmp_path, ["rows", "users", "rows"])]
    assert names == ["rows", "users"]
    with pytest.raises(ValueError, match=r"no table named user; did you mean users\?; tables: us"):
        table_figures(tmp_path, ["user"])


@pytest.mark.parametrize("name", ["manifest.json", "table-0000-rank-0000.safetensors"])
def test_a_damaged_file_is_named(name, tmp_path):
    layer = embedding()
    layer(torch.arange(9))
    figures_of(layer, tmp_path)
    path = tmp_path / "saved" / name
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError, match=name):
        table_figures(tmp_path / "saved")


@pytest.mark.parametrize("groups", [[{}], [5], 7, [{"params": ["t.weight"]}]])
def test_damaged_settings_of_an_optimizer_are_named(groups, tmp_path):
    layer = embedding()
    optimizer = optim.RMSProp(layer.parameters())
    step(layer, optimizer, [1])
    figures_of(layer, tmp_path, optimizer)
    folder = tmp_path / "saved"
    manifest = read_manifest(folder)
    manifest.optimizers[0]["groups"] = groups
    for name in ("manifest.json", "manifest.crc32"):
        (folder / name).unlink()
    write_manifest(folder, manifest)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"manifest\.json: is damaged: settings of"
    ):
        table_figures(folder)


def test_memory_does_not_grow_with_the_table(tmp_path):
    """Read 768 MiB of vectors and states, half of the vectors initial ones, in a quarter of it."""
    rows, dim = 262_144, 256
    layer = embedding(rows, dim)
    optimizer = optim.LazyAdam(layer.parameters())
    layer(torch.arange(4)).sum().backward()
    optimizer.step()
    layer(torch.arange(rows))
    with torch.no_grad():
        layer.weight[: rows // 2] += 1
    checkpoint.save(layer, tmp_path / "saved", optimizer)
    optimizer.zero_grad()
    del layer, optimizer
    gc.collect()
    before = forget_peak()
    (found,) = table_figures(tmp_path / "saved")
    assert peak() - before < 192 << 20
    assert found.rows == rows
    assert found.dead.rows == rows // 2
    assert found.alike.compared == 8192
