"""`EmbeddingLayer.erase` removes keys with all that belongs to them, and nothing else."""

import pytest
import torch
from conftest import generator
from interruptions import interrupt
from optim.cases import OPTIMIZERS, make

import sparsekit
from sparsekit import checkpoint
from sparsekit.optim import fuse_in_backward

CAPACITY = 60
ERASED = [3, 11, 4, 29, 0]
OTHERS = [key for key in range(30) if key not in ERASED]
FUSED = [False, True]


def new_layer(**options):
    settings = {"seed": 1, "name": "users"} | options
    return sparsekit.DistributedEmbedding("sum", CAPACITY, 4, 1, 3, **settings)


def batches(seed):
    """Return batches; the first one has all keys."""
    random = generator(seed)
    return [
        torch.arange(30).view(10, 1, 3),
        *(torch.randint(0, 30, (9, 1, 3), generator=random) for _ in range(3)),
    ]


def train(layer, optimizer, keys):
    random = generator(int(keys.sum()) % 1000)
    out = layer(keys)
    (out * torch.randn(out.shape, generator=random)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(name, fused, before=lambda keys: keys, **options):
    layer = new_layer(**options)
    optimizer = make(name, layer.parameters())
    if fused:
        fuse_in_backward(optimizer, layer)
    for keys in batches(0):
        train(layer, optimizer, before(keys))
    return layer, optimizer


def renamed(keys):
    """Give the keys that will be erased other names, which never come again."""
    return torch.where(torch.isin(keys, torch.tensor(ERASED)), keys + 1000, keys)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_erased_keys_start_as_new_and_the_others_go_on(name, fused):
    layer, optimizer = trained(name, fused)
    expected, other = trained(name, fused, renamed)
    assert layer.erase(torch.tensor(ERASED)) == len(ERASED)
    assert sorted(layer.table.keys().tolist()) == OTHERS
    every = torch.arange(30)
    for keys in batches(1):
        assert torch.equal(layer.vectors(every), expected.vectors(every))
        train(layer, optimizer, keys)
        train(expected, other, keys)
    assert torch.equal(layer.vectors(every), expected.vectors(every))


@pytest.mark.parametrize("name", ["Adam", "SGD catch_up"])
def test_moved_rows_are_as_late_as_they_were(name):
    pairs = [(layer, make(name, layer.parameters())) for layer in (new_layer(), new_layer())]
    for layer, optimizer in pairs:
        train(layer, optimizer, torch.arange(30).view(10, 1, 3))
        for _ in range(3):
            train(layer, optimizer, torch.arange(15).view(5, 1, 3))
    (layer, optimizer), (other, _) = pairs
    assert optimizer.state[layer.weight]["row_step"][:30].tolist() == [4] * 15 + [1] * 15
    layer.erase(torch.arange(3))  # the last rows move there
    for keys in (torch.arange(20, 30), torch.arange(3, 20)):
        assert torch.equal(layer.vectors(keys), other.vectors(keys))


def state_tensors(layer, optimizer):
    state = optimizer.state[layer.weight]
    return [
        value
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.shape[:1] == (CAPACITY,)
    ]


@pytest.mark.parametrize("name", ["LazyAdam", "Adagrad", "Ftrl", "SGD momentum", "Adam"])
def test_nothing_of_an_erased_key_is_left(name):
    layer, optimizer = trained(name, False)
    rows = layer.table.find(torch.tensor(ERASED))
    given_away = [layer.weight, *state_tensors(layer, optimizer)]
    traces = [tensor.detach()[rows].clone() for tensor in given_away]
    layer.erase(torch.tensor(ERASED))
    tensors = [layer.weight, *state_tensors(layer, optimizer), *given_away]
    for trace in (row for rows in traces for row in rows if row.unique().numel() > 1):
        for tensor in tensors:
            if tensor.shape[1:] == trace.shape:
                assert not (tensor.detach() == trace).all(-1).any()
    assert not torch.isin(layer.table.buckets[:, :5], torch.tensor(ERASED[:4])).any()
    assert not layer.weight.detach()[len(OTHERS) :].any()


def test_nothing_of_a_key_that_waits_for_admission_is_left():
    layer = new_layer(admission=sparsekit.MinCount(3))
    sparsekit.set_clock(layer, 7)
    keys = torch.arange(1, 31) * 0x0123_4567_89AB_CDEF
    layer(keys.view(10, 1, 3))
    sparsekit.set_clock(layer, then := 0x0FED_CBA9_8765_4321)
    gone = keys[[0, 8, 28, 29]]
    layer(gone[[0, 0, 0, 1, 2, 2]].view(2, 1, 3))  # admits the first and the third one
    assert layer.table.keys().tolist() == gone[[0, 2]].tolist()
    assert layer.erase(torch.cat([gone, gone, torch.tensor([5])])) == 2
    counts = layer.life.counts
    memory = [layer.weight, layer.scores, layer.table.buckets, counts.index.buckets, counts.words]
    for number in (*gone.tolist(), then):
        trace = number.to_bytes(8, "little", signed=True)
        assert not any(trace in tensor.detach().numpy().tobytes() for tensor in memory)
    left = keys[~torch.isin(keys, gone)].tolist()
    assert sorted(counts.state().tolist()) == [[key, 1, 7] for key in left]
    layer(keys[1].expand(1, 1, 3))
    assert layer.table.keys().tolist() == [keys[1]]


def test_random_sequences_against_a_dict():
    random = generator(7)
    layer, known = new_layer(), {}
    for _ in range(120):
        keys = torch.randint(-8, 40, (int(torch.randint(0, 9, (), generator=random)),))
        if torch.rand((), generator=random) < 0.5:
            vectors = torch.randn(len(keys), 4, generator=random)
            layer.assign(keys, vectors)
            known |= dict(zip(keys.tolist(), vectors, strict=True))
        else:
            gone = known.keys() & set(keys.tolist())
            assert layer.erase(keys) == len(gone)
            known = {key: vector for key, vector in known.items() if key not in gone}
        of_layer = {
            key: vector
            for part in layer.items()
            for key, vector in zip(part.keys.tolist(), part.vectors, strict=True)
        }
        assert of_layer.keys() == known.keys()
        assert all(torch.equal(of_layer[key], known[key]) for key in known)


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        (torch.empty(0, dtype=torch.int64), 0),
        (torch.tensor([99, -1]), 0),
        (torch.tensor([[3, 3], [99, 4]]), 2),
        (torch.tensor([3], dtype=torch.int32), 1),
        (torch.arange(30), 30),
    ],
)
def test_the_number_of_erased_keys_is_returned(keys, count):
    layer = new_layer()
    layer(torch.arange(30).view(10, 1, 3))
    assert layer.erase(keys) == count
    assert len(layer.table) == 30 - count


def test_a_full_table_has_room_again():
    layer = new_layer()
    layer(torch.arange(CAPACITY).view(20, 1, 3))
    with pytest.raises(sparsekit.TableFullError):
        layer(torch.tensor([[[100]]]))
    layer.erase(torch.tensor([5]))
    layer(torch.tensor([[[100]]]))
    assert layer.table.find(torch.tensor([100, 59, 5])).tolist() == [59, 5, -1]


def test_a_backward_whose_forward_was_before_is_refused():
    layer, beside = new_layer(), new_layer(name="items")
    keys = torch.arange(6).view(2, 1, 3)
    out, of_other = layer(keys), beside(keys)
    layer.erase(torch.tensor([1]))
    of_other.sum().backward()
    with pytest.raises(RuntimeError, match=r"users: its rows have other keys than in the forward"):
        out.sum().backward()
    assert layer.weight.grad is None
    layer(keys).sum().backward()


def test_a_gradient_that_has_not_been_applied_is_refused():
    layer = new_layer()
    layer(torch.arange(6).view(2, 1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"users: weight has a gradient, .* zero_grad"):
        layer.erase(torch.tensor([1]))
    assert len(layer.table) == 6


def test_what_cannot_be_erased():
    with pytest.raises(ValueError, match="users: without the hash table every key has a row"):
        new_layer(use_hashtable=False).erase(torch.tensor([1]))
    with pytest.raises(TypeError, match=r"users: keys must be .* got torch.float32"):
        new_layer().erase(torch.tensor([1.0]))
    with pytest.raises(RuntimeError, match="users: the layer is on meta"):
        new_layer(device="meta").erase(torch.tensor([1]))


@pytest.mark.parametrize("name", ["LazyAdam", "Adam"])
def test_checkpoints_after_an_erasure(tmp_path, name):
    layer, optimizer = trained(name, False)
    checkpoints = checkpoint.Checkpoints(tmp_path, complete_every=3)
    model = torch.nn.ModuleDict({"users": layer})
    checkpoints.save(1, model, optimizer)
    layer.erase(torch.tensor(ERASED))
    checkpoints.save(2, model, optimizer)
    train(layer, optimizer, batches(5)[0])
    checkpoints.save(3, model, optimizer)

    loaded = torch.nn.ModuleDict({"users": new_layer()})
    other = make(name, loaded.parameters())
    checkpoint.load(loaded, checkpoints.latest(), other)
    for mine, theirs in ((layer, optimizer), (loaded["users"], other)):
        for keys in batches(6):
            train(mine, theirs, keys)
    assert torch.equal(layer.table.keys(), loaded["users"].table.keys())
    assert torch.equal(layer.weight, loaded["users"].weight)


def test_an_interrupted_erasure_leaves_the_other_keys_as_they_were():
    expected, other = trained("LazyAdam", False, renamed)
    others = expected.vectors(torch.tensor(OTHERS))
    for keys in batches(1):
        train(expected, other, keys)

    def erase_interrupted(moment):
        layer, optimizer = trained("LazyAdam", False)
        count = interrupt(lambda: layer.erase(torch.tensor(ERASED)), moment)
        assert {*layer.table.keys().tolist()} in ({*OTHERS}, {*OTHERS, *ERASED})
        assert torch.equal(layer.vectors(torch.tensor(OTHERS)), others)
        layer.erase(torch.tensor(ERASED))
        assert {*layer.table.keys().tolist()} == {*OTHERS}
        for keys in batches(1):
            train(layer, optimizer, keys)
        assert torch.equal(layer.vectors(torch.arange(30)), expected.vectors(torch.arange(30)))
        return count

    count = erase_interrupted(10**9)
    for moment in [*range(1, count, count // 60), *range(count - 300, count, 17)]:
        assert erase_interrupted(moment) is None
