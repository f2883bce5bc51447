"""The trainer reports its progress, trains in the right order, and ends training properly."""

import io
import itertools

import pytest
import torch

import sparsekit
from sparsekit.train import DivergedError, Progress, Trainer, spinning, step


class Recorder(torch.nn.Module):
    """Model that predicts one number and remembers the samples that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[float]] = []
        self.modes: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.tolist())
        self.modes.append(self.training)
        return self.weight.expand(len(x))


def squared(model, batch):
    (x,) = batch
    return (model(x) - x).square(), 0.0


def make(loss_fn=squared, lr=0.0, seed=0, **keywords):
    model = Recorder()
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    stream = keywords.pop("stream", io.StringIO())
    return Trainer(model, loss_fn, [sgd], seed=seed, stream=stream, **keywords)


def test_each_sample_is_used_once_an_epoch_in_another_order():
    trainer = make()
    trainer.fit((torch.arange(10.0),), epochs=3, batch_size=4)
    assert [len(batch) for batch in trainer.model.seen] == [4, 4, 2] * 3
    seen = [sample for batch in trainer.model.seen for sample in batch]
    epochs = [seen[:10], seen[10:20], seen[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_columns_stay_together():
    def loss_fn(model, batch):
        x, y = batch
        assert torch.equal(y, x * 10)
        return model(x), 0.0

    x = torch.arange(7)
    make(loss_fn).fit((x, x * 10), epochs=1, batch_size=3)


def test_loss_is_the_mean_over_samples_and_leaves_the_penalty_out():
    def loss_fn(model, batch):
        losses, _ = squared(model, batch)
        return losses, 1000 + model.weight

    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0])
    # Batches have 2, 2 and 1 samples, so the mean of their means would differ.
    (epoch,) = make(loss_fn).fit((x,), epochs=1, batch_size=2)
    assert epoch.loss == pytest.approx(10_014 / 5, rel=1e-12)


# One penalty for the batch, or one for each sample.
@pytest.mark.parametrize("penalties", [5.0, torch.tensor([3.0, 7.0])])
def test_gradient_is_of_mean_plus_penalty(penalties):
    trainer = make(lambda model, batch: (model.weight * batch[0], penalties * model.weight), lr=1.0)
    trainer.fit((torch.tensor([1.0, 3.0]),), epochs=1, batch_size=2)
    assert trainer.model.weight.item() == -(2 + 5)


def test_seed_decides_and_nothing_else():
    def order(seed, global_seed):
        torch.manual_seed(global_seed)
        trainer = make(seed=seed)
        trainer.fit((torch.arange(50.0),), epochs=2, batch_size=7)
        return trainer.model.seen

    assert order(1, 0) == order(1, 99)
    assert order(1, 0) != order(2, 0)


def test_the_default_device_plays_no_part():
    trainer, other = make(), make()
    trainer.fit((torch.arange(10.0),), epochs=1, batch_size=3)
    with torch.device("meta"):  # stands in for cuda: a CPU generator cannot make tensors on meta
        again = Trainer(other.model, squared, other.optimizers, stream=io.StringIO())
        again.fit((torch.arange(10.0, device="cpu"),), epochs=1, batch_size=3)
    assert again.model.seen == trainer.model.seen
    assert again.history[0].loss == trainer.history[0].loss


def test_sparse_and_dense_parameters_train_to_the_same_bits():
    users = torch.randint(-(2**62), 2**62, (64,), generator=torch.Generator().manual_seed(0))
    target = torch.linspace(-1, 1, 64)

    def train():
        layer = sparsekit.DistributedEmbedding("sum", 100, 4, 1, 1, seed=3)
        dense = torch.nn.Linear(4, 1)
        torch.nn.init.ones_(dense.weight)
        torch.nn.init.zeros_(dense.bias)
        model = torch.nn.Sequential(layer, torch.nn.Flatten(), dense)
        sparse, others = sparsekit.split_embedding_variable_from_others(model)
        optimizers = [sparsekit.optim.LazyAdam(sparse, lr=0.05), torch.optim.Adam(others, lr=0.01)]

        def loss_fn(model, batch):
            return (model(batch[0][:, None, None])[:, 0] - batch[1]).square(), 0.0

        trainer = Trainer(model, loss_fn, optimizers, stream=io.StringIO())
        losses = [e.loss for e in trainer.fit((users, target), epochs=20, batch_size=10)]
        return losses, [p.detach().clone() for p in model.parameters()]

    losses, parameters = train()
    assert losses[-1] < 0.1 * losses[0]
    again, same = train()
    assert again == losses
    assert all(map(torch.equal, parameters, same))


def test_scheduler_is_stepped_after_each_batch():
    model = Recorder()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.0, total_iters=6)
    trainer = Trainer(model, squared, [sgd], schedulers=[scheduler], stream=io.StringIO())
    trainer.fit((torch.arange(5.0),), epochs=1, batch_size=2)
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.5)
    trainer.fit((torch.arange(5.0),), epochs=1, batch_size=2)
    assert sgd.param_groups[0]["lr"] == pytest.approx(0)


def test_evaluation_is_in_evaluation_mode_and_kept():
    def evaluate(model):
        assert not torch.is_grad_enabled()
        model(torch.tensor([-1.0]))
        return {"score": float(len(model.seen))}

    trainer = make()
    history = trainer.fit((torch.arange(4.0),), epochs=2, batch_size=2, evaluate=evaluate)
    assert [epoch.metrics for epoch in history] == [{"score": 3}, {"score": 6}]
    assert trainer.model.modes == [True, True, False] * 2
    assert trainer.model.training


def test_history_goes_on_in_a_second_fit():
    trainer = make()
    trainer.fit((torch.arange(4.0),), epochs=2, batch_size=2)
    history = trainer.fit((torch.arange(4.0),), epochs=1, batch_size=2)
    assert [epoch.number for epoch in history] == [1, 2, 3]


def test_ctrl_c_returns_the_finished_epochs():
    def loss_fn(model, batch):
        if len(model.seen) == 5:  # the second batch of the third epoch
            raise KeyboardInterrupt
        return squared(model, batch)

    trainer = make(loss_fn)
    history = trainer.fit((torch.arange(4.0),), epochs=9, batch_size=2)
    assert [epoch.number for epoch in history] == [1, 2]
    assert trainer.interrupted
    last = trainer.stream.getvalue().splitlines()[-1]
    assert last == "interrupted: 2 of 9 epochs are finished"
    trainer.loss_fn = squared
    trainer.fit((torch.arange(4.0),), epochs=1, batch_size=2)
    assert not trainer.interrupted


@pytest.mark.parametrize(
    ("data", "keywords", "message"),
    [
        ((), {}, r"data must be tensors of one length >= 1, got \[\]"),
        ((torch.arange(3), torch.arange(4)), {}, r"got \[3, 4\]"),
        ((torch.arange(0),), {}, r"got \[0\]"),
        ((torch.arange(3.0),), {"batch_size": 0}, r"batch_size must be in \[1, .*, got 0"),
        ((torch.arange(3.0),), {"epochs": -1}, r"epochs must be in \[0, .*, got -1"),
        ((torch.arange(3.0),), {"global_batch_size": 2}, "got batch_size=2, global_batch_size=2"),
        ((torch.arange(3.0),), {"batch_size": None}, "need batch_size, of each rank, or global_b"),
    ],
)
def test_wrong_arguments(data, keywords, message):
    with pytest.raises(ValueError, match=message):
        make().fit(data, **{"epochs": 1, "batch_size": 2, **keywords})


def test_a_loss_that_is_a_mean_already_is_refused():
    trainer = make(lambda model, batch: (squared(model, batch)[0].mean(), 0.0))
    with pytest.raises(ValueError, match=r"one loss for each of the 3 samples, got shape \(\)"):
        trainer.fit((torch.arange(3.0),), epochs=1, batch_size=3)


def test_a_penalty_of_another_number_of_samples_is_refused():
    trainer = make(lambda model, batch: (squared(model, batch)[0], torch.zeros(2)))
    with pytest.raises(ValueError, match=r"one for each of the 3 samples, got shape \(2,\)"):
        trainer.fit((torch.arange(3.0),), epochs=1, batch_size=3)


def test_layers_that_normalise_over_a_batch_are_refused_on_ranks():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.BatchNorm1d(2)))
    with pytest.raises(ValueError, match=r"^1\.0 is BatchNorm1d, .* by each rank's part"):
        step._refuse_batch_norm(model)
    step._refuse_batch_norm(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))
    make()  # one rank accepts the layer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_output_is_one_line_an_epoch():
    trainer = make()
    data = (torch.arange(4.0),)
    trainer.fit(data, epochs=2, batch_size=2, evaluate=lambda model: {"RMSE": 0.5})
    first, second = trainer.stream.getvalue().splitlines()
    assert first.startswith("epoch 1/2  loss 3.5000  RMSE 0.5000  ")
    assert second.startswith("epoch 2/2  loss 3.5000")
    assert second.endswith(" samples/s")


@pytest.mark.parametrize("case", ["shared", "idle", "short", "one thread", "passive"])
def test_a_hint_where_threads_spin_on_shared_cores(monkeypatch, case):
    """The hint is printed once, and only if the system counts many context switches."""
    seconds, switches = (3.0 if case == "short" else 8.0), (70 if case == "idle" else 200)
    readings = itertools.count()
    monkeypatch.setattr(spinning, "_now", lambda: ((n := next(readings)) * seconds, n * switches))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if case == "one thread" else 2)
    for name in spinning.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    if case == "passive":
        monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    stream = io.StringIO()
    make(stream=stream).fit((torch.arange(4.0),), epochs=2, batch_size=2)
    lines = [line.partition(" ")[0] for line in stream.getvalue().splitlines()]
    assert lines == (["epoch", "hint:", "epoch"] if case == "shared" else ["epoch", "epoch"])
    assert ("OMP_WAIT_POLICY=passive" in stream.getvalue()) == (case == "shared")


def test_the_system_counts_switches():
    (begin, before), (end, after) = spinning._now(), spinning._now()
    assert end > begin
    assert after >= before >= 0


def test_terminal_output_rewrites_its_line(monkeypatch):
    monkeypatch.setattr("sparsekit.train.progress.REFRESH_S", 0)
    stream = Terminal()
    make(stream=stream).fit((torch.full((4,), 2.0),), epochs=1, batch_size=1)
    lines = stream.getvalue().split("\r\033[K")
    assert lines[1].startswith("epoch 1/1 [#####...............] loss 4.0000  ")
    assert lines[4].startswith("epoch 1/1 [####################] loss 4.0000  ")
    assert lines[5].startswith("epoch 1/1  loss 4.0000")
    assert stream.getvalue().count("\n") == 1


def test_an_error_removes_the_bar(monkeypatch):
    monkeypatch.setattr("sparsekit.train.progress.REFRESH_S", 0)
    stream = Terminal()

    def fail():
        with Progress("epoch", 2, stream) as progress:
            progress.update(1, lambda: 0.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert stream.getvalue().endswith("\r\033[K")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_divergence_names_the_step(bad):
    """The trainer sees the divergence at the end of the epoch, after later steps may have run."""

    def loss_fn(model, batch):
        losses = model(batch[0]) * 0 + 1
        return losses * bad if len(model.seen) == 5 else losses, 0.0

    trainer = make(loss_fn)
    with pytest.raises(DivergedError, match=r"^epoch 2/3: .* NaN from step 2 of 3 on: training"):
        trainer.fit((torch.arange(10.0),), epochs=3, batch_size=4)
    assert len(trainer.model.seen) == 6
    assert [epoch.number for epoch in trainer.history] == [1]
