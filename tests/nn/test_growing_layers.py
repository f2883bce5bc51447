"""A layer that grows trains, saves and is copied like one that was large from the start."""

import copy
import io
import pickle

import pytest
import torch
from conftest import generator
from optim.cases import OPTIMIZERS, make

import sparsekit
from sparsekit import TableFullError, checkpoint
from sparsekit.optim import fuse_in_backward
from sparsekit.tables import growth

ROOM = 1 << 20  # rows of dim 3, which are 12 MiB


@pytest.fixture(autouse=True)
def _in_steps(monkeypatch):
    monkeypatch.setattr(growth, "_STEPWISE", 16)
    monkeypatch.setattr(growth, "_LEAST_BUCKETS", 4)


def layer_of(rows=2, **options):
    options = {"on_full": "grow", "max_capacity": ROOM} | options
    return sparsekit.Embedding(rows, 3, name="t", dtype=torch.float64, **options)


def large(**options):
    return layer_of(2000, on_full="error", max_capacity=None, **options)


def batches(count, seed=0, size=12):
    draw = generator(seed)
    most = [10 + 5 * size // 2 * i for i in range(count)]
    return [torch.randint(0, one, (size,), generator=draw) for one in most]


def train(layer, optimizer, keys):
    for batch in keys:
        (layer(batch) * torch.arange(1.0, 4.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one, other, states=None):
    """Compare keys, vectors, and states of optimizers if they are given."""
    rows = len(one.table)
    assert torch.equal(one.table.keys(), other.table.keys())
    one.catch_up()
    other.catch_up()
    torch.testing.assert_close(one.weight[:rows], other.weight[:rows], rtol=0, atol=0)
    if states is None:
        return
    first, second = states[0].state[one.weight], states[1].state[other.weight]
    assert first.keys() == second.keys()
    for name, value in first.items():
        theirs = second[name]
        if value.dim() and not value.is_sparse and len(value) > rows:
            value, theirs = value[:rows], theirs[:rows]
        elif value.is_sparse:
            value, theirs = value.coalesce().values(), theirs.coalesce().values()
        assert torch.equal(value, theirs), name


@pytest.mark.pairs(any_device=True)  # tests/nn/test_growing_on_device.py has all on the host runner
@pytest.mark.parametrize("fused", [False, True], ids=["step", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_a_large_table(name, fused, backend):
    layers = layer_of(), large()
    optimizers = [make(name, layer.parameters()) for layer in layers]
    if fused:
        for layer, optimizer in zip(layers, optimizers, strict=True):
            fuse_in_backward(optimizer, layer)
    for layer, optimizer in zip(layers, optimizers, strict=True):
        train(layer, optimizer, batches(13, size=24))
    assert len(layers[0].table) > 200
    assert_same(*layers, optimizers)


@pytest.mark.parametrize("name", ["SparseAdam", "Adagrad", "SGD"])
def test_optimizers_of_torch(name):
    layers = layer_of(), large()
    settings = {"momentum": 0.9} if name == "SGD" else {}
    for layer in layers:
        train(layer, getattr(torch.optim, name)(layer.parameters(), lr=0.1, **settings), batches(9))
    assert_same(*layers)


def test_gradients_are_accumulated_while_the_table_grows():
    layers = layer_of(), large()
    for layer in layers:
        for batch in batches(12):
            layer(batch).square().sum().backward()
        sparsekit.optim.SGD(layer.parameters(), lr=0.1).step()
    assert_same(*layers)


def test_a_backward_after_the_table_has_grown():
    layers = layer_of(), large()
    for layer in layers:
        outputs = [layer(batch) for batch in batches(12)]
        sum(out.square().sum() for out in outputs).backward()
        sparsekit.optim.Adagrad(layer.parameters(), lr=0.1).step()
    assert_same(*layers)


def test_a_feature_that_reads_what_another_one_inserts():
    layers = layer_of(), large()
    for layer in layers:
        group = sparsekit.EmbeddingGroup(
            {"t": layer},
            {"in": sparsekit.Feature("t"), "out": sparsekit.Feature("t", insert=False)},
        )
        optimizer = sparsekit.optim.SGD(layer.parameters(), lr=0.1)
        for batch in batches(20):
            own, offsets = torch.cat([batch, batch + 1]), torch.arange(len(batch) + 1)
            outputs = group({"in": (batch, offsets), "out": (own, 2 * offsets)})
            sum(out.square().sum() for out in outputs.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*layers)


def test_the_weight_stays_the_same_parameter():
    layer = layer_of()
    weight, address = layer.weight, layer.weight.data_ptr()
    layer(torch.arange(1000))
    assert layer.weight is weight
    assert weight.data_ptr() == address
    assert weight.shape == (ROOM, 3)


def test_only_some_tables_of_a_group_grow():
    names = ["a", "b", "c"]
    made = {
        "a": layer_of(),
        "b": sparsekit.Embedding(2000, 5, name="b", dtype=torch.float64),
        "c": sparsekit.Embedding(3, 4, name="c", dtype=torch.float64, on_full="grow"),
    }
    plain = {
        "a": large(),
        "b": made["b"],
        "c": sparsekit.Embedding(2000, 4, name="c", dtype=torch.float64),
    }
    plain["b"] = copy.deepcopy(plain["b"])
    for layers in (made, plain):
        group = sparsekit.EmbeddingGroup(layers)
        optimizer = sparsekit.optim.LazyAdam(group.parameters(), lr=0.1)
        for batch in batches(20):
            outputs = group({name: batch + 7 * i for i, name in enumerate(names)})
            sum(out.square().sum() for out in outputs.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name in names:
        assert_same(made[name], plain[name])


@pytest.mark.parametrize(
    "options",
    [{"ttl": 9}, {"admission": sparsekit.MinCount(2)}, {"ttl": 20, "score": "lfu"}],
    ids=str,
)
def test_rows_with_scores(options):
    layers = layer_of(**options), large(**options)
    optimizers = [sparsekit.optim.LazyAdam(layer.parameters()) for layer in layers]
    for layer, optimizer in zip(layers, optimizers, strict=True):
        train(layer, optimizer, [*batches(20), *batches(20, 1)])
    rows = len(layers[0].table)
    assert rows > 20
    assert_same(*layers, optimizers)
    assert torch.equal(layers[0].scores[:rows], layers[1].scores[:rows])


@pytest.mark.parametrize("name", ["LazyAdam", "Adagrad", "Adam", "SGD momentum", "RowWiseAdagrad"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_copies_go_on(name, copied):
    layer, plain = layer_of(ttl=1000), large(ttl=1000)
    optimizer, of_plain = (make(name, one.parameters()) for one in (layer, plain))
    train(layer, optimizer, batches(9))
    train(plain, of_plain, batches(9))
    other, of_other = copied((layer, optimizer))
    assert other.weight.shape == layer.weight.shape
    assert other.scores.shape == layer.scores.shape
    for one, stepped in ((layer, optimizer), (other, of_other), (plain, of_plain)):
        train(one, stepped, batches(20, 1))
    assert_same(layer, plain, (optimizer, of_plain))
    assert_same(other, plain, (of_other, of_plain))
    assert torch.equal(other.scores[: len(other.table)], plain.scores[: len(plain.table)])
    again = copied(copied(other.weight))
    assert torch.equal(again[:9], other.weight[:9])


@pytest.mark.pairs
@pytest.mark.parametrize("first", ["module", "optimizer"])
@pytest.mark.parametrize("name", ["LazyAdam", "Adagrad", "Adam", "SGD momentum", "RowWiseAdagrad"])
@pytest.mark.parametrize("grows", [(True, True), (True, False), (False, True)], ids=str)
def test_states_are_loaded(name, first, grows):
    grown, into = grows
    made = {True: layer_of, False: large}
    source, target = made[grown](ttl=1000), made[into](ttl=1000)
    of_source, of_target = (make(name, one.parameters()) for one in (source, target))
    train(source, of_source, batches(9))
    train(target, of_target, batches(3, 5))
    saved = io.BytesIO()
    torch.save([source.state_dict(), of_source.state_dict()], saved)
    if grown:
        assert saved.tell() < 100_000
    saved.seek(0)
    of_module, of_optimizer = torch.load(saved)
    if first == "optimizer":
        of_target.load_state_dict(of_optimizer)
    target.load_state_dict(of_module)
    if first == "module":
        of_target.load_state_dict(of_optimizer)
    for one, stepped in ((source, of_source), (target, of_target)):
        train(one, stepped, batches(20, 1))
    assert_same(source, target, (of_source, of_target))


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_with_more_rows_than_there_is_room_for(assign):
    layer = layer_of()
    layer(torch.arange(50))
    small = layer_of(max_capacity=40)
    with pytest.raises(
        RuntimeError, match=r"t: the state has 50 rows in use, which must be in \[0"
    ):
        small.load_state_dict(layer.state_dict(), assign=assign)
    other = layer_of()
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert_same(other, layer)
    assert other.weight.shape == (ROOM, 3)
    other(torch.arange(300))
    layer(torch.arange(300))
    assert_same(other, layer)


def test_checkpoints(tmp_path):
    layer = layer_of(ttl=1000)
    optimizer = sparsekit.optim.Adagrad(layer.parameters(), initial_accumulator_value=0.2)
    train(layer, optimizer, batches(9))
    checkpoint.save(layer, tmp_path / "one", optimizer)
    for other in (layer_of(ttl=1000), large(ttl=1000)):
        of_other = sparsekit.optim.Adagrad(other.parameters(), initial_accumulator_value=0.2)
        checkpoint.load(other, tmp_path / "one", of_other)
        own, of_own = copy.deepcopy((layer, optimizer))
        for one, stepped in ((own, of_own), (other, of_other)):
            train(one, stepped, batches(20, 1))
        assert_same(own, other, (of_own, of_other))


@pytest.mark.parametrize("change", [lambda one: one.double(), lambda one: one.cpu()])
def test_changes_that_change_nothing(change):
    layer = layer_of()
    layer(torch.arange(50))
    address = layer.weight.data_ptr()
    change(layer)
    assert layer.weight.data_ptr() == address


def test_another_dtype():
    layer, plain = layer_of(ttl=9), large(ttl=9)
    for one in (layer, plain):
        one(torch.arange(50))
        one.float()
        one(torch.arange(100))
        assert one.weight.dtype == torch.float32
    assert layer.weight.shape == (ROOM, 3)
    assert layer.scores.shape == (ROOM,)
    assert_same(layer, plain)


def test_meta_and_back():
    layer = layer_of(device="meta", ttl=9)
    assert layer.weight.shape == (ROOM, 3)
    layer.to_empty(device="cpu")
    layer(torch.arange(100))
    assert len(layer.table) == 100
    layer.to("meta")
    assert layer.weight.is_meta


def test_memory_cannot_be_shared():
    layer = layer_of()
    layer(torch.arange(50))
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"^t: a table with on_full='grow' cannot share its mem"):
        layer.share_memory()
    assert not layer.weight.is_shared()
    assert not layer.table.buckets.is_shared()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, state[name])


def test_the_end_of_the_room():
    layer = layer_of(max_capacity=100)
    layer(torch.arange(90))
    with pytest.raises(TableFullError, match=r"^t: the table on rank 0 is full: 90 of 100 rows"):
        layer(torch.arange(101))
    assert len(layer.table) == 90
    layer(torch.arange(100))
    assert len(layer.table) == 100
    assert layer.table.keys().tolist() == list(range(100))


def test_the_text_of_a_layer():
    assert "capacity=2 of at most 1048576, dim=3" in repr(layer_of())
    assert "capacity=2000, dim=3" in repr(large())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda **options: sparsekit.Embedding(None, 3, **options), ()),
        (lambda **options: sparsekit.EmbeddingBag(None, 3, **options), (1,)),
        (lambda **options: sparsekit.DistributedEmbedding("sum", None, 3, 1, **options), (1, 1)),
    ],
    ids=["Embedding", "EmbeddingBag", "DistributedEmbedding"],
)
def test_without_a_number_of_rows(make, shape):
    layer = make()
    assert (layer.on_full, layer.table.capacity) == ("grow", 1024)
    assert layer.capacity * 12 > torch.iinfo(torch.int32).max
    layer(torch.arange(3000).view(3000, *shape))
    assert len(layer.table) == 3000
    assert make(max_capacity=9).table.capacity == 9
    assert " (rows of 3)" in make().name
    with pytest.raises(ValueError, match="on_full='evict' needs a number of rows"):
        make(on_full="evict")


def test_padding_without_a_number_of_rows():
    layer = sparsekit.Embedding(None, 3, padding_idx=10**12)
    assert not layer(torch.tensor([10**12])).any()
    with pytest.raises(
        ValueError, match="padding_idx=-1 counts from the end, which num_embeddings"
    ):
        sparsekit.Embedding(None, 3, padding_idx=-1)


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_optimizers_of_torch_need_a_bound(kind):
    """Their states have all rows that there is room for, which no memory holds."""
    layer = sparsekit.Embedding(None, 128)
    layer(torch.arange(3)).sum().backward()
    with pytest.raises(RuntimeError, match="allocate"):
        kind(layer.parameters()).step()
