"""Tables report the right figures on one rank; tests/ranks/test_loaders.py covers several ranks."""

import pytest
import torch

import sparsekit
from sparsekit.train import Telemetry, telemetry


def layer_of(*keys, capacity=40, **options):
    layer = sparsekit.Embedding(capacity, 2, name="ids", **options)
    if keys:
        layer.assign(torch.tensor(keys), torch.ones(len(keys), 2))
    return layer


def test_a_model_without_tables_has_no_figures():
    assert Telemetry(torch.nn.Linear(1, 1)).read(3, None) == {}


def test_a_table_without_keys():
    assert Telemetry(torch.nn.Sequential(layer_of())).read(0, None) == {
        "ids": {
            "capacity": 40, "rows": 0, "load": 0.0, "new_rows_per_step": 0.0, "skew": 1.0,
            "full_lines": 0.0,
        }
    }  # fmt: skip


def test_rows_without_a_hash_table_are_not_counted():
    assert Telemetry(layer_of(use_hashtable=False)).read(1, None) == {"ids": {"capacity": 40}}


def test_new_rows_are_those_since_the_last_call():
    layer = layer_of(1, 2, 3)
    figures = Telemetry(layer)

    def read(steps):
        found = figures.read(steps, None)["ids"]
        return found["rows"], found["load"], found["new_rows_per_step"], found["skew"]

    assert read(2) == (3, 3 / 40, 1.5, 1.0)
    layer.assign(torch.tensor([7, 8]), torch.ones(2, 2))
    assert read(2) == (3, 3 / 40, 1.5, 1.0)  # the values are still those of this step
    assert read(6) == (5, 5 / 40, 0.5, 1.0)
    assert read(7) == (5, 5 / 40, 0.0, 1.0)


def test_keys_before_the_first_step_are_new_in_it():
    assert Telemetry(layer_of(1, 2, 3)).read(0, None)["ids"]["new_rows_per_step"] == 3


@pytest.mark.parametrize("sampled", [1, 3, 4096])
def test_full_lines_are_those_whose_five_places_have_keys(monkeypatch, sampled):
    monkeypatch.setattr(telemetry, "SAMPLED_LINES", sampled)
    layer = layer_of(*range(40))
    lines = layer.table.buckets.numpy().view("i4")[:sampled, 10:15]
    full = sum(all(row >= 0 for row in line) for line in lines.tolist())
    found = Telemetry(layer).read(1, None)["ids"]["full_lines"]
    assert found == pytest.approx(full / len(lines), abs=1e-6)
    if sampled == 4096:
        assert 0 < full < len(lines)


def test_one_rank_sends_nothing():
    assert Telemetry(layer_of()).bytes_sent(None) == 0
