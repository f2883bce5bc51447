"""Training on N ranks gives the same weights and losses as on one rank."""

import errno
import io
import json
import math

import pytest
import torch
import torch.distributed as dist

import sparsekit
from sparsekit.checkpoint import Checkpoints
from sparsekit.data import CsvReader
from sparsekit.datasets import Ratings
from sparsekit.models import RatingModel
from sparsekit.train import JsonLines, Trainer

from .pool import Raised

# Batches have 7, 7, 7 and 1 samples, so shares are uneven, and the last sample is on rank 0.
SAMPLES, BATCH, EPOCHS = 22, 7, 5
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


def make_data(dtype):
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-9, 9, (SAMPLES, 2, 3), generator=generator)
    return keys, torch.randn(SAMPLES, generator=generator, dtype=torch.float64).to(dtype)


def shards(layer):
    """Return the keys and rows of this rank."""
    keys = layer.table.keys()
    return keys, layer.weight.detach()[: len(keys)]


def train(rank, dtype, optimizer, penalty):
    layer = sparsekit.DistributedEmbedding("mean", 40, 4, 2, 3, dtype=dtype, name="layer")
    torch.manual_seed(rank)  # the trainer must broadcast the dense weights of rank 0
    head = torch.nn.Linear(8, 1, dtype=dtype)
    if rank == 0:
        torch.nn.init.eye_(head.weight)
        torch.nn.init.zeros_(head.bias)
    model = torch.nn.Sequential(layer, torch.nn.Flatten(), head)
    sparse, dense = sparsekit.split_embedding_variable_from_others(model)
    if optimizer == "SGD":
        optimizers = [torch.optim.SGD([*sparse, *dense], lr=0.1)]
    else:
        optimizers = [sparsekit.optim.LazyAdam(sparse, lr=0.01), torch.optim.SGD(dense, lr=0.1)]

    def loss_fn(model, batch):
        out = model(batch[0])[:, 0]
        penalties = {
            "none": 0.0,
            "of samples": 0.3 * out.square(),
            "of weights": 0.3 * head.weight.square().sum(),
        }
        return (out - batch[1]).square(), penalties[penalty]

    trainer = Trainer(model, loss_fn, optimizers, seed=3, stream=io.StringIO())
    history = trainer.fit(make_data(dtype), epochs=EPOCHS, global_batch_size=BATCH)
    return *shards(layer), head.weight.detach(), [epoch.loss for epoch in history]


def assert_same(many, one, tolerance):
    """Compare results of several ranks with one rank's: keys, rows, dense weight and losses."""
    keys, rows, dense, losses = zip(*many, strict=True)
    assert all(torch.equal(weight, dense[0]) for weight in dense)
    assert all(loss == losses[0] for loss in losses)
    order, expected = torch.cat(keys).argsort(), one[0].argsort()
    assert torch.equal(torch.cat(keys)[order], one[0][expected])
    close = {"rtol": 0, "atol": tolerance}
    torch.testing.assert_close(torch.cat(rows)[order], one[1][expected], **close)
    torch.testing.assert_close(dense[0], one[2], **close)
    assert losses[0] == pytest.approx(one[3], rel=0, abs=10 * tolerance)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("penalty", ["none", "of samples", "of weights"])
@pytest.mark.parametrize("optimizer", ["SGD", "LazyAdam"])
def test_equals_one_rank(ranks, optimizer, penalty, dtype):
    one = train(0, dtype, optimizer, penalty)
    assert_same(ranks(train, dtype, optimizer, penalty), one, TOLERANCE[dtype])


def train_ratings(rank):
    generator = torch.Generator().manual_seed(1)
    users, items = (torch.randint(0, n, (136,), generator=generator) for n in (12, 9))
    ratings, times = torch.rand(136, generator=generator) * 4 + 1, torch.arange(136.0).double()
    model = RatingModel(Ratings(users, items, ratings, times), dim=4, capacity=40, history_size=5)
    trainer = Trainer(
        model,
        lambda _, batch: model.losses(*batch),
        [torch.optim.SGD(model.parameters(), lr=0.1)],
        stream=io.StringIO(),
    )
    history = trainer.fit(
        (users, items, ratings), epochs=5, global_batch_size=45
    )  # the last batch has one sample
    keys, rows = [], []
    for number, layer in enumerate(model.embeddings.layers.values()):
        key, row = shards(layer)
        keys.append(key + 1000 * number)
        rows.append(torch.nn.functional.pad(row, (0, 5 - row.shape[1])))
    dense = torch.cat([model.project.weight.detach().reshape(-1), model.mean.detach().view(1)])
    return torch.cat(keys), torch.cat(rows), dense, [epoch.loss for epoch in history]


def saved_and_loaded(rank, path):
    """Return a model's predictions, after checking that a copy loaded from a file agrees."""
    generator = torch.Generator().manual_seed(1)
    users, items = (torch.randint(0, n, (136,), generator=generator) for n in (12, 9))
    ratings = torch.rand(136, generator=generator) * 4 + 1
    train = Ratings(users, items, ratings, torch.arange(136.0).double())
    if path.exists():
        return RatingModel.load(path)(users, items).detach()
    model = RatingModel(train, dim=4, capacity=8, history_size=5, seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.losses(users, items, train.ratings)[0].sum().backward()
        optimizer.step()
    model.save(path)
    dist.barrier()
    predicted = model(users, items).detach()
    assert torch.equal(RatingModel.load(path)(users, items), predicted)
    return predicted


def test_a_model_is_saved_by_ranks_for_any_number_of_them(ranks, tmp_path):
    path = tmp_path / "model.pt"
    expected = ranks(saved_and_loaded, path)[0]
    for predicted in (saved_and_loaded(0, path), *ranks(saved_and_loaded, path)):
        torch.testing.assert_close(predicted, expected, atol=1e-6, rtol=0)


def test_the_model_of_ratings(ranks):
    assert_same(ranks(train_ratings), train_ratings(0), 1e-6)


def see_batches(rank):
    seen = []
    weight = torch.nn.Linear(1, 1)

    def loss_fn(model, batch):
        seen.append(batch[0].tolist())
        return model(batch[0][:, None])[:, 0], 0.0

    sgd = torch.optim.SGD(weight.parameters(), lr=0)
    stream = io.StringIO()
    trainer = Trainer(weight, loss_fn, [sgd], seed=5, stream=stream)
    trainer.fit((torch.arange(float(SAMPLES)),), epochs=2, global_batch_size=BATCH)
    return seen, stream.getvalue()


def test_batches_are_split_without_gaps_or_overlaps(ranks):
    (whole, _), results = see_batches(0), ranks(see_batches)
    assert [len(batch) for batch in whole] == [7, 7, 7, 1] * 2
    for step, batch in enumerate(whole):
        shares = [seen[step] for seen, _ in results]
        assert [sample for share in shares for sample in share] == batch
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


def batch_sizes(rank, world_size, **size):
    """Return the sizes of this rank's batches."""
    layer = torch.nn.Linear(1, 1)
    seen = []

    def loss_fn(model, batch):
        seen.append(len(batch[0]))
        return model(batch[0][:, None])[:, 0], 0.0

    sgd = torch.optim.SGD(layer.parameters(), lr=0)
    trainer = Trainer(layer, loss_fn, [sgd], stream=io.StringIO())
    trainer.fit((torch.arange(12.0 * world_size),), epochs=1, **size)
    return seen


def per_rank(rank, world_size, path):
    of_tensors = batch_sizes(rank, world_size, batch_size=5)
    of_all = batch_sizes(rank, world_size, global_batch_size=5 * world_size)
    reader = CsvReader(path, 5, label="y")
    return of_tensors, of_all, [batch.rows for batch in reader]


def test_a_batch_size_is_that_of_each_rank(ranks, tmp_path):
    """batch_size is per rank for tensors, readers and loaders; global_batch_size is for all."""
    path = tmp_path / "y.csv"
    path.write_text("y\n" + "1\n" * 12 * ranks.world_size)
    for found in ranks(per_rank, ranks.world_size, path):
        assert found == ([5, 5, 2],) * 3


class Stopped(Exception):
    pass


def resumed(rank, folder):
    """Return the losses of an uninterrupted run, and of a run resumed in mid-epoch."""

    def fit(name, last):
        steps = 0

        def loss_fn(model, batch):
            nonlocal steps
            steps += 1
            if steps > last:
                raise Stopped
            return (model(batch[0][:, None])[:, 0] - batch[0]).square(), 0.0

        torch.manual_seed(1)
        model = torch.nn.Linear(1, 1)
        trainer = Trainer(
            model, loss_fn, [torch.optim.SGD(model.parameters(), lr=1e-3)], seed=2,
            checkpoints=Checkpoints(folder / name), checkpoint_every=3, stream=io.StringIO(),
            logs=[JsonLines(folder / f"{name}.jsonl")], log_every=2,
        )  # fmt: skip
        try:
            trainer.fit((torch.arange(float(SAMPLES)),), epochs=2, global_batch_size=5, resume=True)
        except Stopped:
            pass
        finally:
            trainer.checkpoints.close()
        return [epoch.loss for epoch in trainer.history]

    whole = fit("a", 99)
    assert fit("b", 4) == []  # steps 1 to 5 belong to the first epoch
    return whole, fit("b", 99)


def test_losses_of_an_epoch_that_goes_on_in_its_middle(ranks, tmp_path):
    """After a resume in mid-epoch, each rank's losses are counted once."""
    for whole, parts in ranks(resumed, tmp_path):
        assert len(whole) == 2
        assert parts == pytest.approx(whole, rel=1e-12)
    one, other = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("a.jsonl", "b.jsonl")
    )
    assert [r["step"] for r in one] == [r["step"] for r in other] == [2, 4, 5, 6, 8, 10, 10]
    assert [r["loss"] for r in other] == pytest.approx([r["loss"] for r in one], rel=1e-12)


def test_only_the_first_rank_prints(ranks):
    printed = [text for _, text in ranks(see_batches)]
    assert printed[0].startswith("epoch 1/2  loss ")
    assert set(printed[1:]) == {""}


def leave_out_without_samples(rank):
    model = torch.nn.Linear(1, 1)

    def loss_fn(model, batch):
        return (model(batch[0][:, None])[:, 0] if len(batch[0]) else torch.zeros(0)), 0.0

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, loss_fn, [sgd], stream=io.StringIO())
    trainer.fit((torch.arange(4.0),), epochs=3, global_batch_size=3)
    return model.weight.item()


def test_a_model_that_does_nothing_without_samples(ranks):
    assert len(set(ranks(leave_out_without_samples))) == 1


def diverge(rank, bad_rank):
    """Train with a loss that becomes infinite on one rank in the second step."""
    model, steps = torch.nn.Linear(1, 1), []

    def loss_fn(model, batch):
        steps.append(len(batch[0]))
        bad = math.inf if rank == bad_rank and len(steps) == 2 else 0.0
        return model(batch[0][:, None])[:, 0].square() + bad, 0.0

    sgd = torch.optim.SGD(model.parameters(), lr=0)
    trainer = Trainer(model, loss_fn, [sgd], stream=io.StringIO())
    trainer.fit((torch.arange(float(SAMPLES)),), epochs=1, global_batch_size=BATCH)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_all_ranks_name_the_step_in_which_one_diverged(ranks, bad_rank):
    for outcome in ranks.outcomes(diverge, bad_rank):
        assert isinstance(outcome, Raised)
        assert outcome.type == "DivergedError", outcome.trace
        assert "from step 2 of 4 on" in outcome.message


class FullDisk:
    def write(self, record):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")


def log_to(rank, make_log):
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(model, lambda m, b: (m(b[0]).sum(1), 0.0), [], logs=[make_log()])
    trainer.fit((torch.ones(4, 1),), epochs=1, batch_size=1)


def test_all_ranks_raise_what_a_log_of_the_first_raises(two_ranks):
    for outcome in two_ranks.outcomes(log_to, FullDisk):
        assert isinstance(outcome, Raised)
        assert "No space left on device" in outcome.message, outcome.trace


def fit_differently(rank, batch_size):
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(model, lambda *_: None, [])
    trainer.fit((torch.arange(4.0),), epochs=1, global_batch_size=batch_size[rank])


@pytest.mark.parametrize(
    ("batch_size", "kind", "message"),
    [
        ((2, 3), "RuntimeError", "rank 1: train on"),
        ((2, 0), "ValueError", "global_batch_size must be in"),
    ],
)
def test_ranks_that_would_train_differently(two_ranks, batch_size, kind, message):
    for outcome in two_ranks.outcomes(fit_differently, batch_size):
        assert isinstance(outcome, Raised)
        assert outcome.type == kind, outcome.trace
        assert message in outcome.message


def make_with_batch_norm(rank):
    Trainer(torch.nn.Sequential(torch.nn.BatchNorm1d(2)), lambda *_: None, [])


def test_batch_norm_is_refused(two_ranks):
    for outcome in two_ranks.outcomes(make_with_batch_norm):
        assert isinstance(outcome, Raised)
        assert outcome.message.startswith("0 is BatchNorm1d")
    make_with_batch_norm(0)


def own_buffer(rank):
    model = torch.nn.Linear(1, 1)
    model.register_buffer("seen", torch.zeros(()))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, lambda m, b: (m(b[0])[:, 0], 0.0), [sgd], stream=io.StringIO())
    model.seen.fill_(rank)
    trainer.fit((torch.ones(8, 1),), epochs=1, batch_size=2)
    return model.seen.item()


def test_each_rank_has_buffers_of_its_own(two_ranks):
    assert two_ranks(own_buffer) == [0, 1]
