"""Tables grow on a device, too: rows get memory before a kernel writes to them.

The host runner stands for the device. A row without memory cannot be touched there, so each test
also shows that nothing does.
"""

import gc
import itertools

import pytest
import torch
from deferred_errors import deferred_errors
from host_waits import waits_of_each
from rooms import memory_in_use, memory_of, num_rooms, on_device
from simt_counts import counted
from torch.utils._python_dispatch import _disable_current_modes

import sparsekit
from sparsekit import device_rooms
from sparsekit.tables.growth import CanGrow
from sparsekit.tables.hash_table import HashTable

from . import test_growing_layers as on_cpu
from . import test_room_of_growing_layers as room


@pytest.fixture(autouse=True)
def _on_device():
    with on_device():
        yield


# Tests of tables on the CPU whose statements hold here as well.
test_optimizers_of_torch = on_cpu.test_optimizers_of_torch
test_gradients_are_accumulated = on_cpu.test_gradients_are_accumulated_while_the_table_grows
test_a_backward_after_the_table_has_grown = on_cpu.test_a_backward_after_the_table_has_grown
test_a_feature_that_reads = on_cpu.test_a_feature_that_reads_what_another_one_inserts
test_the_weight_stays_the_same_parameter = on_cpu.test_the_weight_stays_the_same_parameter
test_only_some_tables_of_a_group_grow = on_cpu.test_only_some_tables_of_a_group_grow
test_rows_with_scores = on_cpu.test_rows_with_scores
test_copies_go_on = on_cpu.test_copies_go_on
test_states_are_loaded = on_cpu.test_states_are_loaded
test_a_state_with_more_rows = on_cpu.test_a_state_with_more_rows_than_there_is_room_for
test_checkpoints = on_cpu.test_checkpoints
test_changes_that_change_nothing = on_cpu.test_changes_that_change_nothing
test_another_dtype = on_cpu.test_another_dtype
test_the_end_of_the_room = on_cpu.test_the_end_of_the_room
test_a_table_beside_a_full_one = room.test_a_table_that_grows_beside_one_that_is_full
test_an_optimizer_that_is_loaded_first = room.test_an_optimizer_that_is_loaded_first
test_states_are_saved_once = room.test_states_are_saved_once_and_stay_interleaved
test_a_load_makes_room = room.test_a_load_makes_room_for_keys_alone


@pytest.mark.parametrize("fused", [False, True], ids=["step", "fused"])
@pytest.mark.parametrize("name", on_cpu.OPTIMIZERS)
def test_training_is_that_of_a_large_table(name, fused):
    on_cpu.test_training_is_that_of_a_large_table(name, fused, "simt")


def test_from_meta():
    with _disable_current_modes():
        layer = on_cpu.layer_of(device="meta", ttl=9)
        layer.to_empty(device="cpu")
    layer(torch.arange(100))
    assert len(layer.table) == 100


UNIT = 1 << 16  # bytes of memory that come together


def whole(size):
    return -(-size // UNIT) * UNIT


def test_memory_grows_with_the_table():
    gc.collect()
    before, rooms_before, at = memory_in_use(), num_rooms(), {}
    layer = on_cpu.layer_of(1000, ttl=9, max_capacity=1 << 20)
    optimizer = sparsekit.optim.LazyAdam(layer.parameters())
    for count in (500, 1500, 3000, 20_000):
        on_cpu.train(layer, optimizer, [torch.arange(count)])
        at[layer.table.capacity] = memory_in_use() - before
    assert num_rooms() == rooms_before + 3
    # Vectors of 24 bytes, two states of as many, and scores: no more than once, and no copies.
    assert at == {rows: whole(rows * 24) + whole(rows * 48) + whole(rows * 8) for rows in at}
    assert len(at) == 4
    assert layer.reach == layer.table.capacity
    report = sparsekit.memory_report(layer).tables[0]
    assert report.vectors.reserved < 24 << 20
    del layer, optimizer, report
    gc.collect()
    assert memory_in_use() == before


def test_the_end_of_memory():
    layer, large = on_cpu.layer_of(1000), on_cpu.large()
    layers = layer, large
    optimizers = [sparsekit.optim.Adagrad(x.parameters(), lr=0.1) for x in layers]
    for one, optimizer in zip(layers, optimizers, strict=True):
        on_cpu.train(one, optimizer, [torch.arange(900)])
    buckets, capacity = layer.table.buckets, layer.table.capacity
    text = f"t: the table on rank 0 is full: 900 of {capacity} rows"
    with memory_of(0):
        with pytest.raises(sparsekit.TableFullError, match=text):
            layer(torch.arange(50_000))
        assert layer.table.buckets is buckets
        # Keys that there is room for are not refused, however many there are.
        out = layer(torch.arange(100).repeat(500))
        assert torch.equal(out, large(torch.arange(100).repeat(500)))
    on_cpu.assert_same(layer, large, optimizers)
    layer(torch.arange(50_000))
    assert len(layer.table) == 50_000


def test_the_text_of_a_weight():
    layer = on_cpu.layer_of(5)
    assert repr(layer.weight).startswith("[1048576, 3], with memory for the first 2730 rows: ")


def test_a_table_that_comes_from_the_cpu():
    """Its reach may end in rows that its index has no room for yet."""
    device_rooms.DEVICES.remove("cpu")
    try:
        layer = on_cpu.layer_of(9000)
        optimizer = sparsekit.optim.Adagrad(layer.parameters(), initial_accumulator_value=0.5)
        on_cpu.train(layer, optimizer, [torch.arange(50)])
        layer.table.extend_reach(9001)
        layer.table.extend_reach(18_001)
    finally:
        device_rooms.DEVICES.add("cpu")
    layer.float().double()
    assert device_rooms.is_in_room(layer.weight)
    assert layer.table.capacity == 9000
    assert layer.reach == 18_001
    layer.table.reserve(20_000)
    layer.table.reserve(21_000)
    assert layer.reach == layer.table.capacity == 40_000
    assert (optimizer.state[layer.weight]["sum"][50:40_000] == 0.5).all()
    assert not layer.weight[50:40_000].any()


class Steps:
    """Fused steps on batches of keys in turn; notes the capacity after each step."""

    def __init__(self, layer, batches):
        self.layer, self.turns, self.capacities = layer, iter(batches), []
        self.optimizer = sparsekit.optim.LazyAdam(layer.parameters(), lr=0.01)
        sparsekit.optim.fuse_in_backward(self.optimizer, layer)

    def __call__(self):
        self.layer(next(self.turns)).sum().backward()
        self.optimizer.step()
        self.capacities.append(self.layer.table.capacity)


# New keys in each step; many keys that repeat, in a small table; and keys that are known.
STREAMS = {
    "new keys": [torch.arange(1000 * i, 1000 * i + 300) for i in range(40)],
    "repeated keys": [torch.arange(10).repeat(500)] * 40,
    "known keys": [torch.arange(900)] * 40,
}


@pytest.mark.parametrize("stream", STREAMS)
def test_only_steps_that_grow_wait(stream):
    layer = on_cpu.layer_of(1000, max_capacity=1 << 20)
    steps = Steps(layer, STREAMS[stream])
    _, *found = waits_of_each(steps, layer, STREAMS[stream], calls=20)
    grown = [after > before for before, after in itertools.pairwise(steps.capacities)]
    for number, (waits, has_grown) in enumerate(zip(found, grown, strict=True), 1):
        # The number of rows, and whether all keys have been copied.
        assert waits.total() == (2 if has_grown else 0), (number, waits)
    assert sum(grown) == {"new keys": 3, "repeated keys": 2, "known keys": 2}[stream]


@pytest.mark.parametrize("stream", STREAMS)
def test_a_step_that_does_not_grow_launches_what_one_of_a_large_table_does(stream):
    counts, capacities = [], []
    large = sparsekit.Embedding(1 << 16, 3, name="t", dtype=torch.float64)
    for layer in (on_cpu.layer_of(1000, max_capacity=1 << 20), large):
        steps = Steps(layer, STREAMS[stream])
        for _ in range(8):
            steps()
        with counted() as count:
            steps()
        capacities.append(steps.capacities)
        counts.append({key: one.launches for key, one in count.items() if one.launches})
    assert 1000 < capacities[0][-2] == capacities[0][-1]
    assert counts[0] == counts[1]


def test_a_bound_far_above_the_rows_in_use():
    """Near the largest capacity it is time to wait, and not to refuse keys or take memory."""
    with deferred_errors(is_made=lambda looks: False):
        layer = on_cpu.layer_of(1000, max_capacity=3000)
        for _ in range(20):
            layer(torch.arange(10).repeat(90))
        assert len(layer.table) == 10
        assert layer.table.capacity == 3000
        layer(torch.arange(2990))
        with pytest.raises(sparsekit.TableFullError, match="full: 2990 of 3000 rows"):
            layer(torch.arange(3001))


def test_averages_are_refused():
    layer = on_cpu.layer_of()
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Sequential(layer))
    layer(torch.arange(5))
    with pytest.raises(NotImplementedError, match=r"^t: an average would go through all rows"):
        averaged.update_parameters(torch.nn.Sequential(layer))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("replace", CanGrow._replace),
        ("reserve", CanGrow.reserve),
        ("extend", CanGrow.extend_reach),
        ("new growth", CanGrow._new_growth),
        ("make room", HashTable.make_room_for),
    ],
)
def test_an_interrupt_anywhere(monkeypatch, name, function):
    monkeypatch.setitem(room.FUNCTIONS, name, function)
    room.test_an_interrupt_anywhere_while_growing(None, name)
