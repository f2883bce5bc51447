"""S4, data-parallel SGD, meets its requirements.

Other tests check that N ranks train as one (tests/ranks/test_trainer.py), a prefetcher's order and
thread (tests/data/test_prefetch.py), and `sparsekit scaling` (tests/test_cli_clicks.py).
"""

import io

import pytest
import torch
import torch.distributed as dist

from sparsekit.distributed.averaging import Averaging
from sparsekit.train import Trainer, linear_warmup

SAMPLES, BATCH = 22, 7
# With UNEVEN samples, ranks have different numbers of samples in the last batch; with EMPTY, one
# rank has none.
UNEVEN, EMPTY = 26, 22


def gradient_of_last_step(rank, samples, mean_of_means=False):
    """Return a linear model's gradient; `mean_of_means` weights ranks equally, which is wrong."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    def loss_fn(model, batch):
        losses = model(batch[0])[:, 0].square()
        if mean_of_means and len(losses):
            losses = losses * (samples % BATCH) / ranks / len(losses)
        return losses, 0.0

    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = Trainer(model, loss_fn, [sgd], stream=io.StringIO())
    trainer.fit((torch.randn(samples, 3),), epochs=1, global_batch_size=BATCH)
    return model.weight.grad[0].tolist()


@pytest.mark.parametrize("samples", [UNEVEN, EMPTY])
def test_gradients_equal_one_ranks_with_an_uneven_last_batch_and_an_empty_rank(ranks, samples):
    one = gradient_of_last_step(0, samples)
    for found in ranks(gradient_of_last_step, samples):
        assert found == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("samples", [UNEVEN, EMPTY])
def test_a_deliberate_mean_of_means_would_fail_that_test(ranks, samples):
    one = gradient_of_last_step(0, samples)
    for found in ranks(gradient_of_last_step, samples, True):
        assert found != pytest.approx(one, rel=1e-3)


def received(rank):
    seen = []

    def loss_fn(model, batch):
        seen.append(batch[0][:, 0].tolist())
        return model(batch[0])[:, 0], 0.0

    model = torch.nn.Linear(1, 1)
    trainer = Trainer(model, loss_fn, [torch.optim.SGD(model.parameters(), lr=0.0)], seed=3)
    trainer.stream = io.StringIO()
    trainer.fit((torch.arange(float(SAMPLES))[:, None],), epochs=2, global_batch_size=BATCH)
    return seen


def test_each_rank_receives_its_slice_and_the_permutation_is_split_completely(ranks):
    of_ranks = ranks(received)
    steps = len(of_ranks[0])
    assert steps == 2 * 4
    for epoch in (range(4), range(4, 8)):
        every = [sample for seen in of_ranks for step in epoch for sample in seen[step]]
        assert sorted(every) == list(range(SAMPLES))
    for step, batch in enumerate(received(0)):
        assert [sample for seen in of_ranks for sample in seen[step]] == batch
        assert max(len(seen[step]) for seen in of_ranks) <= -(-len(batch) // len(of_ranks))


def test_schedule_matches_its_closed_form():
    weight = torch.nn.Parameter(torch.zeros(()))
    sgd = torch.optim.SGD([weight], lr=0.1)
    scheduler = linear_warmup(sgd, 8, 5, 20)
    rates = []
    for _ in range(25):
        rates.append(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()
    expected = [0.1 + 0.7 * t / 5 for t in range(5)]
    expected += [0.8 * (20 - t) / 15 for t in range(5, 20)] + [0.0] * 5
    assert rates == pytest.approx(expected, abs=1e-12)
    sgd.param_groups[0]["lr"] = sgd.param_groups[0]["initial_lr"]
    linear_warmup(sgd, 8, 0)
    # Without a warm-up the full rate applies from the first step.
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.8)


def test_momentum_is_corrected_when_the_rate_changes():
    """The velocity of SGD includes the rate, so it is scaled by new / old rate at each change."""
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    scheduler = linear_warmup(sgd, 4, 6)
    expected, velocity, before = 0.0, 0.0, None
    for step in range(12):
        rate = 0.1 * (1 + 3 * min(step, 6) / 6)
        gradient = 1.0 + step % 3
        correction = 1.0 if before is None else rate / before
        velocity = 0.9 * correction * velocity + rate * gradient
        expected, before = expected - velocity, rate
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        sgd.step()
        scheduler.step()
        assert weight.item() == pytest.approx(expected, rel=1e-12)


def events_of_backward(rank):
    events = []
    average = Averaging.average

    def recorded(self, state, bucket):
        events.append("averaging begins")
        return average(self, state, bucket)

    Averaging.average = recorded
    try:
        # The layers exceed the 1 MiB of the first bucket of gradients.
        model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(3)))
        trainer = Trainer(
            model,
            lambda model, batch: (model(batch[0]).sum(1), 0.0),
            [torch.optim.SGD(model.parameters(), lr=0.0)],
            stream=io.StringIO(),
        )
        hook = model[0].weight.register_hook(lambda _: events.append("last gradient"))
        trainer.fit((torch.ones(6, 600),), epochs=2, global_batch_size=6)
        hook.remove()
    finally:
        Averaging.average = average
    return events


def test_the_first_all_reduce_begins_before_backward_ends(ranks):
    for events in ranks(events_of_backward):
        # DistributedDataParallel learns the order in its first backward, with a single bucket.
        first = events.index("last gradient")
        assert events[first:] == [
            *("last gradient", "averaging begins"),
            *("averaging begins", "last gradient", "averaging begins"),
        ]


def batch_norm(rank):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"1 is BatchNorm1d.*SyncBatchNorm on GPUs, or LayerNorm"):
        Trainer(model, lambda model, batch: (model(batch[0])[:, 0], 0.0), [])


def test_batch_norm_is_refused_as_documented(ranks):
    ranks(batch_norm)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    # A single rank has the whole batch, so the trainer accepts the layer.
    Trainer(model, lambda model, batch: (model(batch[0])[:, 0], 0.0), [])
