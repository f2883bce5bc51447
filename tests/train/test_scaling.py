"""Tests of how scaling over ranks is measured and predicted."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from sparsekit.optim import LazyAdam
from sparsekit.train import scaling
from sparsekit.train.resume import Epoch
from sparsekit.train.scaling import STEPS, WARM_UP, Case, _batch, predicted, samples_per_second

CASE = Case(tables=2, rows=50, dim=4, batch=9, epochs=3)


def test_the_extra_time_stays_or_falls_with_the_bytes_of_a_rank():
    # One rank takes 10 s; two take half of that, and 3 s extra.
    for ranks, worst, best in [(2, 8.0, 8.0), (4, 5.5, 2.5 + 3 * 3 / 16 * 4), (1, 13.0, 10.0)]:
        found = predicted({1: 1 / 10, 2: 1 / 8}, ranks)
        assert found == pytest.approx((10 / worst, 10 / best))
    # Only the result with the most ranks is used, wherever it is listed. If ranks are faster than
    # their share, there is no extra time.
    measured = {4: 1 / 3, 1: 1 / 10, 2: 1 / 5}
    assert predicted(measured, 8)[0] == pytest.approx(10 / (10 / 8 + 0.5))
    assert predicted({1: 1.0, 2: 3.0}, 8) == pytest.approx((8, 8))
    for wrong in ({1: 1.0}, {2: 1.0, 4: 2.0}, {}):
        with pytest.raises(ValueError, match=r"predicted needs 1 rank and more, got \["):
            predicted(wrong, 2)


def test_parts_of_a_batch_are_those_of_one_rank():
    def batch(rank, ranks):
        generator = torch.Generator().manual_seed(3)
        return _batch(CASE, ["C1", "C2"], generator, rank, ranks)

    whole, parts = batch(0, 1), [batch(rank, 2) for rank in range(2)]
    assert [part.rows for part in parts] == [5, 4]
    assert torch.cat([part.label for part in parts]).equal(whole.label)
    assert torch.cat([part.dense for part in parts]).equal(whole.dense)
    for name in ("C1", "C2"):
        assert torch.cat([part.sparse[name][0] for part in parts]).equal(whole.sparse[name][0])
    assert not whole.sparse["C1"][0].equal(whole.sparse["C2"][0])


def test_keys_have_the_density_of_a_zipf_law():
    case = Case(tables=1, rows=1000, batch=30_000)
    batch = _batch(case, ["C1"], torch.Generator().manual_seed(3), 0, 1)
    counts = batch.sparse.values().bincount(minlength=1001).double()
    assert len(counts) <= 1001
    assert counts[0] == 0
    # Keys in [a, 2a) are equally frequent for all a.
    shares = [counts[a : 2 * a].sum() / case.batch for a in (1, 8, 64, 256)]
    assert shares == pytest.approx([0.1003] * 4, abs=0.01)
    assert set(batch.label.tolist()) == {0.0, 1.0}


def test_the_median_of_the_epochs_behind_the_warm_up(monkeypatch):
    fitted = {}

    class Recorded:
        def __init__(self, model, losses, optimizers, **settings):
            fitted.update(model=model, losses=losses, optimizers=optimizers)

        def fit(self, batches, epochs):
            fitted.update(batches=batches, epochs=epochs)
            speeds = [1000.0] * WARM_UP + [3.0, 1.0, 2.0]
            return [Epoch(1, 0.0, 1.0, speed) for speed in speeds]

    monkeypatch.setattr(scaling, "Trainer", Recorded)
    assert samples_per_second(CASE) == 2.0
    assert fitted["epochs"] == WARM_UP + 3
    assert len(fitted["batches"]) == STEPS
    first, second = fitted["batches"][:2]
    assert not first.dense.equal(second.dense)
    model, batch = fitted["model"], first
    sparse, dense = fitted["optimizers"]
    assert isinstance(sparse, LazyAdam)
    trained = [*sparse.param_groups[0]["params"], *dense.param_groups[0]["params"]]
    assert {id(p) for p in trained} == {id(p) for p in model.parameters()}
    capacities = {layer.capacity for layer in model.embeddings.layers.values()}
    assert capacities == {2 * CASE.rows + 1000}
    losses, penalty = fitted["losses"](model, batch)
    scores = model(batch.dense, batch.sparse)
    expected = binary_cross_entropy_with_logits(scores, batch.label, reduction="none")
    torch.testing.assert_close(losses, expected)
    assert penalty == 0.0
