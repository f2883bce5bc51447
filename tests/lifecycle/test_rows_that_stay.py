"""Rows that are still needed are never dropped, and a lookup that fails leaves the table whole."""

import copy
import gc
import random

import pytest
import torch
from interruptions import OPS, PACKAGE, interrupt

import sparsekit
from sparsekit.distributed.shard_gradient import ShardGradient

BUDGET, CAPACITY = 10, 12


def new_layer(**options):
    settings = {"on_full": "evict", "max_rows": BUDGET, "seed": 1, "name": "a"} | options
    return sparsekit.DistributedEmbedding("sum", CAPACITY, 2, 1, **settings)


def look(layer, keys):
    keys = torch.tensor(list(keys), dtype=torch.int64)
    return layer((keys, torch.tensor([0, len(keys)])))


def keys_of(layer):
    return set(layer.table.keys().tolist())


def everything(layer):
    """Return a copy of all that a table has."""
    return copy.deepcopy(layer.state_dict())


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("held", [12, 8])
def test_a_table_that_cannot_free_enough_stays_as_it_was(held):
    """Nothing is dropped for a lookup that fails because all rows must stay, or too many."""
    layer = new_layer(max_rows=CAPACITY)
    look(layer, range(20, 20 + CAPACITY - held))
    out = look(layer, range(held))
    before = everything(layer)
    with pytest.raises(sparsekit.TableFullError, match="a: the table on rank 0 is full"):
        look(layer, range(100, 101 + CAPACITY - held))
    assert_same(everything(layer), before)
    assert layer.life.evicted == 0
    out.sum().backward()
    assert len(layer.weight.grad._indices()[0]) == held


def test_rows_over_the_budget_go_as_soon_as_nobody_needs_them():
    layer = new_layer()
    out = look(layer, range(9))
    look(layer, [50, 51, 52])  # does not fit the budget, but the capacity
    assert keys_of(layer) == {*range(9), 50, 51, 52}
    del out
    look(layer, [60])
    assert len(layer.table) == BUDGET


def test_a_graph_that_is_dropped_without_a_backward_frees_its_rows_at_once():
    gc.disable()
    try:
        layer = new_layer()
        group = sparsekit.EmbeddingGroup({"a": layer})
        for call in (look, lambda _, keys: group({"a": torch.tensor([[[*keys]]])})["a"]):
            out = call(layer, range(9))
            assert not all(lookup.done for lookup in layer.weight.lookups)
            (out * 2).sum()
            del out
            assert all(lookup.done for lookup in layer.weight.lookups)
        look(layer, range(30, 40))
        assert keys_of(layer) == {*range(30, 40)}
    finally:
        gc.enable()


def test_training_lookups_without_gradients_touch_but_hold_nothing():
    layer = new_layer()
    with torch.no_grad():
        look(layer, range(9))
    assert not layer.weight.lookups
    look(layer, range(30, 40))
    assert keys_of(layer) == {*range(30, 40)}
    with torch.no_grad():
        look(layer, [30, 30])
    assert layer.scores[layer.table.find(torch.tensor([30]))].tolist() == [3]


def test_a_second_backward_of_a_retained_graph():
    """Rows of a retained graph may go after its first backward; then a second one is refused."""
    layer, other = new_layer(), new_layer(max_rows=CAPACITY)
    for one in (layer, other):
        look(one, range(20, 25)).sum().backward()
        one.weight.grad = None
        out = look(one, range(5))
        out.sum().backward(retain_graph=True)
        look(one, range(40, 42))  # the rows of the gradient are held; 20 to 24 are not
        out.sum().backward(retain_graph=True)
        grad = one.weight.grad.coalesce()
        assert set(one.table.keys()[grad.indices()[0]].tolist()) == {*range(5)}
        assert torch.equal(grad.values(), torch.full((5, 2), 2.0))
        one.weight.grad = None
        if one is layer:
            look(one, range(60, 70))
            with pytest.raises(RuntimeError, match="a: the table has dropped keys of this"):
                out.sum().backward()
            assert one.weight.grad is None


def test_moved_rows_of_a_retained_graph_get_their_gradient():
    layer = new_layer()
    look(layer, range(20, 25))
    out = look(layer, range(5))
    out.sum().backward(retain_graph=True)
    layer.weight.grad = None
    layer.evict(keep=5)
    assert keys_of(layer) == {*range(5)}
    out.sum().backward()
    grad = layer.weight.grad.coalesce()
    assert torch.equal(grad.indices()[0], torch.arange(5))


def test_a_gradient_moves_with_its_rows_and_stays_sharded():
    layer = new_layer()
    look(layer, range(20, 25))
    (look(layer, range(5)) * torch.tensor([1.0, 2.0])).sum().backward()
    plain = layer.weight.grad
    for kind in (torch.Tensor, ShardGradient):
        layer.weight.grad = ShardGradient.of(plain, "a") if kind is ShardGradient else plain
        copied = copy.deepcopy(layer.state_dict())
        layer.evict(keep=5)
        grad = layer.weight.grad
        assert type(grad) is kind
        assert grad.is_coalesced()
        assert set(layer.table.keys()[grad._indices()[0]].tolist()) == {*range(5)}
        assert torch.equal(grad._values(), torch.tensor([[1.0, 2.0]] * 5))
        layer.weight.grad = None
        layer.load_state_dict(copied)


def test_two_lookups_in_one_step_share_a_table():
    """Rows of the first lookup stay for the backward of both; gradients go to the right keys."""
    layer = new_layer()
    look(layer, range(20, 26))
    first, second = look(layer, range(5)), look(layer, [3, 4, *range(30, 35)])
    third = look(layer, [30, 40])
    (first.sum() + 10 * second.sum() + 100 * third.sum()).backward()
    grad = layer.weight.grad.coalesce()
    keys = layer.table.keys()[grad.indices()[0]].tolist()
    expected = {
        0: 1,
        1: 1,
        2: 1,
        3: 11,
        4: 11,
        30: 110,
        40: 100,
        **dict.fromkeys(range(31, 35), 10),
    }
    assert dict(zip(keys, grad.values()[:, 0].tolist(), strict=True)) == expected


def test_a_listener_that_raises_leaves_the_table_whole():
    """The rows are gone and the lookup has failed; the next one goes on."""
    layer, other = new_layer(), new_layer()
    for one in (layer, other):
        look(one, range(9))
    layer.life.on_evict = lambda evicted: 1 / 0
    with pytest.raises(ZeroDivisionError):
        look(layer, [30, 31, 32])
    assert keys_of(layer) < {*range(9)}
    assert int(layer.clock) == 1
    layer.life.on_evict = None
    for one in (layer, other):
        look(one, [30, 31, 32])
    assert keys_of(layer) == keys_of(other)
    assert layer.life.evicted == other.life.evicted
    # Without a listener, the sweep comes after keys are inserted, which then have other rows.
    order, other_order = layer.table.keys().argsort(), other.table.keys().argsort()
    assert torch.equal(layer.scores[order], other.scores[other_order])
    assert torch.equal(layer.weight[order], other.weight[other_order])


@pytest.mark.parametrize("ttl", [None, 3])
def test_interrupts_during_a_sweep(ttl):
    """Each key that is left has its own vector, states and score, whenever the interrupt comes."""
    own = torch.arange(10)

    def trained():
        layer = new_layer(score="lfu", ttl=ttl)
        optimizer = sparsekit.optim.LazyAdam(layer.parameters(), lr=0.1)
        for keys in ([*range(10)], [3, 5, 3], [7], [8, 8]):
            look(layer, keys).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer, optimizer

    def belongings(layer, optimizer, keys):
        rows = layer.table.find(keys)
        state = optimizer.state[layer.weight]
        of_rows = (layer.weight, layer.scores, state["exp_avg"], state["exp_avg_sq"])
        return [tensor.detach()[rows] for tensor in of_rows]

    layer, optimizer = trained()
    expected = belongings(layer, optimizer, own)
    look(layer, [20, 21])
    left = keys_of(layer)

    def interrupted(moment, files):
        layer, optimizer = trained()
        out = look(layer, [7])
        held = belongings(layer, optimizer, torch.tensor([7]))
        count = interrupt(lambda: look(layer, [20, 21]), moment, files)
        kept = torch.tensor(sorted(keys_of(layer) & {*range(10)} - {7}))
        for one, other in zip(belongings(layer, optimizer, kept), expected, strict=True):
            assert torch.equal(one, other[kept])
        for one, other in zip(belongings(layer, optimizer, torch.tensor([7])), held, strict=True):
            assert torch.equal(one, other)
        size = len(layer.table)
        if not keys_of(layer) & {20, 21}:
            assert not layer.weight[size:].any()
            assert not layer.scores[size:].any()
        out.sum().backward()
        grad = layer.weight.grad
        assert layer.table.keys()[grad._indices()[0]].tolist() == [7]
        layer.weight.grad = None
        look(layer, [20, 21])
        assert keys_of(layer) >= {20, 21}
        assert len(layer.table) <= BUDGET
        return count

    assert left >= {20, 21}
    for files, most in ((PACKAGE, 60), (OPS, 200)):
        count = interrupted(10**9, files)
        for moment in range(1, count, max(1, count // most)):
            assert interrupted(moment, files) is None


def test_a_backward_that_reads_copies_gets_the_rows_of_its_keys():
    """torch's hooks of saved tensors let the backward read copies, which no sweep renumbers."""
    layer = new_layer()
    look(layer, range(20, 25))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        out = look(layer, range(5))
    layer.evict(keep=5)
    out.sum().backward()
    grad = layer.weight.grad.coalesce()
    assert torch.equal(grad.indices()[0], torch.arange(5))


def test_a_gradient_of_a_gradient_whose_rows_have_moved_is_refused():
    layer = new_layer()
    look(layer, range(20, 25))
    scale = torch.ones(1, requires_grad=True)
    for swept in (False, True):
        out = look(layer, range(5)) * scale
        (grad,) = torch.autograd.grad(out.square().sum(), [layer.weight], create_graph=True)
        penalty = grad.to_dense().square().sum()
        if not swept:
            penalty.backward()
            assert scale.grad.item() > 0
            continue
        layer.weight.grad = None
        layer.evict(keep=5)
        with pytest.raises(RuntimeError, match="a: the table has dropped keys since this gradient"):
            penalty.backward()


@torch.no_grad()
def test_a_listener_that_changes_another_table_of_the_lookup():
    """Rows that the lookup has found before may be other rows by the time of the next sweep."""
    first, second = (new_layer(name=name) for name in ("first", "second"))
    group = sparsekit.EmbeddingGroup({"first": first, "second": second})
    for layer in (first, second):
        look(layer, range(BUDGET))
    row_0, *_, last = second.table.keys().tolist()
    second.assign(torch.tensor([last]), torch.full((1, 2), 7.0))
    second.scores[BUDGET - 1] = 0  # the first to go, but for the lookup's own keys
    first.on_evict(lambda _: second.erase(torch.tensor([row_0])))
    new = list(range(1000, 1003))
    offsets = torch.arange(4)
    found = group(
        {
            "first": (torch.tensor(new), offsets),
            "second": (torch.tensor([last, *new[:2]]), offsets),
        }
    )
    assert first.life.evicted > 0
    assert second.life.evicted > 0
    assert second.life.erased == 1
    assert (found["second"][0] == 7).all()


@pytest.mark.parametrize("score", ["lru", "lfu"])
def test_a_sweep_after_the_keys_drops_what_one_before_them_does(score):
    """This holds for a table that starts again, as its free rows are too few for all keys, too."""
    draw = random.Random(0)
    sizes = {"small": 20, "large": 300, "plain": 1200}

    def new_group():
        layers = {}
        for name, capacity in sizes.items():
            options = {} if name == "plain" else {"on_full": "evict"}
            layers[name] = sparsekit.EmbeddingBag(capacity, 2, name=name, score=score, **options)
        group = sparsekit.EmbeddingGroup(layers)
        return group, sparsekit.optim.LazyAdam(group.parameters(), lr=0.1)

    groups = [new_group(), new_group()]
    for layer in groups[1][0].layers.values():
        layer.life.makes_room_first = True
    first, starts_again = groups[0][0].layers, 0
    for _ in range(60):
        batch = {
            name: torch.tensor([draw.randrange(min(3 * size, 1000)) for _ in range(18)])[:, None]
            for name, size in sizes.items()
        }
        outs = []
        first["small"].life.makes_room_first = False
        for group, optimizer in groups:
            out = torch.cat([*group(batch).values()], 1)
            outs.append(out.detach())
            (out * torch.arange(6.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*outs)
        for name in sizes:
            one, other = (group.layers[name] for group, _ in groups)
            assert keys_of(one) == keys_of(other)
            assert one.row_counts() == other.row_counts()
            of_keys = one.table.keys()
            for of_rows in ("scores", "weight"):
                rows = one.table.find(of_keys), other.table.find(of_keys)
                assert torch.equal(getattr(one, of_rows)[rows[0]], getattr(other, of_rows)[rows[1]])
        starts_again += first["small"].life.makes_room_first
    assert starts_again > 20
    assert not first["large"].life.makes_room_first
    assert first["small"].life.evicted > 100 < first["large"].life.evicted
