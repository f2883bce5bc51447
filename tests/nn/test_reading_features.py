"""A feature with insert=False reads a table in which other features insert keys."""

import pickle

import pytest
import torch

import sparsekit
from sparsekit import DistributedEmbedding, EmbeddingGroup, Feature, MinCount
from tests.nn.keyed import Keyed

T = torch.tensor
DIM = 4


def remainder(keys):
    return keys % 5


TABLES = {
    "plain": {},
    "lru": {"score": "lru", "on_full": "evict", "max_rows": 9},
    "lfu": {"score": "lfu"},
    "function": {"score": remainder, "on_full": "evict", "max_rows": 9},
    "ttl": {"ttl": 3},
    "admission": {"admission": MinCount(2), "score": "lfu"},
    "padding": {"padding_key": 3},
    "wide": {"dtype": torch.float64},
}
READERS = {
    "pooled": Feature("a", "mean", insert=False),
    "largest": Feature("a", "max", insert=False),
    "unpooled": Feature("a", None, insert=False),
    "truncated": Feature("a", "sum", 2, truncate=True, insert=False),
}
CASES = [
    *((table, "pooled", fused) for table in TABLES for fused in (False, True)),
    *((table, reader, True) for table in ("padding", "admission") for reader in READERS),
]
# Bags of the feature that inserts, and of the one that reads.
STEPS = [
    (([1, 2, 2, 3], [0, 3, 4]), ([2, 3, 9, 9], [0, 4, 4])),
    (([1, 5], [0, 1, 2]), ([5, 9, 2, 8], [0, 1, 4])),
    (([], [0, 0, 0]), ([1, 7], [0, 1, 2])),
    (([6, 1, 1], [0, 1, 3]), ([1, 6, 9, 5, 2], [0, 3, 5])),
    (([9], [0, 1, 1]), ([], [0, 0, 0])),
]


def made(table, device, features):
    options = {"name": "a", "seed": 3, **TABLES[table]}
    layers = {
        "a": DistributedEmbedding("sum", 40, DIM, 1, **options),
        "other": DistributedEmbedding("sum", 40, DIM, 1, name="other", seed=3),
    }
    return EmbeddingGroup(layers, features).to(device)


def of_step(bags, device, keyed=False):
    (own, own_offsets), (read, read_offsets) = bags
    given = {"x": (own, own_offsets), "y": (read, read_offsets), "z": (own, own_offsets)}
    if not keyed:
        return {
            name: (T(k, dtype=torch.int64, device=device), T(o, device=device))
            for name, (k, o) in given.items()
        }
    values = T([*own, *own, *read], dtype=torch.int64, device=device)
    ends = [*own_offsets, *(len(own) + o for o in own_offsets[1:])]
    offsets = T([*ends, *(2 * len(own) + o for o in read_offsets[1:])], device=device)
    return Keyed(["z", "x", "y"], values, offsets)


def values_of(output):
    return output.values() if output.is_nested else output


def trained(group, look_up, device, fused):
    """Train; return the outputs, and all that the tables have in the end."""
    weights = [layer.weight for layer in group.layers.values()]
    optimizer = sparsekit.optim.LazyAdam(weights, lr=0.1)
    if fused:
        sparsekit.optim.fuse_in_backward(optimizer, group)
    outputs = []
    for bags in STEPS:
        out = look_up(bags)
        outputs += [values_of(one).detach().clone() for one in out.values()]
        loss = sum((values_of(one) * (1 + i)).square().sum() for i, one in enumerate(out.values()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ends = []
    for layer in group.layers.values():
        size = len(layer.table)
        states = optimizer.state[layer.weight]
        rows = layer.weight, states["exp_avg"], states["exp_avg_sq"]
        ends += [layer.table.keys(), *(tensor.detach()[:size].clone() for tensor in rows)]
        if layer.life is not None:
            ends += [layer.scores[:size].clone(), layer.clock.clone(), layer.row_counts()]
    return outputs, ends


def expected(table, reader, device, fused):
    """The same with keys inserted by a lookup of their own, and read by a layer that inserts none.

    A layer's own insert=False is tested elsewhere.
    """
    group = made(table, device, {"x": "a", "y": READERS[reader], "z": "other"})
    layer = group.layers["a"]
    readers = EmbeddingGroup(
        dict(group.layers.items()),
        {"x": "a", "y": Feature("a", *_settings(READERS[reader])), "z": "other"},
    )

    def look_up(bags):
        inputs = of_step(bags, device)
        with torch.no_grad():
            layer(inputs["x"])
        layer.insert = False
        out = readers(inputs)
        layer.insert = True
        return out

    return trained(group, look_up, device, fused)


def _settings(feature):
    return feature.combiner, feature.max_nnz, feature.truncate


def assert_alike(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
            else:
                assert one == other


@pytest.mark.parametrize(("table", "reader", "fused"), CASES)
def test_keys_are_inserted_first_and_read_as_in_evaluation(table, reader, fused, device):
    group = made(table, device, {"x": "a", "y": READERS[reader], "z": "other"})

    def look_up(bags):
        inputs = of_step(bags, device)
        if fused:
            group.prefetch(inputs)
        return group(inputs)

    found = trained(group, look_up, device, fused)
    assert_alike(found, expected(table, reader, device, fused))
    assert not {7, 8} & set(group.layers["a"].table.keys().tolist())


@pytest.mark.parametrize("table", ["plain", "lfu", "padding"])
def test_of_a_keyed_jagged_tensor(table, device):
    group = made(table, device, {"x": "a", "y": READERS["pooled"], "z": "other"})
    found = trained(group, lambda bags: group(of_step(bags, device, keyed=True)), device, False)
    assert_alike(found, expected(table, "pooled", device, False))


def test_only_readers_insert_nothing_and_touch_nothing(device):
    group = made("lfu", device, {"y": READERS["pooled"], "z": "other", "w": READERS["pooled"]})
    layer = group.layers["a"]
    layer.assign(T([2, 9], device=device), torch.ones(2, DIM, device=device))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    inputs = of_step(STEPS[0], device)
    out = group({"y": inputs["y"], "z": inputs["z"], "w": inputs["y"]})
    out["y"].sum().backward()
    assert all(torch.equal(before[name], t) for name, t in layer.state_dict().items())
    assert layer.weight.grad.coalesce().indices().tolist() == [[0, 1]]
    assert layer.row_counts()[-2:] == (0, 0)
    assert len(group.layers["other"].table) == 3


def test_rows_that_are_read_stay(device):
    """A sweep takes other rows first, although these have lower scores."""
    group = made("lru", device, {"x": "a", "y": READERS["pooled"], "z": "other"})
    layer = group.layers["a"]
    for key in range(9):
        layer((T([key], device=device), T([0, 1], device=device)))
    inputs = of_step((([20, 21], [0, 2]), ([0, 1, 50], [0, 3])), device)
    group(inputs)
    kept = set(layer.table.keys().tolist())
    assert {0, 1, 20, 21} <= kept
    assert 50 not in kept
    assert layer.life.evicted > 0


def test_a_refused_lookup_inserts_nothing():
    layer = DistributedEmbedding("sum", 40, DIM, 1, name="a")
    group = EmbeddingGroup({"a": layer}, {"x": "a", "y": READERS["pooled"]})
    good, bad = (T([1, 2]), T([0, 1, 2])), (T([1, 2]), T([0, 3, 1]))
    with pytest.raises(ValueError, match="offsets"):
        group({"x": good, "y": bad})
    assert len(layer.table) == 0


def test_only_readers_drop_no_expired_rows():
    layer = DistributedEmbedding("sum", 40, DIM, 1, name="a", ttl=1)
    group = EmbeddingGroup({"a": layer}, {"y": READERS["pooled"]})
    for key in range(3):
        layer((T([key]), T([0, 1])))
    before = len(layer.table)
    group({"y": (T([9]), T([0, 1]))})
    assert len(layer.table) == before == 2


def test_several_features_insert_in_a_table_that_another_reads():
    layer = DistributedEmbedding("sum", 40, DIM, 1, name="a", score="lfu")
    group = EmbeddingGroup({"a": layer}, {"x": "a", "y": "a", "z": Feature("a", insert=False)})
    keys = {"x": [1, 2], "y": [2, 3], "z": [3, 4]}
    out = group({name: T(own).view(-1, 1, 1) for name, own in keys.items()})
    assert layer.table.keys().tolist() == [1, 2, 3]
    assert (layer.scores[:3] >> 32).tolist() == [1, 2, 1]
    assert torch.equal(out["z"], layer.vectors(T([3, 4])))


def test_evaluation_and_copies():
    device = torch.device("cpu")
    group = made("lfu", device, {"x": "a", "y": READERS["pooled"], "z": "other"})
    inputs = of_step(STEPS[0], device)
    group(inputs)
    copy = pickle.loads(pickle.dumps(group))
    copy.eval()
    group.eval()
    before = group.layers["a"].scores.clone()
    new = of_step((([30], [0, 1]), ([31], [0, 1])), device)
    for name, out in group(new).items():
        assert torch.equal(out, copy(new)[name])
    assert torch.equal(group.layers["a"].scores, before)
    copy.train()
    copy(new)
    assert set(copy.layers["a"].table.keys().tolist()) == {1, 2, 3, 30}


def test_wrong_settings():
    layer = DistributedEmbedding("sum", 40, DIM, 1, name="a", max_keys_per_rank=9)
    with pytest.raises(ValueError, match=r"features\['y'\]: insert=False cannot have max_keys"):
        EmbeddingGroup({"a": layer}, {"x": "a", "y": Feature("a", insert=False)})
    with pytest.raises(TypeError, match=r"features\['y'\]: insert must be True or False, got 0"):
        EmbeddingGroup({"a": layer}, {"y": Feature("a", insert=0)})
