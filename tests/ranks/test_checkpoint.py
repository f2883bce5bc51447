"""Checkpoints written on N ranks can be loaded on M ranks."""

import itertools
import os
import signal

import pytest
import torch
import torch.distributed as dist
from checkpoint.models import assert_equal, contents, keys_of_step, made, train

import sparsekit
from sparsekit import checkpoint
from sparsekit.checkpoint import Checkpoints, DcpState
from sparsekit.checkpoint.table_figures import table_figures
from sparsekit.checkpoint.together import Together

from .pool import Died, Ranks

WORLDS = (1, 2, 3, 4)
ROWS = 600  # number of rows of the second table, over all ranks


@pytest.fixture(scope="module")
def pools():
    made = {world: Ranks(world) for world in WORLDS}
    yield made
    for pool in made.values():
        pool.close()


def part(rank, world):
    """Return a rank's share of the samples of a step."""
    return slice(rank, None, world)


def begin(rank, world, folder, options):
    """Train for two steps and save; return this rank's contents."""
    model, optimizers = made(**options)
    train(model, optimizers, 0, 2, part(rank, world))
    checkpoint.save(model, folder, optimizers)
    return contents(model, optimizers)


def go_on(rank, world, folder, options):
    """Load a checkpoint; return this rank's contents then and after two more steps."""
    model, optimizers = made(seed=5, **options)
    train(model, optimizers, 7, 8, part(rank, world))
    checkpoint.load(model, folder, optimizers)
    loaded = contents(model, optimizers)
    model.top.eval()
    for _ in range(2):
        for layer in (model.users, model.rows):
            keys = keys_of_step(3)[part(rank, world)]
            layer.zero_grad()
            (layer(keys).square().sum() * world).backward()
        optimizers[0].step()
    return loaded, contents(model, optimizers)


def together(parts):
    """Merge the tables of all ranks, sorted by key; take everything else from rank 0."""
    joined = dict(parts[0])
    for name in ("users", "rows"):
        order = torch.cat([each[f"{name} keys"] for each in parts]).argsort()
        for key in joined:
            if key.startswith(f"{name} ") and joined[key].dim():
                joined[key] = torch.cat([each[key] for each in parts])[order]
    return joined


OPTIONS = {
    "hash": {"optimizer": "LazyAdam", "placement": "hash", "rows": ROWS},
    "modulo": {"optimizer": "Ftrl", "placement": "modulo", "rows": ROWS},
    "row numbers": {"optimizer": "Adam", "hash_table": False, "placement": "modulo"},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_any_number_of_ranks_loads_what_any_other_has_saved(pools, tmp_path, options):
    saved, after = {}, {}
    for world in WORLDS:
        parts = pools[world](
            begin, world, tmp_path / str(world), {"rows": ROWS // world} | OPTIONS[options]
        )
        saved[world] = together(parts)
    for source, world in itertools.product(WORLDS, WORLDS):
        if options != "hash" and (source + world) % 2 == 0:
            continue
        own = {"rows": ROWS // world} | OPTIONS[options]
        found = pools[world](go_on, world, tmp_path / str(source), own)
        assert_equal(together([loaded for loaded, _ in found]), saved[source])
        trained = together([each for _, each in found])
        first = after.setdefault(source, trained)
        for name in ("users keys", "users vectors", "rows keys", "rows vectors"):
            assert torch.allclose(trained[name], first[name], rtol=0, atol=1e-6), name


def test_figures_are_those_of_all_ranks(pools, tmp_path):
    """Figures of a checkpoint that two ranks have saved count the rows of both."""
    parts = pools[2](begin, 2, tmp_path / "two", {"rows": ROWS // 2, "optimizer": "LazyAdam"})
    for found in table_figures(tmp_path / "two"):
        vectors = together(parts)[f"{found.name} vectors"]
        assert found.rows_of_ranks == [len(part[f"{found.name} keys"]) for part in parts]
        assert found.rows == len(vectors)
        assert found.norms.quantiles[1] == pytest.approx(vectors.norm(dim=1).max().item())
        assert found.dead.rows == 0


def other_placement(rank, world, folder, saves, loads):
    model, optimizers = made(placement=saves)
    train(model, optimizers, 0, 2, part(rank, world))
    checkpoint.save(model, folder, optimizers)
    loaded, of_loaded = made(seed=1, placement=loads)
    checkpoint.load(loaded, folder, of_loaded)
    keys = torch.cat([model.users.items().__next__().keys, torch.tensor([10**12])])
    assert torch.equal(loaded.users.vectors(keys), model.users.vectors(keys))
    return len(loaded.users.table), len(model.users.table)


@pytest.mark.parametrize("placements", [("hash", "modulo"), ("modulo", "hash")])
def test_another_placement(pools, tmp_path, placements):
    sizes = pools[3](other_placement, 3, tmp_path / "a", *placements)
    assert sum(loaded for loaded, _ in sizes) == sum(saved for _, saved in sizes)
    assert [loaded for loaded, _ in sizes] != [saved for _, saved in sizes]


def own_map(rank, world, folder):
    model, optimizers = made(placement="hash")
    model.users.owners = model.users.owners.flip(0)
    train(model, optimizers, 0, 2, part(rank, world))
    checkpoint.save(model, folder, optimizers)
    loaded, of_loaded = made(seed=1)
    checkpoint.load(loaded, folder, of_loaded)
    keys = model.users.table.keys()
    assert torch.equal(loaded.users.vectors(keys), model.users.vectors(keys))
    return len(keys), len(loaded.users.table)


def test_another_map_of_owners(pools, tmp_path):
    sizes = pools[2](own_map, 2, tmp_path / "a")
    assert sizes[0] == tuple(reversed(sizes[1]))


def chain(rank, world, folder, in_background):
    model, optimizers = made()
    keep = Checkpoints(folder, complete_every=3, keep=2)
    for step in range(5):
        train(model, optimizers, step, step + 1, part(rank, world))
        if in_background:
            keep.async_save(step, model, optimizers)
        else:
            keep.save(step, model, optimizers)
    keep.close()
    return contents(model, optimizers)


def load_latest(rank, world, folder):
    model, optimizers = made(seed=3)
    found = Checkpoints(folder).load(model, optimizers)
    return found.step, contents(model, optimizers)


@pytest.mark.parametrize("in_background", [False, True])
def test_chains(pools, tmp_path, in_background):
    expected = together(pools[3](chain, 3, tmp_path, in_background))
    names = sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".")
    assert names == [f"step-{step:012d}" for step in (3, 4)]
    for world in (2, 3):
        found = pools[world](load_latest, world, tmp_path)
        assert {step for step, _ in found} == {4}
        assert_equal(together([each for _, each in found]), expected)


def errors(rank, world, folder):
    """Check that a save that fails on one rank raises on all and keeps the earlier checkpoint."""
    model, optimizers = made()
    train(model, optimizers, 0, 1, part(rank, world))
    keep = Checkpoints(folder)
    keep.save(1, model, optimizers)
    before = contents(model, optimizers)
    texts = []

    class Odd:
        def state_dict(self):
            return {"set": {1, 2} if rank == 1 else 1}

    train(model, optimizers, 1, 2, part(rank, world))
    for save in (keep.save, lambda *a, **k: keep.async_save(*a, **k).wait()):
        with pytest.raises(RuntimeError) as caught:
            save(2, model, optimizers, state={"odd": Odd()})
        texts.append(str(caught.value))
    original = checkpoint.save.__globals__["write"]
    try:

        def full(path, columns, metadata=None):
            if rank == 1 and "table-0001" in str(path):
                raise checkpoint.CheckpointError(f"{path}: cannot be written: No space left")
            return original(path, columns, metadata or {})

        checkpoint.save.__globals__["write"] = full
        for save in (keep.save, lambda *a, **k: keep.async_save(*a, **k).wait()):
            with pytest.raises(RuntimeError) as caught:
                save(2, model, optimizers)
            texts.append(str(caught.value))
    finally:
        checkpoint.save.__globals__["write"] = original
    checkpoint.load(model, folder, optimizers)
    for name, value in contents(model, optimizers).items():
        # The loaded dense part is that of rank 0, so it may differ.
        if name.startswith(("users ", "rows ")):
            assert torch.equal(value, before[name]), name
    keep.close()
    return texts


def test_an_error_on_one_rank_is_raised_on_all(pools, tmp_path):
    for texts in pools[2](errors, 2, tmp_path):
        for text in texts[:2]:
            assert "no set" in text, text
        for text in texts[2:]:
            assert "No space left" in text, text
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-000000000001"]


def damaged(rank, world, folder):
    model, optimizers = made()
    with pytest.raises(RuntimeError) as caught:
        checkpoint.load(model, folder, optimizers)
    assert len(model.users.table) == 0
    return str(caught.value)


def test_a_damaged_file_is_named_on_all_ranks(pools, tmp_path):
    pools[3](begin, 3, tmp_path / "a", {})
    for file in sorted((tmp_path / "a").glob("table-*")):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        for text in pools[2](damaged, 2, tmp_path / "a"):
            assert file.name in text, text
        file.write_bytes(content)


def too_small(rank, world, folder):
    """Load a chain whose total rows exceed rank 1's capacity, although no single part does."""
    model, optimizers = made(capacity=30, placement="modulo", rows=ROWS // world)
    train_first_rows(model, optimizers)
    before = contents(model, optimizers)
    with pytest.raises(RuntimeError) as caught:
        checkpoint.load(model, folder, optimizers)
    assert_equal(contents(model, optimizers), before)
    return str(caught.value)


def train_first_rows(model, optimizers):
    (model.users(torch.arange(6).view(6, 1, 1)).sum() + model.top[0].weight.sum()).backward()
    for optimizer in optimizers:
        optimizer.step()


def test_rows_of_a_whole_chain_are_counted_before_anything_is_changed(pools, tmp_path):
    model, optimizers = made(capacity=64, placement="modulo", rows=ROWS)
    train_first_rows(model, optimizers)
    keep = Checkpoints(tmp_path, complete_every=3)
    for step in range(3):
        odd = torch.arange(15 * step, 15 * step + 15) * 2 + 1
        model.users.assign(odd, torch.rand(15, 8))
        keep.save(step, model, optimizers)
    keep.close()
    for text in pools[2](too_small, 2, tmp_path):
        assert "table users has" in text, text
        assert "for rank 1, whose capacity is 30" in text, text


def other_job(rank, world, folder):
    model, optimizers = made()
    keep = Checkpoints(folder)
    with pytest.raises(RuntimeError, match="another job writes checkpoints there") as caught:
        keep.save(0, model, optimizers)
    return str(caught.value)


def without_tables(rank, world, folder):
    alone = [dist.new_group([one]) for one in range(world)][rank]
    model = torch.nn.Linear(2, 1)
    torch.manual_seed(rank)
    checkpoint.save(model, folder / str(rank), process_group=alone)
    expected = torch.rand(9)
    checkpoint.load(model, folder / str(rank), process_group=alone)
    assert torch.equal(torch.rand(9), expected)


def test_random_numbers_go_on_in_a_group_that_has_no_tables(pools, tmp_path):
    pools[2](without_tables, 2, tmp_path)


def of_groups(rank, world, folder):
    """Check that every function that saves or loads works in subgroups, even without rank 0."""
    groups = [dist.new_group([0]), dist.new_group(list(range(1, world)))]
    folder, options = folder / str(min(rank, 1)), {"process_group": groups[min(rank, 1)]}
    keys = torch.arange(10)

    def layer_of(seed):
        return sparsekit.Embedding(20, 2, name="ids", seed=seed, **options)

    def equal(loaded, saved):
        assert torch.equal(loaded(keys), saved(keys))
        assert len(loaded.table) == len(saved.table)

    saved = layer_of(1)
    equal(saved, saved)  # inserts the keys
    keeps = [Checkpoints(folder / name, complete_every=2, **options) for name in "ab"]
    saves = [
        lambda: checkpoint.save(saved, folder / "0", **options),
        lambda: checkpoint.async_save(saved, folder / "1", **options).wait(),
        *[lambda step=step: keeps[0].save(step, saved) for step in range(2)],
        *[lambda step=step: keeps[1].async_save(step, saved).wait() for step in range(2)],
    ]
    for save in saves:
        loaded = layer_of(9)
        checkpoint.load(loaded, save(), **options)
        equal(loaded, saved)
    for keep in keeps:
        loaded = layer_of(9)
        assert keep.load(loaded).step == 1
        equal(loaded, saved)
        keep.close()
    if rank > 0:
        with pytest.raises(ValueError, match=rf"table: the table is that of rank {rank - 1} of 2"):
            checkpoint.save(saved, folder / "alone", process_group=groups[0])


def test_process_groups(pools, tmp_path):
    pools[3](of_groups, 3, tmp_path)


class Note:
    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def save_own(rank, world, folder):
    torch.manual_seed(rank)
    checkpoint.save(torch.nn.Linear(1, 1), folder, state={"note": Note(rank)})
    return torch.rand(3).tolist()


def load_own(rank, world, folder):
    note = Note()
    module = torch.nn.Linear(1, 1)
    torch.manual_seed(50 + rank)
    expected = torch.rand(3).tolist()
    torch.manual_seed(50 + rank)
    checkpoint.load(module, folder, state={"note": note})
    return note.value, torch.rand(3).tolist(), expected


def test_each_rank_has_its_own_states_or_those_of_the_first(pools, tmp_path):
    """Random number generators are restored only if the number of ranks is the same."""
    random_numbers = pools[2](save_own, 2, tmp_path / "a")
    found = pools[2](load_own, 2, tmp_path / "a")
    assert [(value, drawn) for value, drawn, _ in found] == list(enumerate(random_numbers))
    for world in (1, 3):
        for value, drawn, expected in pools[world](load_own, world, tmp_path / "a"):
            assert (value, drawn) == (0, expected)


def tables_of_other_kinds(rank, world, folder):
    """Check that saving tables that differ between ranks raises on every rank and names rank 1."""
    facts = {
        "dim": {"dim": (8, 4)[rank]},
        "placement": {"placement": ("hash", "modulo")[rank]},
        "dtype": {"dtype": (torch.float32, torch.float64)[rank]},
    }
    for name, options in facts.items():
        model, _ = made(**options)
        with pytest.raises(RuntimeError, match=f"users: rank 1 has other {name} than rank 0"):
            checkpoint.save(model, folder / "a")
    layers = {name: sparsekit.Embedding(9, 2, name=name) for name in "ab"[: 2 - rank]}
    with pytest.raises(RuntimeError, match="b: rank 1 has other the table itself than rank 0"):
        checkpoint.save(torch.nn.ModuleDict(layers), folder / "a")


def test_ranks_with_other_tables(pools, tmp_path):
    pools[2](tables_of_other_kinds, 2, tmp_path)
    assert not list(tmp_path.iterdir())


def layers_of_other_names(rank, world, folder):
    """Save layers whose names differ by rank, as generated names do if a rank made more layers."""
    layers = {"t": sparsekit.Embedding(9, 2, name=f"of {rank}", seed=3)}
    checkpoint.save(torch.nn.ModuleDict(layers), folder / "a")
    DcpState(torch.nn.ModuleDict(layers)).state_dict()


def test_ranks_whose_layers_have_other_names(pools, tmp_path):
    pools[2](layers_of_other_names, 2, tmp_path)
    assert checkpoint.verify(tmp_path / "a")


def said_by_first(rank, world):
    """Check that a text and the names in a union may hold any bytes and have any length."""
    ranks = Together(torch.nn.Linear(1, 1))
    odd = os.fsdecode(b"caf\xe9")
    for text in ("", "x", odd, "x" * 4097):
        assert ranks.text_of_first("it", lambda text=text: text if rank == 0 else "no") == text
    return ranks.union({odd, f"of {rank}"}) == {odd, *(f"of {each}" for each in range(world))}


def test_ranks_tell_one_another(pools):
    assert pools[3](said_by_first, 3) == [True] * 3


def test_two_jobs_in_one_folder(pools, tmp_path):
    model, optimizers = made()
    keep = Checkpoints(tmp_path)
    keep.save(0, model, optimizers)
    for text in pools[2](other_job, 2, tmp_path):
        assert str(os.getpid()) in text
    keep.close()
    assert Checkpoints(tmp_path).load(*made()).step == 0


def odd_path(rank, world, folder):
    """Save and load under a path that is not UTF-8; a second save to the path is refused."""
    folder = folder / os.fsdecode(b"caf\xe9")
    model, optimizers = made()
    train(model, optimizers, 0, 1, part(rank, world))
    keep = Checkpoints(folder, complete_every=9)
    keep.save(0, model, optimizers)
    train(model, optimizers, 1, 2, part(rank, world))
    if rank == 1:
        keep._marks = None  # as after an interrupt: all ranks must then save all rows
    keep.async_save(1, model, optimizers)
    keep.wait()
    with pytest.raises(RuntimeError, match="there is something already"):
        checkpoint.save(model, folder / "step-000000000001", optimizers)
    loaded, of_loaded = made(seed=1)
    assert keep.load(loaded, of_loaded).step == 1
    for name, value in contents(model, optimizers).items():
        # The loaded dense part is that of rank 0, so it may differ.
        if name.startswith(("users ", "rows ")):
            assert torch.equal(contents(loaded, of_loaded)[name], value), name
    keep.close()
    late = Checkpoints(folder)
    with pytest.raises(RuntimeError, match="checkpoints of another run, up to step-000000000001"):
        late.claim(1, model)


def test_a_path_that_is_no_utf_8(pools, tmp_path):
    pools[2](odd_path, 2, tmp_path)


def die_while_others_save(rank, world, folder):
    model, optimizers = made()
    train(model, optimizers, 0, 1, part(rank, world))
    checkpoint.save(model, folder / "old", optimizers)
    background = checkpoint.async_save(model, folder / "new", optimizers)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        background.wait()


def test_a_rank_that_dies_leaves_the_old_checkpoint(fresh_ranks, tmp_path):
    pool = fresh_ranks(2)
    found = pool.outcomes(die_while_others_save, 2, tmp_path)
    assert isinstance(found[1], Died)
    model, optimizers = made()
    checkpoint.load(model, tmp_path / "old", optimizers)
    if (tmp_path / "new").exists():  # rank 0 may already have written its part
        checkpoint.load(model, tmp_path / "new", optimizers)
