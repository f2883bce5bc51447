"""States that torch.distributed.checkpoint saves on N ranks can be loaded on M ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint.models import assert_equal, contents, keys_of_step, made, train
from torch.nn.parallel import DistributedDataParallel

import sparsekit
from sparsekit.checkpoint import DcpState

from .pool import Ranks
from .test_checkpoint import OPTIONS, ROWS, part, together

WORLDS = (1, 2, 3)


class Pools(dict):
    """Pools of ranks by world size, started at first use."""

    def __missing__(self, world):
        return self.setdefault(world, Ranks(world))


@pytest.fixture(scope="module")
def pools():
    made = Pools()
    yield made
    for pool in made.values():
        pool.close()


def save(model, folder, optimizers, **options):
    dcp.save({"app": DcpState(model, optimizers, **options)}, checkpoint_id=folder)


def load(model, folder, optimizers, **options):
    state = DcpState(model, optimizers, load_from=folder, **options)
    dcp.load({"app": state}, checkpoint_id=folder)


def begin(rank, world, folder, options):
    """Train for two steps and save; return this rank's contents."""
    model, optimizers = made(**options)
    train(model, optimizers, 0, 2, part(rank, world))
    save(model, folder, optimizers)
    return contents(model, optimizers)


def go_on(rank, world, folder, options):
    """Load a checkpoint; return this rank's contents then and after two more steps."""
    model, optimizers = made(seed=5, **options)
    train(model, optimizers, 7, 8, part(rank, world))
    load(model, folder, optimizers)
    loaded = contents(model, optimizers)
    for _ in range(2):
        for layer in (model.users, model.rows):
            layer.zero_grad()
            (layer(keys_of_step(3)[part(rank, world)]).square().sum() * world).backward()
        optimizers[0].step()
    return loaded, contents(model, optimizers)


@pytest.mark.parametrize("options", OPTIONS)
def test_any_number_of_ranks_loads_what_any_other_has_saved(pools, tmp_path, options):
    saved, after = {}, {}
    for world in WORLDS:
        own = {"rows": ROWS // world} | OPTIONS[options]
        saved[world] = together(pools[world](begin, world, tmp_path / str(world), own))
    for source, world in itertools.product(WORLDS, WORLDS):
        if options != "hash" and source == world:
            continue
        own = {"rows": ROWS // world} | OPTIONS[options]
        found = pools[world](go_on, world, tmp_path / str(source), own)
        assert_equal(together([loaded for loaded, _ in found]), saved[source])
        trained = together([each for _, each in found])
        first = after.setdefault(source, trained)
        for name in ("users keys", "users vectors", "rows keys", "rows vectors"):
            assert torch.allclose(trained[name], first[name], rtol=0, atol=1e-6), name


def as_if_nothing_had_been(rank, world, folder, optimizer):
    model, optimizers = made(optimizer)
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(10 + rank)  # so each rank has its own random numbers
    train(wrapped, optimizers, 0, 3, part(rank, world))
    save(wrapped, folder, optimizers)
    train(wrapped, optimizers, 3, 6, part(rank, world))
    loaded, of_loaded = made(optimizer, seed=4)
    wrapped = DistributedDataParallel(loaded)
    load(wrapped, folder, of_loaded)
    keys = loaded.users.table.keys()
    assert torch.equal(keys, model.users.table.keys()[: len(keys)])
    train(wrapped, of_loaded, 3, 6, part(rank, world))
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


@pytest.mark.parametrize("optimizer", ["LazyAdam", "Ftrl"])
def test_on_as_many_ranks_training_goes_on_bit_for_bit(pools, tmp_path, optimizer):
    pools[2](as_if_nothing_had_been, 2, tmp_path, optimizer)


def parts_read(rank, world, folder, options):
    """Load a checkpoint; return the parts of tables that this rank has read."""
    model, optimizers = made(**options)
    seen, original = set(), sparsekit.checkpoint.dcp.DcpSource.read

    def read(self, part, tensor):
        if part.startswith("table-"):
            seen.add(part)
        return original(self, part, tensor)

    sparsekit.checkpoint.dcp.DcpSource.read = read
    try:
        load(model, folder, optimizers)
    finally:
        sparsekit.checkpoint.dcp.DcpSource.read = original
    return seen


def test_a_rank_reads_no_more_than_it_needs(pools, tmp_path):
    pools[2](begin, 2, tmp_path, {})
    for rank, seen in enumerate(pools[2](parts_read, 2, tmp_path, {})):
        assert seen == {f"table-000{table}-rank-000{rank}" for table in (0, 1)}
    for seen in pools[3](parts_read, 3, tmp_path, {}):
        assert len(seen) == 4


def placements(rank, world, folder, saves, loads):
    model, optimizers = made(placement=saves)
    train(model, optimizers, 0, 2, part(rank, world))
    save(model, folder, optimizers)
    loaded, of_loaded = made(seed=1, placement=loads)
    load(loaded, folder, of_loaded)
    keys = torch.cat([next(model.users.items()).keys, torch.tensor([10**12])])
    assert torch.equal(loaded.users.vectors(keys), model.users.vectors(keys))
    return len(loaded.users.table), len(model.users.table)


@pytest.mark.parametrize("both", [("hash", "modulo"), ("modulo", "hash")])
def test_another_placement(pools, tmp_path, both):
    sizes = pools[3](placements, 3, tmp_path / "a", *both)
    assert sum(loaded for loaded, _ in sizes) == sum(saved for _, saved in sizes)
    assert [loaded for loaded, _ in sizes] != [saved for _, saved in sizes]


def errors(rank, world, folder):
    """Check that a save or load that fails on one rank raises on all and changes nothing."""
    model, optimizers = made()
    train(model, optimizers, 0, 1, part(rank, world))
    save(model, folder / "a", optimizers)
    texts = []

    class Odd:
        def state_dict(self):
            return {"set": {1, 2} if rank == 1 else 1}

    with pytest.raises(RuntimeError) as caught:
        save(model, folder / "b", optimizers, state={"odd": Odd()})
    texts.append(str(caught.value))
    uneven = made(capacity=700 + rank)[0]
    with pytest.raises(RuntimeError) as caught:
        save(uneven, folder / "b", None)
    texts.append(str(caught.value))
    small, of_small = made(capacity=20 if rank == 1 else 700)
    before = contents(small, of_small)
    with pytest.raises(RuntimeError) as caught:
        load(small, folder / "a", of_small)
    texts.append(str(caught.value))
    assert_equal(contents(small, of_small), before)
    with pytest.raises(RuntimeError) as caught:
        load(small, folder / "none", of_small)
    texts.append(str(caught.value))
    assert_equal(contents(small, of_small), before)
    model.users.weight.data += 1
    before = contents(model, optimizers)
    with pytest.raises(BaseException, match=r"load_from=path") as caught:
        dcp.load({"app": DcpState(model, optimizers)}, checkpoint_id=folder / "a")
    texts.append(str(caught.value))
    assert_equal(contents(model, optimizers), before)
    return texts


def test_an_error_on_one_rank_is_raised_on_all(pools, tmp_path):
    for odd, uneven, small, none, saving in pools[2](errors, 2, tmp_path):
        assert "no set" in odd
        assert "users.capacity 700" in uneven
        assert "users.capacity 701" in uneven
        assert "table users has" in small
        assert "none: is no checkpoint of torch.distributed.checkpoint" in none
        assert "ranks:dict_keys([0, 1])" in saving
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def loaded_on_more(rank, folder):
    """Check that a state made for saving cannot be loaded, even by ranks that saved nothing."""
    model, optimizers = made()
    with pytest.raises(BaseException, match=r"load_from=path"):
        dcp.load({"app": DcpState(model, optimizers)}, checkpoint_id=folder)


def test_a_load_without_load_from_on_more_ranks(pools, tmp_path):
    pools[1](begin, 1, tmp_path, {})
    pools[3](loaded_on_more, tmp_path)


def dense_of_rank_0(rank, world, folder):
    model, optimizers = made()
    with torch.no_grad():
        model.out.bias.fill_(rank)
    save(model, folder, optimizers)
    load(model, folder, optimizers)
    return model.out.bias.item()


def test_the_dense_part_is_that_of_rank_0(pools, tmp_path):
    assert pools[3](dense_of_rank_0, 3, tmp_path) == [0, 0, 0]


def of_a_group(rank, world, folder):
    """Save and load on each rank separately, in a group of one rank."""
    alone = [dist.new_group([one]) for one in range(world)][rank]
    layers = [
        sparsekit.Embedding(9, 2, name="ids", seed=seed, process_group=alone) for seed in (rank, 7)
    ]
    layers[0].assign(torch.arange(4), torch.full((4, 2), float(rank)))
    path = folder / str(rank)
    dcp.save({"app": DcpState(layers[0], process_group=alone)}, checkpoint_id=path, no_dist=True)
    loads = DcpState(layers[1], load_from=path, process_group=alone)
    dcp.load({"app": loads}, checkpoint_id=path, no_dist=True)
    assert torch.equal(layers[1].weight, layers[0].weight)


def test_the_process_group_is_that_of_the_layers(pools, tmp_path):
    pools[2](of_a_group, 2, tmp_path)


def background(rank, world, folder):
    model, optimizers = made()
    wrapped = DistributedDataParallel(model)
    train(wrapped, optimizers, 0, 2, part(rank, world))
    before = contents(model, optimizers)
    group = dist.new_group(backend="gloo")  # a separate group, since training continues meanwhile
    state = {"app": DcpState(model, optimizers)}
    saved = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    train(wrapped, optimizers, 2, 5, part(rank, world))
    saved.result()
    loaded, of_loaded = made(seed=3)
    load(loaded, folder, of_loaded)
    assert_equal(contents(loaded, of_loaded), before)
    # async_save also refuses a plain state_dict.
    saved = dcp.async_save(model.state_dict(), checkpoint_id=folder / "b", process_group=group)
    with pytest.raises(BaseException, match=r"would keep one rank.s part .*\.DcpState"):
        saved.result()


def test_in_the_background(pools, tmp_path):
    pools[2](background, 2, tmp_path)


def beside_fully_shard(rank, folder):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def model(seed):
        torch.manual_seed(seed)
        tables = torch.nn.ModuleDict({"t": sparsekit.EmbeddingBag(99, 5, name="t", mode="sum")})
        top = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))
        fully_shard(top, mesh=init_device_mesh("cpu", (2,)))
        return (
            tables,
            top,
            sparsekit.optim.LazyAdam(tables.parameters(), lr=0.1),
            torch.optim.Adam(top.parameters(), lr=0.1),
        )

    def train(tables, top, *optimizers):
        for step in range(2):
            keys = torch.randint(0, 30, (8, 3), generator=torch.Generator().manual_seed(step))
            for optimizer in optimizers:
                optimizer.zero_grad()
            top(tables["t"](keys[4 * rank : 4 * rank + 4])).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()

    one, other = model(0), model(1)
    train(*one)
    with pytest.raises(RuntimeError, match=r"DcpState of the tables' layers alone"):
        DcpState(torch.nn.ModuleList(one[:2])).state_dict()
    dense, of_dense = get_state_dict(one[1], one[3])
    saved = {"tables": DcpState(one[0], one[2]), "dense": dense, "adam": of_dense}
    dcp.save(saved, checkpoint_id=folder)
    dense, of_dense = get_state_dict(other[1], other[3])
    tables = DcpState(other[0], other[2], load_from=folder)
    dcp.load({"tables": tables, "dense": dense, "adam": of_dense}, checkpoint_id=folder)
    set_state_dict(other[1], other[3], model_state_dict=dense, optim_state_dict=of_dense)
    for pair in (one, other):
        train(*pair)
    keys = torch.arange(30).view(10, 3)
    assert torch.equal(other[0]["t"].eval()(keys), one[0]["t"].eval()(keys))
    for mine, theirs in zip(other[1].parameters(), one[1].parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())


@pytest.mark.filterwarnings("ignore")
def test_beside_fully_shard(pools, tmp_path):
    pools[2](beside_fully_shard, str(tmp_path))
