"""The trainer reads data loaders; it accumulates, clips, prefetches and stops early as set."""

import io
import json
import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import sparsekit
from sparsekit.data import CsvReader, Prefetcher
from sparsekit.errors import DataFormatError, DivergedError
from sparsekit.train import EarlyStopping, JsonLines, Trainer, fit_data
from sparsekit.train.feed import Share


class Linear(torch.nn.Module):
    def __init__(self, width=3):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(width, generator=generator))

    def forward(self, x):
        return x @ self.weight


def squares(model, batch):
    x, y = batch
    return (model(x) - y).square(), 0.0


def some_data(n=20):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, generator=generator), torch.randn(n, generator=generator)


def trained(data, lr=0.1, **settings):
    of_fit = ("batch_size", "global_batch_size", "evaluate", "stop")
    fit = {key: settings.pop(key) for key in of_fit if key in settings}
    epochs = settings.pop("epochs", 2)
    model = Linear()
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    trainer = Trainer(model, squares, [sgd], stream=io.StringIO(), **settings)
    trainer.fit(data, epochs=epochs, **fit)
    return trainer


def by_hand(groups, lr=0.1, clip=None):
    """Train by SGD on the mean over the samples of each group of batches."""
    weight = Linear().weight.detach().double()
    for group in groups:
        x, y = (torch.cat(each).double() for each in zip(*group, strict=True))
        gradient = 2 * ((x @ weight - y)[:, None] * x).mean(0)
        if clip is not None and (norm := gradient.norm()) > clip:
            gradient *= clip / norm
        weight = weight - lr * gradient
    return weight.float()


def batches_of(sizes):
    x, y = some_data(sum(sizes))
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def test_batches_of_a_loader_are_weighed_by_their_samples():
    batches = batches_of([8, 8, 3])
    trainer = trained(batches)
    torch.testing.assert_close(trainer.model.weight.detach(), by_hand([[b] for b in batches * 2]))
    assert trainer.steps == 6
    losses = [squares(Linear(), batch)[0] for batch in batches]
    still = trained(batches, lr=0.0, epochs=1)
    assert still.history[0].loss == pytest.approx(torch.cat(losses).mean().item())


def test_a_dataloader_trains_as_its_batches_do():
    x, y = some_data()
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    expected = by_hand([[b] for b in zip(x.split(6), y.split(6), strict=True)] * 2)
    torch.testing.assert_close(trained(loader).model.weight.detach(), expected)


def test_an_epoch_of_a_sampler_has_its_number():
    epochs = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch):
            epochs.append(epoch)

    data = TensorDataset(*some_data())
    trained(DataLoader(data, batch_size=6, sampler=Sampler(data)), epochs=3)
    assert epochs == [0, 1, 2]


def test_an_epoch_of_a_dataset_has_its_number():
    class Shuffled(torch.utils.data.IterableDataset):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            x, y = some_data()
            seen.append(self.epoch)
            yield from zip(x, y, strict=True)

    seen = []
    trained(DataLoader(Shuffled(), batch_size=6), epochs=3)
    assert seen == [0, 1, 2]


def test_a_reader_goes_on_to_its_next_epoch(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("y,a\n" + "".join(f"{row},{row}\n" for row in range(10)))
    seen = []

    def losses(model, batch):
        seen.append(batch.label.tolist())
        return model(batch.dense), 0.0

    model = Linear(1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    reader = CsvReader(path, 4, label="y", dense=["a"], shuffle=True)
    history = Trainer(model, losses, [sgd], stream=io.StringIO()).fit(reader, epochs=2)
    first, second = ([row for batch in part for row in batch] for part in (seen[:3], seen[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert len(history) == 2


@pytest.mark.parametrize("data", [[], [(torch.ones(0, 3), torch.ones(0))], DataLoader([])])
def test_an_epoch_without_samples_is_named(data):
    with pytest.raises(DataFormatError, match=r"^epoch 1/2: the data have no sample"):
        trained(data)


def test_a_generator_is_used_up_after_an_epoch():
    stop = EarlyStopping("loss")
    with pytest.raises(
        DataFormatError, match=r"^epoch 2/3: .* a generator that an epoch before has"
    ):
        trained((b for b in batches_of([4])), epochs=3, evaluate=lambda _: {"loss": 1}, stop=stop)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda x: x.sum(), r"got one tensor of shape \(\)"),
        (lambda x: x, r"got one tensor of shape \(2,\)"),
        (lambda x: torch.stack([x, x]), r"got one tensor of shape \(2, 2\)"),
        (lambda x: None, "got NoneType"),
        (lambda x: (), "got tuple of nothing"),
        (lambda x: [x], "got list of Tensor"),
        (lambda x: (x,), "got tuple of Tensor"),
        (lambda x: (x, 0.0, 0.0), "got tuple of Tensor, float, float"),
        (lambda x: (1.0, 0.0), "got tuple of float, float"),
    ],
)
def test_what_a_loss_function_must_return(returned, got):
    trainer = Trainer(Linear(), lambda model, x: returned(model(x)), [], stream=io.StringIO())
    with pytest.raises(TypeError, match=rf"must return \(losses, penalty\): .* 2 samples.*; {got}"):
        trainer.fit([torch.ones(2, 3)], epochs=1)


def test_an_error_of_a_loader_is_raised_and_its_thread_ends():
    def batches():
        yield from batches_of([4])
        raise OSError("no more")

    threads = threading.active_count()
    with pytest.raises(OSError, match="no more"):
        trained(batches())
    assert threading.active_count() == threads


def test_an_error_of_a_step_ends_the_thread_of_the_loader():
    def fail(model, batch):
        raise ZeroDivisionError

    model = Linear()
    trainer = Trainer(model, fail, [], stream=io.StringIO())
    threads = threading.active_count()
    # Keeps alive all objects that the failed call refers to.
    with pytest.raises(ZeroDivisionError) as kept:
        trainer.fit(iter(batches_of([4, 4, 4, 4, 4])), epochs=1)
    assert threading.active_count() == threads, kept


@pytest.mark.parametrize("batch", [None, 3, (), torch.zeros(()), "text"])
def test_what_is_no_batch(batch):
    with pytest.raises(TypeError, match="Trainer: a batch must be"):
        trained([batch])


def test_batch_size_belongs_to_tensors():
    with pytest.raises(ValueError, match="batch_size=4 is for tensors; list has its own"):
        trained(batches_of([4]), batch_size=4)
    with pytest.raises(ValueError, match="global_batch_size=4 is for tensors; list has its own"):
        trained(batches_of([4]), global_batch_size=4)
    with pytest.raises(ValueError, match="tensors need batch_size"):
        trained(some_data())


@pytest.mark.parametrize("sizes", [[6, 6, 6, 6], [6, 6, 5]])
def test_accumulated_gradients_are_those_of_all_their_samples(sizes):
    """Accumulated gradients weight all samples equally, whatever the sizes of the batches."""
    batches = batches_of(sizes)
    trainer = trained(batches, accumulate=2, epochs=1)
    groups = [batches[:2], batches[2:]]
    torch.testing.assert_close(trainer.model.weight.detach(), by_hand(groups))
    assert trainer.steps == 2


def test_a_penalty_of_the_weights_counts_once_in_an_accumulated_step():
    def losses(model, batch):
        return model(batch[0]) * 0, model.weight.sum()

    model = Linear()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = Trainer(model, losses, [sgd], stream=io.StringIO(), accumulate=4)
    trainer.fit(batches_of([2, 2, 2, 2]), epochs=1)
    assert model.weight.grad.tolist() == [1.0, 1.0, 1.0]


def test_accumulated_gradients_of_tables():
    """Sparse gradients of batches with some common keys are accumulated."""
    keys, y = torch.tensor([1, 2, 1, 3, 1, 2]), torch.arange(6.0)

    def weights(accumulate, batch_size):
        layer = sparsekit.DistributedEmbedding("sum", 10, 2, 1, 1, seed=0)
        sgd = torch.optim.SGD(layer.parameters(), lr=0.1)

        def losses(model, batch):
            return (model(batch[0].view(-1, 1, 1)).sum((1, 2)) - batch[1]).square(), 0.0

        trainer = Trainer(layer, losses, [sgd], stream=io.StringIO(), accumulate=accumulate)
        batches = list(zip(keys.split(batch_size), y.split(batch_size), strict=True))
        trainer.fit(batches, epochs=2)
        return layer.vectors(torch.tensor([1, 2, 3]))

    torch.testing.assert_close(weights(3, 2), weights(1, 6))


def test_clipping_scales_the_gradient_to_the_norm():
    batches = batches_of([6, 6, 6])
    trainer = trained(batches, clip_norm=0.5, epochs=1)
    expected = by_hand([[b] for b in batches], clip=0.5)
    torch.testing.assert_close(trainer.model.weight.detach(), expected)
    assert not torch.allclose(expected, by_hand([[b] for b in batches]))


def test_autocast_computes_in_bfloat16_and_means_are_exact():
    seen = []

    def losses(model, batch):
        product = model(batch[0])
        seen.append(product.dtype)
        return product - batch[1].bfloat16(), 0.0

    model = Linear()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"stream": io.StringIO(), "autocast": torch.bfloat16}
    history = Trainer(model, losses, [sgd], **settings).fit(batches_of([300]), epochs=1)
    assert seen == [torch.bfloat16]
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32
    (x, y) = batches_of([300])[0]
    exact = (x.bfloat16() @ Linear().weight.detach().bfloat16()) - y.bfloat16()
    assert history[0].loss == pytest.approx(exact.double().mean().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate": 0}, "accumulate"),
        ({"clip_norm": 0.0}, "clip_norm must be > 0, got 0"),
        ({"clip_norm": float("nan")}, "clip_norm must be > 0, got nan"),
        ({"log_every": 0}, "log_every"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        Trainer(Linear(), squares, [], **settings)


@pytest.mark.parametrize(
    ("values", "larger", "patience", "delta", "epochs"),
    [
        ([3, 2, 1, 1, 0], False, 1, 0.0, 4),
        ([3, 2, 1, 1, 0], False, 2, 0.0, 5),
        ([1, 2, 3, 2.5, 2.9], True, 2, 0.0, 5),
        ([1, 2, 2.05, 2.06, 9], True, 2, 0.1, 4),
        ([1, float("nan"), 0.5], False, 1, 0.0, 2),
    ],
)
def test_early_stopping(values, larger, patience, delta, epochs):
    remaining = iter(values)
    trainer = trained(
        some_data(),
        batch_size=20,
        epochs=len(values),
        evaluate=lambda model: {"x": next(remaining)},
        stop=EarlyStopping("x", patience, larger, delta),
    )
    assert len(trainer.history) == epochs


def test_early_stopping_without_its_metric():
    stop = EarlyStopping("AUC")
    with pytest.raises(ValueError, match=r"no metric 'AUC'; evaluate returns \['loss'\]"):
        trained(some_data(), batch_size=20, evaluate=lambda model: {"loss": 1.0}, stop=stop)
    for wrong in ({"patience": 0}, {"min_delta": -0.1}, {"min_delta": float("nan")}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"{name}={value}"):
            EarlyStopping("AUC", **wrong)


def test_a_next_batch_is_not_prefetched_on_one_rank():
    model = Linear()
    model.prefetch = lambda batch: pytest.fail("nothing is exchanged")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(model, squares, [sgd], stream=io.StringIO()).fit(batches_of([4, 4]), epochs=1)


@pytest.mark.parametrize(
    ("make", "threads"), [(list, 0), (iter, 1), (Prefetcher, 1), (lambda data: DataLoader(data), 1)]
)
def test_batches_are_read_ahead_by_one_thread(make, threads):
    """One thread reads a loader ahead; a list is already in memory and needs no thread."""
    seen = []

    def losses(model, batch):
        seen.append([t.name for t in threading.enumerate()].count("sparsekit-prefetch"))
        return model(batch).sum(1).flatten(), 0.0

    trainer = Trainer(torch.nn.Linear(3, 1), losses, [], stream=io.StringIO())
    trainer.fit(make([torch.ones(1, 3)] * 5), epochs=1)
    assert seen[0] == threads


def test_batches_of_tensors_are_tuples():
    seen = []

    def losses(model, batch):
        seen.append(type(batch))
        return squares(model, batch)

    Trainer(Linear(), losses, [], stream=io.StringIO()).fit(some_data(), epochs=1, batch_size=20)
    assert seen == [tuple]


def test_a_trainer_without_checkpoints_computes_no_checksum(monkeypatch):
    monkeypatch.setattr(fit_data, "checksum", lambda _: pytest.fail("nobody would read it"))
    trainer = trained(some_data(), batch_size=20, clip_norm=0.5, autocast=torch.bfloat16)
    assert (trainer.interrupted, trainer.clip_norm, trainer.autocast) == (
        False,
        0.5,
        torch.bfloat16,
    )


def test_a_call_that_does_not_resume_trains_although_the_metric_had_stopped():
    stop, model = EarlyStopping("x"), Linear()
    trainer = Trainer(model, squares, [], stream=io.StringIO())
    for _ in range(2):
        trainer.fit(some_data(), epochs=5, batch_size=20, evaluate=lambda _: {"x": 1.0}, stop=stop)
    assert len(trainer.history) == 3


def test_what_a_trainer_does_unless_told_otherwise():
    records, data = [], some_data(102)
    log = type("Log", (), {"write": lambda _, record: records.append(record)})()
    made = trained(data, batch_size=1, epochs=1, logs=[log])
    assert [(each["kind"], each["step"]) for each in records] == [("step", 100), ("epoch", 102)]
    same = trained(data, batch_size=1, epochs=1, seed=0, accumulate=1, log_every=100)
    assert torch.equal(made.model.weight, same.model.weight)
    assert made.checkpoints is made.checkpoint_every is made.clip_norm is made.autocast is None


def test_early_stopping_waits_for_one_epoch_of_a_loss_unless_told_otherwise():
    assert EarlyStopping("x") == EarlyStopping("x", 1, False, 0.0)


def test_a_step_that_diverged_is_named_whatever_is_clipped():
    x, y = some_data(4)
    with pytest.raises(DivergedError, match="from step 1 of 2 on"):
        trained((x * float("nan"), y), batch_size=2, clip_norm=0.5)


def test_losses_may_come_in_a_list_and_keep_no_graph():
    model = Linear()
    trainer = Trainer(model, lambda m, b: list(squares(m, b)), [], stream=io.StringIO())
    total = trainer._step.update(trainer.loss_fn, [Share(some_data(4), 4, 4)], None)
    assert (total.dtype, total.requires_grad) == (torch.float64, False)


def test_a_new_run_overwrites_a_log_without_a_word(tmp_path):
    path, stream = tmp_path / "metrics.jsonl", io.StringIO()
    path.write_text("of another program\n")
    Trainer(Linear(), squares, [], stream=stream, logs=[JsonLines(path)]).fit(
        batches_of([4]), epochs=1
    )
    assert "no record" not in stream.getvalue()
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["epoch"]
