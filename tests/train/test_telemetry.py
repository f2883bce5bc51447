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


def test_rows_that_come_and_go_are_counted_since_the_last_call():
    layer = layer_of(on_full="evict", max_rows=4, ttl=100)
    figures = Telemetry(layer)

    def read(steps):
        found = figures.read(steps, None)["ids"]
        return [found[name] for name in (*telemetry.FLOWS, "hit_rate")]

    layer(torch.tensor([1, 2, 3, 3]))
    layer(torch.tensor([3, 4]))
    assert read(2) == [4, 0, 0, 0, 0, 1 / 5]  # inserted, admitted, refused, evicted, expired
    layer(torch.tensor([3, 4, 5]))
    assert read(3) == [1, 0, 0, layer.row_counts().evicted, 0, 2 / 3]
    layer.eval()
    layer(torch.tensor([3, 9]))
    assert read(4) == [0, 0, 0, 0, 0, None]
    layer.train()
    sparsekit.set_clock(layer, 1000)
    layer(torch.tensor([6]))
    assert read(5)[4] == layer.row_counts().expired > 0


def test_keys_that_admission_refuses_are_misses():
    layer = layer_of(admission=sparsekit.MinCount(2))
    figures = Telemetry(layer)
    for _ in range(3):
        layer(torch.tensor([1, 2, 2]))
    found = figures.read(3, None)["ids"]
    assert [found[name] for name in telemetry.FLOWS] == [2, 2, 1, 0, 0]
    # 1 is refused, admitted, found; 2 is admitted, found, found.
    assert found["hit_rate"] == 3 / 6


def test_deciles_of_ages_and_scores_are_those_of_all_rows(monkeypatch):
    layer = layer_of(score="lfu", capacity=1000)
    for step in range(101):
        layer(torch.arange(100 - step, 101))  # key k has come k + 1 times, and all of them last
    figures = Telemetry(layer)
    assert "age_deciles" not in figures.read(1, None)["ids"]
    found = figures.read(1, None, epoch_ends=True)["ids"]
    assert found["age_deciles"] == [0] * 11
    scores = sorted(step + 1 for step in range(101))
    assert found["score_deciles"][0] == 1
    assert found["score_deciles"][-1] == 101
    assert all(abs(a - b) <= 1 for a, b in zip(found["score_deciles"], scores[::10], strict=True))
    monkeypatch.setattr(telemetry, "SAMPLED_ROWS", 50)
    sampled = figures.read(1, None, epoch_ends=True)["ids"]["score_deciles"]
    assert all(abs(a - b) <= 4 for a, b in zip(sampled, scores[::10], strict=True))


def test_ranks_count_in_deciles_by_their_rows():
    values = torch.tensor([10, 20, 2, 1])  # those of a rank with 2 rows and of one with 8
    weights = torch.tensor([1.0, 1.0, 4.0, 4.0], dtype=torch.float64)
    deciles = telemetry._weighted_deciles(values, weights)
    assert deciles == [1, 1, 1, 1, 1, 2, 2, 2, 2, 10, 20]
    assert telemetry._weighted_deciles(values[:0], weights[:0]) == []
