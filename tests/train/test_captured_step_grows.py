"""A captured step whose tables grow is captured again, and gives the bits of one that does not."""

import pytest
import torch
from captured_steps import STEPS, Trained
from graphs import HostGraph, host_graphs
from rooms import rooms

import sparsekit
from sparsekit.device_rooms import is_in_room

GROWS = {"on_full": "grow", "max_capacity": 1 << 20}


def contents(trained, losses):
    """Return losses, keys, and the rows in use of vectors and states."""
    found = {"losses": losses}
    for layer in trained.model.layers:
        rows = len(layer.table)
        state = trained.optimizer.state[layer.weight]
        found |= {f"{layer.name} keys": layer.table.keys(), layer.name: layer.weight[:rows].clone()}
        found |= {f"{layer.name} {x}": state[x][:rows].clone() for x in ("exp_avg", "exp_avg_sq")}
    return found


@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize("is_made", [True, False])
def test_steps_that_grow_give_the_bits_of_steps_that_do_not(tables, is_made):
    found, capacities = [], []
    for grows in (True, False):
        with rooms(), host_graphs(is_made=lambda looks: is_made):
            options = {"rows": 10, "all_tables": GROWS} if grows else {"rows": 5000}
            trained = Trained(tables, **options)
            found.append(contents(trained, trained.run(steps=30)))
            assert HostGraph.replays == 30 - 3
            assert is_in_room(trained.model.layers[0].weight) == grows
            capacities.append([layer.table.capacity for layer in trained.model.layers])
    assert min(capacities[0]) >= 100
    assert found[0]["losses"] == found[1]["losses"]
    for name in found[0].keys() - {"losses"}:
        assert torch.equal(found[0][name], found[1][name]), name


def test_replays_that_do_not_grow_do_not_wait():
    waits = []
    with rooms(), host_graphs(on_wait=lambda: waits.append(1)):
        trained = Trained(3, rows=10, all_tables=GROWS)
        captures, capture = [], trained.captured._capture
        trained.captured._capture = lambda: [captures.append(1), capture()]
        trained.run(steps=STEPS)
        for i in range(STEPS, 60):
            before = len(captures), len(waits)
            trained.run(i, 1)
            assert len(captures) > before[0] or len(waits) == before[1]
        assert 1 < len(captures) < 15


def test_the_end_of_the_room():
    """No report arrives by itself here: the replay must know that it has to wait."""
    found = []
    for options in (
        {"rows": 10, "all_tables": {"on_full": "grow", "max_capacity": 60}},
        {"rows": 60},
    ):
        with rooms(), host_graphs(is_made=lambda looks: False):
            trained, losses = Trained(1, **options), []
            with pytest.raises(sparsekit.TableFullError) as raised:
                losses.extend(trained.run(i, 1) for i in range(40))
            found.append((losses, str(raised.value)))
    assert found[0] == found[1]
    assert len(found[0][0]) > 4
