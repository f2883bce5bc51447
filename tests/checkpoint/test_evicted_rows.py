"""Checkpoints of tables that evict: scores and clock come back, and removed keys do not."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp

import sparsekit
from sparsekit import checkpoint, cli
from sparsekit.checkpoint import CheckpointError, Checkpoints, DcpState, manifest_file
from sparsekit.checkpoint.manifest_file import read_manifest
from sparsekit.checkpoint.tensor_file import TensorFile

from .evicting import OPTIMIZERS, SCORES, keys_of, made, state_of, train
from .models import assert_equal
from .numpy_reader import read_table
from .test_damage import rewritten


def save(layer, optimizer, folder):
    path = checkpoint.save(layer, folder / "a", optimizer)
    return lambda to, of: checkpoint.load(to, path, of)


def async_save(layer, optimizer, folder):
    saving = checkpoint.async_save(layer, folder / "a", optimizer)
    train(layer, optimizer, 50, 53)  # changes nothing in what is saved
    path = saving.wait()
    return lambda to, of: checkpoint.load(to, path, of)


def checkpoints(layer, optimizer, folder):
    keep = Checkpoints(folder)
    keep.async_save(3, layer, optimizer).wait()
    keep.close()
    return lambda to, of: Checkpoints(folder).load(to, of)


def through_dcp(layer, optimizer, folder):
    dcp.save({"app": DcpState(layer, optimizer)}, checkpoint_id=folder / "a", no_dist=True)
    return lambda to, of: dcp.load(
        {"app": DcpState(to, of, load_from=folder / "a")}, checkpoint_id=folder / "a", no_dist=True
    )


def torch_save(layer, optimizer, folder):
    file = io.BytesIO()
    torch.save((layer.state_dict(), optimizer.state_dict()), file)

    def load(to, of):
        file.seek(0)
        state, of_optimizer = torch.load(file)
        to.load_state_dict(state)
        of.load_state_dict(of_optimizer)
        of.step()  # matches its states with the rows

    return load


WAYS = [save, async_save, checkpoints, through_dcp, torch_save]


@pytest.mark.pairs
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("score", SCORES)
def test_scores_and_the_clock_come_back(tmp_path, way, score):
    layer, optimizer = made(score)
    train(layer, optimizer, 0, 12)
    assert layer.life.evicted + layer.life.expired > 20
    expected, keys = state_of(layer, optimizer), layer.table.keys()
    load = way(layer, optimizer, tmp_path)
    loaded, of_loaded = made(score, seed=9)
    train(loaded, of_loaded, 30, 35)
    load(loaded, of_loaded)
    assert_equal(state_of(loaded, of_loaded), expected)
    assert torch.equal(loaded.table.keys(), keys)


@pytest.mark.pairs
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("changes", [False, True])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path, score, optimizer, changes):
    layer, of_layer = made(score, optimizer)
    keep = Checkpoints(tmp_path, complete_every=99)
    for step in range(12):
        train(layer, of_layer, step, step + 1)
        if changes or step == 11:
            keep.save(step, layer, of_layer)
    loaded, of_loaded = made(score, optimizer, seed=9)
    keep.load(loaded, of_loaded)
    for each, of_each in ((layer, of_layer), (loaded, of_loaded)):
        train(each, of_each, 12, 25)
    assert_equal(state_of(loaded, of_loaded), state_of(layer, of_layer))
    assert torch.equal(loaded.table.keys(), layer.table.keys())


def test_a_clock_that_the_user_sets_is_the_users_after_a_load(tmp_path):
    layer, optimizer = made("ttl")
    sparsekit.set_clock(layer, 1000)
    train(layer, optimizer, 0, 2)
    path = checkpoint.save(layer, tmp_path / "a", optimizer)
    loaded, of_loaded = made("ttl")
    checkpoint.load(loaded, path, of_loaded)
    for each, of_each in ((layer, optimizer), (loaded, of_loaded)):
        train(each, of_each, 2, 4)
        assert int(each.clock) == 1000
        sparsekit.set_clock(each, 1011)  # the keys of the first steps have expired
        train(each, of_each, 4, 5)
    assert len(layer.table) < 25
    assert_equal(state_of(loaded, of_loaded), state_of(layer, optimizer))


def plain(**options):
    return sparsekit.DistributedEmbedding("sum", 120, 8, 1, name="ids", **options)


def test_a_checkpoint_without_scores_into_a_layer_with_them(tmp_path):
    layer = plain()
    layer.assign(torch.arange(5), torch.ones(5, 8))
    loaded, optimizer = made()
    train(loaded, optimizer, 0, 7)
    checkpoint.load(loaded, checkpoint.save(layer, tmp_path / "a"))
    assert loaded.table.keys().tolist() == list(range(5))
    assert not loaded.scores.any()
    assert int(loaded.clock) == 7


def test_a_checkpoint_with_scores_into_a_layer_without(tmp_path):
    layer, optimizer = made()
    train(layer, optimizer, 0, 7)
    loaded = plain()
    checkpoint.load(loaded, checkpoint.save(layer, tmp_path / "a"))
    assert loaded.scores is loaded.clock is None
    assert torch.equal(loaded.table.keys(), layer.table.keys())
    assert torch.equal(loaded.weight, layer.weight)


def test_scores_of_another_kind(tmp_path):
    """The clock at which a key came last comes back."""
    layer, optimizer = made("lru")
    train(layer, optimizer, 0, 9)
    then = layer.scores.clone()
    counting = made("lfu")[0]
    checkpoint.load(counting, checkpoint.save(layer, tmp_path / "a"))
    used = torch.arange(120) < len(layer.table)
    assert torch.equal(counting.scores, torch.where(used, then + 2**32, 0))
    checkpoint.load(made("lru")[0], checkpoint.save(counting, tmp_path / "b"))
    loaded = made("lru")[0]
    checkpoint.load(loaded, tmp_path / "b")
    assert torch.equal(loaded.scores, then)
    assert int(loaded.clock) == 9
    sparsekit.set_clock(layer, 2**32)
    with pytest.raises(CheckpointError, match=r"clock 4294967296, and LFU.* counts to 4294967295"):
        checkpoint.load(counting, checkpoint.save(layer, tmp_path / "c"))
    assert torch.equal(counting.scores, torch.where(used, then + 2**32, 0))


def keeps_changes(folder):
    return Checkpoints(folder, complete_every=999, keep=999)


def loads_as_it_is(path, layer, optimizer, **options):
    loaded, of_loaded = made(seed=9, **options)
    checkpoint.load(loaded, path, of_loaded)
    assert_equal(state_of(loaded, of_loaded), state_of(layer, optimizer))
    assert torch.equal(loaded.table.keys(), layer.table.keys())


def rows_by_key(layer, optimizer):
    """Return for each key all that its row has, as bytes."""
    state = state_of(layer, optimizer)
    columns = [value for value in state.values() if value.dim() and len(value) == len(layer.table)]
    return {
        int(key): b"".join(column[i].numpy().tobytes() for column in columns[1:])
        for i, key in enumerate(state["keys"])
    }


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_a_chain_over_a_run_that_evicts(tmp_path, score, in_background):
    layer, optimizer = made(score)
    keep, before = keeps_changes(tmp_path), {}
    removed = 0
    for step in range(0, 26, 2):
        train(layer, optimizer, step, step + 1)
        train(layer, optimizer, step + 1, step + 2, slice(5))
        if step == 16:
            assert layer.evict(fraction=0.3) > 0
        if step == 20:
            assert layer.erase(keys_of(19)) > 0
        if in_background:
            path = keep.async_save(step, layer, optimizer).wait()
        else:
            path = keep.save(step, layer, optimizer)
        loads_as_it_is(path, layer, optimizer, score=score)
        (table,) = read_manifest(path).tables.values()
        now = rows_by_key(layer, optimizer)
        (shard,) = table.shards
        assert table.complete == (step == 0)
        assert shard.size == len(now)
        if step:
            assert shard.removed == len(before.keys() - now.keys())
            changed = {key for key, row in now.items() if before.get(key) != row}
            with TensorFile(path / shard.file) as file:
                written = set(file.read("keys").tolist())
                # Rows that have only moved are written too.
                assert written >= changed
                assert len(written) <= len(changed) + shard.removed
        removed += shard.removed
        before = now
    assert removed > 60
    keep.close()
    # Every earlier state is still there.
    loaded, of_loaded = made(score)
    for step in (4, 18, 24):
        path = tmp_path / f"step-{step:012d}"
        checkpoint.load(loaded, path, of_loaded)
        state = state_of(loaded, of_loaded)
        rows = read_table(path, "table")
        assert sorted(rows) == state["keys"].tolist()
        for name in ("vectors", "scores", "exp_avg", "exp_avg_sq", "row_step"):
            for i, key in enumerate(state["keys"].tolist()):
                assert rows[key][name].tolist() == state[name][i].tolist()


def chain_of_twelve(folder, **options):
    layer, optimizer = made(**options)
    keep = keeps_changes(folder)
    for step in range(12):
        train(layer, optimizer, step, step + 1)
        path = keep.save(step, layer, optimizer)
    keep.close()
    assert sum(s.removed for s in read_manifest(path).tables["table"].shards) > 0
    return layer, optimizer, path


@pytest.mark.parametrize("options", [{"capacity": 60}, {"placement": "modulo"}], ids=str)
def test_a_chain_into_another_table(tmp_path, options):
    """A table may have room for no more rows than are left."""
    layer, optimizer, path = chain_of_twelve(tmp_path)
    loaded, of_loaded = made(**options)
    checkpoint.load(loaded, path, of_loaded)
    assert_equal(state_of(loaded, of_loaded), state_of(layer, optimizer))


def test_a_chain_into_a_table_without_a_hash_table(tmp_path):
    layer, keep = plain(), keeps_changes(tmp_path)
    layer.assign(torch.arange(9), torch.ones(9, 8))
    keep.save(0, layer)
    assert layer.erase(torch.tensor([3, 4])) == 2
    loaded = plain(use_hashtable=False, embedding_initializer=sparsekit.nn.Constant(7.0))
    checkpoint.load(loaded, keep.save(1, layer))
    assert loaded.weight[:10, 0].tolist() == [1, 1, 1, 7, 7, 1, 1, 1, 1, 7]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_chain_as_files(tmp_path, world):
    layer, optimizer, path = chain_of_twelve(tmp_path / "a", score="lfu")
    expected = state_of(layer, optimizer)
    out = checkpoint.reshard(path, tmp_path / "b", world)
    loaded, of_loaded = made("lfu", seed=9)
    checkpoint.load(loaded, out, of_loaded)
    assert_equal(state_of(loaded, of_loaded), expected)
    assert not checkpoint.diff(path, out)
    tables = checkpoint.export(path, tmp_path / "c", "safetensors")
    with TensorFile(tables / "table.safetensors") as file:
        order = file.read("keys").argsort()
        for name in ("keys", "vectors", "scores", "exp_avg", "row_step"):
            assert torch.equal(file.read(name)[order], expected[name])
    layer.scores[0] += 1
    found = checkpoint.diff(checkpoint.save(layer, tmp_path / "d", optimizer), out)
    assert found.tables["table"].changed == {"scores": (1, 1.0)}
    other = checkpoint.save(made("lru")[0], tmp_path / "e")
    found = checkpoint.diff(checkpoint.save(made("lfu")[0], tmp_path / "f"), other)
    assert found.tables["table"].shape == "score_kind lfu and lru"


def test_inspect_tells_of_removed_keys_and_scores(tmp_path, capsys):
    *_, path = chain_of_twelve(tmp_path, score="lfu")
    removed = read_manifest(path).tables["table"].shards[0].removed
    assert cli.main(["checkpoint", "inspect", str(path)]) == 0
    told = capsys.readouterr().out
    assert f"changed rows of 60, {removed} keys removed, dim 8" in told
    assert "scores: lfu, clock 12" in told


def small():
    layer = sparsekit.Embedding(9, 2, name="ids", seed=3)
    layer.assign(torch.arange(1, 7), torch.ones(6, 2))
    return layer


def found_in(path):
    loaded = sparsekit.Embedding(9, 2, name="ids")
    checkpoint.load(loaded, path)
    keys = loaded.table.keys()
    return dict(zip(keys.tolist(), loaded.vectors(keys)[:, 0].tolist(), strict=True))


def test_a_row_of_zeros_is_a_row(tmp_path):
    layer, keep = small(), keeps_changes(tmp_path)
    keep.save(0, layer)
    layer.assign(torch.tensor([2, 8]), torch.zeros(2, 2))
    layer.erase(torch.tensor([3]))
    assert found_in(keep.save(1, layer)) == {1: 1, 2: 0, 4: 1, 5: 1, 6: 1, 8: 0}


def test_a_key_that_goes_and_comes_back(tmp_path):
    """In one checkpoint, and in two; with the values that it had, and with others."""
    layer, keep = small(), keeps_changes(tmp_path)
    keep.save(0, layer)
    key = torch.tensor([2])
    layer.erase(key)
    layer.assign(key, torch.full((1, 2), 5.0))
    assert found_in(keep.save(1, layer)) == {1: 1, 2: 5, 3: 1, 4: 1, 5: 1, 6: 1}
    layer.erase(key)
    assert found_in(keep.save(2, layer)) == {1: 1, 3: 1, 4: 1, 5: 1, 6: 1}
    layer.assign(key, torch.full((1, 2), 5.0))
    path = keep.save(3, layer)
    assert found_in(path) == {1: 1, 2: 5, 3: 1, 4: 1, 5: 1, 6: 1}
    out = checkpoint.reshard(path, tmp_path / "out", 2)
    assert found_in(out) == found_in(path)
    assert [read_manifest(p).tables["table"].shards[0].removed for p in keeps(tmp_path)] == [
        0, 0, 1, 0
    ]  # fmt: skip


def keeps(folder):
    return sorted(folder.glob("step-*"))


def test_a_reused_row_is_a_removal_and_an_insertion(tmp_path):
    layer = sparsekit.Embedding(2, 2, name="ids")
    layer.assign(torch.tensor([1, 2]), torch.ones(2, 2))
    keep = keeps_changes(tmp_path)
    keep.save(0, layer)
    layer.erase(torch.tensor([2]))
    layer.assign(torch.tensor([3]), torch.ones(1, 2))  # the bytes of the row have not changed
    path = keep.save(1, layer)
    (shard,) = read_manifest(path).tables["table"].shards
    assert (shard.rows, shard.removed) == (1, 1)
    assert found_in(path) == {1: 1, 3: 1}


def test_rows_that_nobody_has_touched_are_not_written(tmp_path):
    layer, keep = plain(), keeps_changes(tmp_path)
    layer.assign(torch.arange(100), torch.ones(100, 8))
    keep.save(0, layer)
    layer.erase(torch.tensor([4, 97, 99]))  # row 98 moves to row 4
    path = keep.save(1, layer)
    (shard,) = read_manifest(path).tables["table"].shards
    assert (shard.rows, shard.size, shard.removed) == (1, 97, 3)
    layer.erase(torch.arange(40))
    (shard,) = read_manifest(keep.save(2, layer)).tables["table"].shards
    assert shard.removed == 39
    layer.clear()  # a table that has lost more than it has is written in full
    assert read_manifest(keep.save(3, layer)).tables["table"].complete


def test_an_older_version_refuses_removals(tmp_path, monkeypatch):
    layer, keep = small(), keeps_changes(tmp_path)
    paths = [keep.save(0, layer)]
    layer.assign(torch.tensor([8]), torch.zeros(1, 2))
    paths.append(keep.save(1, layer))
    layer.erase(torch.tensor([3]))
    paths.append(keep.save(2, layer))
    layer.assign(torch.tensor([8]), torch.ones(1, 2))
    paths.append(keep.save(3, layer))
    monkeypatch.setattr(manifest_file, "VERSION", 1)
    for path in paths[:2]:
        assert len(found_in(path)) >= 6
    for path in paths[2:]:
        with pytest.raises(
            CheckpointError, match=r"000002/manifest\.json: format_version 2 is new"
        ):
            found_in(path)


def with_column(path, name, change):
    """Change a column of a checkpoint's only table, and the checksums."""
    from sparsekit.checkpoint import tensor_file

    file = path / "table-0000-rank-0000.safetensors"
    with TensorFile(file) as opened:
        columns = {each: opened.read(each) for each in opened.places}
    columns[name] = change(columns[name])
    file.unlink()
    record = tensor_file.write(file, [tensor_file.column_of(*each) for each in columns.items()])
    entry = {"bytes": record.bytes, "crc32": f"{record.crc32:08x}"}
    rewritten(path, lambda values: values["files"].update({file.name: entry}))


DAMAGE = {
    "scores of floats": ("scores", lambda c: c.double(), "scores should be int64"),
    "too few scores": ("scores", lambda c: c[1:], "scores should be int64"),
    "a score below zero": ("scores", lambda c: c - 1000, "the score of row 0 is -"),
    "removed keys of 4 bytes": ("removed", lambda c: c.int(), "removed should be int64"),
    "too few removed keys": ("removed", lambda c: c[1:], "removed should be int64"),
    "rows of 8 bytes": ("rows", lambda c: c.long(), "rows should be int32"),
    "a row below zero": ("rows", lambda c: c - 100, "a row is out of range"),
    "a row beyond the table": ("rows", lambda c: c + 100, "a row is out of range"),
    "one row for all": ("rows", lambda c: c * 0, "not every row has a key"),
    "other removed keys": ("removed", lambda c: c + 1, "should have 60 rows"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_before_anything_is_changed(tmp_path, kind):
    *_, path = chain_of_twelve(tmp_path)
    name, change, said = DAMAGE[kind]
    with_column(path, name, change)
    loaded, of_loaded = made()
    train(loaded, of_loaded, 0, 3)
    before = state_of(loaded, of_loaded)
    with pytest.raises(CheckpointError, match=said) as caught:
        checkpoint.load(loaded, path, of_loaded)
    assert str(path) in str(caught.value)
    assert_equal(state_of(loaded, of_loaded), before)


def test_a_table_whose_scores_are_of_another_kind_is_written_in_full(tmp_path):
    keep = keeps_changes(tmp_path)
    for step, score in enumerate(("lru", "lfu")):
        layer, optimizer = made(score)
        train(layer, optimizer, 0, 3)
        path = keep.save(step, layer, optimizer)
        assert read_manifest(path).tables["table"].complete
        loads_as_it_is(path, layer, optimizer, score=score)
