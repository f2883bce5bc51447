"""An interrupted and resumed run gives the results of an uninterrupted run."""

import contextlib
import functools
import io
import json
import tempfile

import pytest
import torch

import sparsekit
from sparsekit.checkpoint import Checkpoints
from sparsekit.data import CsvReader, Keys, Prefetcher
from sparsekit.errors import CheckpointError
from sparsekit.optim import Adam, Ftrl, LazyAdam
from sparsekit.train import DivergedError, JsonLines, ResumeError, Trainer, progress, resume
from sparsekit.train.fit_data import FitData
from sparsekit.train.stopping import EarlyStopping

SAMPLES, BATCH, EPOCHS = 150, 8, 3  # 19 steps per epoch
OPTIMIZERS = {
    "LazyAdam": lambda p: LazyAdam(p, lr=0.05),
    "Adam": lambda p: Adam(p, lr=0.05, mode="catch_up"),
    "Ftrl": lambda p: Ftrl(p, lr=0.1),
}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.items = sparsekit.EmbeddingBag(400, 4, name="items", mode="sum")
        self.out = torch.nn.Linear(4, 1)

    def forward(self, keys):
        return self.out(torch.nn.functional.dropout(self.items(keys), 0.2, self.training))[:, 0]


class Stopped(Exception):
    pass


def losses_until(last):
    """Return a loss function that raises in step `last`, as if the run crashed."""
    steps = 0

    def losses(model, batch):
        nonlocal steps
        steps += 1
        if steps > last:
            raise Stopped
        keys, labels = batch[0], batch[1]
        return (model(keys) - labels).square(), 0.0

    return losses


def trainer_for(folder, optimizer="LazyAdam", last=10**9, loss=None, **options):
    torch.manual_seed(1)
    model = Model()
    sparse, dense = sparsekit.split_embedding_variable_from_others(model)
    optimizers = [OPTIMIZERS[optimizer](sparse), torch.optim.Adam(dense, lr=0.01)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 70) for o in optimizers]
    return Trainer(
        model, loss or losses_until(last), optimizers, schedulers=schedulers, seed=5,
        checkpoints=Checkpoints(folder), checkpoint_every=7, **options,
    )  # fmt: skip


def tensors():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(0, 300, (SAMPLES, 2), generator=generator)
    return keys, keys.sum(1) / 300


class Ordered(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return tuple(each[i] for each in tensors())


def loader():
    return torch.utils.data.DataLoader(Ordered(), BATCH, shuffle=True)


def fit(trainer, data, **options):
    size = BATCH if isinstance(data, tuple) else None
    try:
        trainer.fit(data, epochs=EPOCHS, batch_size=size, resume=True, **options)
    finally:
        trainer.checkpoints.wait()
        trainer.checkpoints.close()
    return found(trainer)


def found(trainer):
    keys, vectors = next(trainer.model.items.items())
    losses = [epoch.loss for epoch in trainer.history]
    return losses, keys, vectors, trainer.model.out.weight.detach(), trainer.steps


def assert_same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1:4], other[1:4], strict=True))
    assert one[4] == other[4]


@functools.cache
def whole_run(optimizer):
    with tempfile.TemporaryDirectory() as folder:
        return fit(trainer_for(folder, optimizer), tensors())


# The run ends before the first checkpoint, within an epoch, or at the end of an epoch.
@pytest.mark.parametrize(
    ("optimizer", "last"),
    [
        *(("LazyAdam", last) for last in (3, 10, 19, 27, 55)),
        *((optimizer, last) for optimizer in ("Adam", "Ftrl") for last in (10, 27)),
    ],
)
def test_tensors(tmp_path, optimizer, last):
    expected = whole_run(optimizer)
    with pytest.raises(Stopped):
        fit(trainer_for(tmp_path / "b", optimizer, last), tensors())
    with pytest.raises(Stopped):
        fit(trainer_for(tmp_path / "b", optimizer, 1), tensors())
    resumed = trainer_for(tmp_path / "b", optimizer)
    assert_same(fit(resumed, tensors()), expected)
    if last > 20:
        assert resumed.history[0].number == 1
    # A finished run has nothing left to train.
    assert_same(fit(trainer_for(tmp_path / "b", optimizer, 0), tensors()), expected)


def test_a_shuffling_loader(tmp_path):
    expected = fit(trainer_for(tmp_path / "a"), loader())
    with pytest.raises(Stopped):
        fit(trainer_for(tmp_path / "b", last=30), loader())
    assert_same(fit(trainer_for(tmp_path / "b"), loader()), expected)


def reader(folder, wrap):
    path = folder / "data.csv"
    if not path.exists():
        keys, labels = tensors()
        rows = zip(keys.tolist(), labels.tolist(), strict=True)
        lines = [f"{label},{a},{b}" for (a, b), label in rows]
        path.write_text("\n".join(["label,a,b", *lines]) + "\n")
    columns = {"label": "label", "sparse": dict.fromkeys(["a", "b"], Keys("int"))}
    made = CsvReader([path], BATCH, shuffle=True, seed=3, **columns)
    return Prefetcher(made, depth=5) if wrap else made


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("last", [16, 19, 30])
def test_a_reader(tmp_path, last, wrap):
    def losses(until):
        passed = losses_until(until)

        def of_batch(model, batch):
            keys = batch.sparse.values().view(2, -1).T
            return passed(model, (keys, batch.label))

        return of_batch

    expected = fit(trainer_for(tmp_path / "a", loss=losses(10**9)), reader(tmp_path, wrap))
    with pytest.raises(Stopped):
        fit(trainer_for(tmp_path / "b", loss=losses(last)), reader(tmp_path, wrap))
    again = trainer_for(tmp_path / "b", loss=losses(10**9))
    assert_same(fit(again, reader(tmp_path, wrap)), expected)


# Stop within an epoch, or right after the checkpoint at its end.
@pytest.mark.parametrize("last", [30, 38])
def test_a_loader_on_another_number_of_ranks(tmp_path, monkeypatch, last):
    """On a different number of ranks, batches hold other samples, so the epoch starts over."""
    monkeypatch.setattr(resume, "_ranks", lambda: 2)
    with pytest.raises(Stopped):
        fit(trainer_for(tmp_path, last=last), loader())
    monkeypatch.undo()
    stream = io.StringIO()
    again = trainer_for(tmp_path, stream=stream)
    fit(again, loader())
    begun_again = "the epoch begins again, as batches were those of 2 ranks" in stream.getvalue()
    assert begun_again == (last == 30)
    assert again.steps == (28 if begun_again else 38) + {30: 38, 38: 19}[last]
    assert len(again.history) == EPOCHS


def test_accumulated_batches(tmp_path):
    expected = fit(trainer_for(tmp_path / "a", accumulate=2), tensors())
    with pytest.raises(Stopped):
        fit(trainer_for(tmp_path / "b", accumulate=2, last=33), tensors())
    assert_same(fit(trainer_for(tmp_path / "b", accumulate=2), tensors()), expected)


def test_the_last_step_of_an_epoch_is_saved_once(tmp_path, monkeypatch):
    """The state is saved as the beginning of the next epoch, also between regular checkpoints."""
    saved, save = [], Checkpoints.async_save

    def recorded(checkpoints, step, *arguments, state):
        saved.append((step, state["trainer"].state_dict()["place"]["batches"]))
        return save(checkpoints, step, *arguments, state=state)

    waits, wait = [], Checkpoints.wait
    monkeypatch.setattr(Checkpoints, "async_save", recorded)
    monkeypatch.setattr(Checkpoints, "wait", lambda each: waits.append(len(saved)) or wait(each))
    trainer = trainer_for(tmp_path)
    trainer.checkpoint_every = 5
    trainer.fit(few(10 * BATCH), epochs=2, batch_size=BATCH)
    assert waits[-1] == 4  # the last checkpoint is complete when fit returns
    trainer.checkpoints.close()
    assert saved == [(5, 5), (10, 0), (15, 5), (20, 0)]


def test_divergence_names_its_step_of_an_epoch_that_goes_on(tmp_path):
    with pytest.raises(Stopped):
        fit(trainer_for(tmp_path, last=16), tensors())  # the checkpoint is from step 14
    passed, steps = losses_until(10**9), []

    def losses(model, batch):
        steps.append(batch)
        of_samples, penalty = passed(model, batch)
        return of_samples * (float("nan") if len(steps) == 3 else 1), penalty

    with pytest.raises(DivergedError, match="from step 17 of 19 on"):
        fit(trainer_for(tmp_path, loss=losses), tensors())


def test_a_folder_of_another_run_is_refused_before_training(tmp_path):
    """Without the error, old checkpoints would stay the latest, and new ones would be deleted."""
    old, steps = fit(trainer_for(tmp_path), few(20)), []

    def losses(model, batch):
        steps.append(batch)
        return losses_until(10**9)(model, batch)

    anew = trainer_for(tmp_path, loss=losses)
    with pytest.raises(CheckpointError, match=r"another run, up to step-.*9, and the first"):
        anew.fit(tensors(), epochs=EPOCHS, batch_size=BATCH)
    assert steps == []
    anew.checkpoints.close()
    assert_same(fit(trainer_for(tmp_path), few(20)), old)
    # A second call of fit continues in the run's own folder.
    one = trainer_for(tmp_path / "other")
    for _ in range(2):
        one.fit(tensors(), epochs=1, batch_size=BATCH)
    assert one.checkpoints.latest().name == "step-000000000038"


def test_logs_go_on(tmp_path, monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)

    def make(folder, name, **options):
        logs = {"logs": [JsonLines(tmp_path / name)], "log_every": 2}
        trainer = trainer_for(tmp_path / folder, **logs, **options)

        def tick(*_):
            clock.now += 1 + trainer.steps % 3

        trainer.model.register_forward_hook(tick)
        return trainer

    fit(make("a", "a.jsonl"), tensors())
    with pytest.raises(Stopped):
        fit(make("b", "b.jsonl", last=33), tensors())
    clock.now += 1000
    with open(tmp_path / "b.jsonl", "a") as file:
        file.write('{"kind": "ste')  # as left by a killed process
    fit(make("b", "b.jsonl"), tensors())
    one, other = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("a.jsonl", "b.jsonl")
    )
    for name in ("kind", "step", "loss", "lr", "samples_per_second", "seconds"):
        assert [r.get(name) for r in one] == [r.get(name) for r in other], name


def test_a_run_that_has_stopped_early_stays_so(tmp_path):
    def fit_some(trainer):
        stop = EarlyStopping("number", patience=1)
        try:
            return trainer.fit(
                tensors(), epochs=5, batch_size=BATCH, resume=True, stop=stop,
                evaluate=lambda _: {"number": float(len(trainer.history))},
            )  # fmt: skip
        finally:
            trainer.checkpoints.close()

    assert len(fit_some(trainer_for(tmp_path))) == 2
    assert len(fit_some(trainer_for(tmp_path, last=0))) == 2


def test_what_does_not_go_together(tmp_path):
    trainer = trainer_for(tmp_path)
    with pytest.raises(ValueError, match="checkpoint_every=5 needs checkpoints"):
        Trainer(trainer.model, trainer.loss_fn, [], checkpoint_every=5)
    with pytest.raises(ValueError, match="resume=True needs checkpoints"):
        Trainer(trainer.model, trainer.loss_fn, []).fit(few(8), epochs=1, batch_size=8, resume=True)
    fit(trainer, tensors())
    other = trainer_for(tmp_path)
    other.schedulers.pop()
    with unchanged(other), pytest.raises(ResumeError, match="2 schedulers, and there are 1"):
        fit(other, tensors())
    other = trainer_for(tmp_path)
    with unchanged(other), pytest.raises(ValueError, match="tensors need batch_size"):
        other.fit(tensors(), epochs=1, resume=True)
    more = trainer_for(tmp_path)
    more.fit(tensors(), epochs=EPOCHS + 1, batch_size=BATCH, resume=True)
    assert [epoch.number for epoch in more.history] == [1, 2, 3, 4]


@contextlib.contextmanager
def unchanged(trainer):
    """Check that an error leaves the trainer and the objects that it trains unchanged."""

    def state():
        objects = [trainer.model, *trainer.optimizers, trainer]
        rows = list(trainer.model.items.items())
        return str([rows, *(each.state_dict() for each in objects)])

    before = state()
    yield
    assert state() == before
    trainer.checkpoints.close()


def few(samples):
    return tuple(each[:samples] for each in tensors())


def batches(samples, size=BATCH):
    return list(zip(*(each.split(size) for each in few(samples)), strict=True))


def changed(step):
    keys, labels = tensors()
    labels[step] += 1
    return keys, labels


OTHER_DATA = {
    "fewer rows": (tensors, lambda: few(50), BATCH, "samples=150, and these have 50"),
    "another row": (tensors, lambda: changed(70), BATCH, r"checksum=\d+, and these have \d+"),
    "other dtype": (tensors, lambda: (tensors()[0], tensors()[1].double()), BATCH, "checksum="),
    "larger batches": (tensors, tensors, 2 * BATCH, "global_batch_size=8, and these have 16"),
    "no tensors": (tensors, lambda: batches(150), None, "samples=150, and these have None"),
    "fewer batches": (lambda: batches(150), lambda: batches(100), None, "batches=19, .* have 13"),
    "a loader": (loader, lambda: batches(150), None, "samples=150, and these have None"),
    "a prefetched loader": (
        lambda: Prefetcher(loader()), lambda: Prefetcher(batches(100)), None,
        "batches=19, .* have 13",
    ),
    "a loader's batches": (
        loader, lambda: torch.utils.data.DataLoader(Ordered(), 4, shuffle=True), None,
        "batches=19, and these have 38",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_DATA)
def test_other_data_are_refused_in_mid_epoch(tmp_path, name):
    data, other, size, message = OTHER_DATA[name]
    with pytest.raises(Stopped):
        fit(trainer_for(tmp_path, last=16), data())
    again = trainer_for(tmp_path)
    with unchanged(again), pytest.raises(ResumeError, match=message):
        again.fit(other(), epochs=EPOCHS, batch_size=size, resume=True)
    fit(trainer_for(tmp_path), data())


def test_other_data_are_refused_by_a_finished_run(tmp_path):
    """Other data raise an error even if the run has ended: its figures are for the old data."""
    fit(trainer_for(tmp_path), tensors())
    again = trainer_for(tmp_path)
    with unchanged(again), pytest.raises(ResumeError, match="checksum="):
        fit(again, changed(3))
    larger = trainer_for(tmp_path)  # between epochs the batch size may change
    larger.fit(tensors(), epochs=EPOCHS + 1, batch_size=50, resume=True)
    assert larger.steps == 57 + 3


def test_a_reader_is_not_replaced_by_tensors(tmp_path):
    def of_batch(model, batch):
        return (model(batch.sparse.values().view(2, -1).T) - batch.label).square(), 0.0

    fit(trainer_for(tmp_path / "run", loss=of_batch), reader(tmp_path, False))
    again = trainer_for(tmp_path / "run")
    with unchanged(again), pytest.raises(ResumeError, match="on a reader, and now there is a tup"):
        fit(again, tensors())
    lines = (tmp_path / "data.csv").read_text().splitlines(keepends=True)
    (tmp_path / "data.csv").write_text("".join(lines[:-1]))
    again = trainer_for(tmp_path / "run")
    with unchanged(again), pytest.raises(ResumeError, match=r"of other data: .* saved with files="):
        fit(again, reader(tmp_path, False))


def test_fewer_batches_than_are_done(tmp_path):
    class Stream:
        def __init__(self, samples):
            self.batches = batches(samples)

        def __iter__(self):
            return iter(self.batches)

    with pytest.raises(Stopped):
        fit(trainer_for(tmp_path, last=16), Stream(150))
    with pytest.raises(ResumeError, match="behind batch 14 of an epoch, which has 7 batches here"):
        fit(trainer_for(tmp_path), Stream(50))


@pytest.mark.parametrize(
    ("last", "said"), [(0, "0 of 3 {}none"), (25, "1 of 3 {}step-000000000021")]
)
def test_ctrl_c_names_the_latest_checkpoint(tmp_path, last, said):
    passed = losses_until(last)

    def losses(model, batch):
        try:
            return passed(model, batch)
        except Stopped:
            raise KeyboardInterrupt from None

    stream = io.StringIO()
    trainer = trainer_for(tmp_path, loss=losses, stream=stream)
    trainer.fit(tensors(), epochs=EPOCHS, batch_size=BATCH)
    trainer.checkpoints.close()
    assert trainer.interrupted
    text = said.format("epochs are finished; the latest checkpoint is ")
    assert stream.getvalue().splitlines()[-1] == f"interrupted: {text}"


def test_data_must_fit_a_state_that_was_loaded_by_hand(tmp_path):
    with pytest.raises(Stopped):
        fit(trainer_for(tmp_path, last=16), tensors())
    again = trainer_for(tmp_path)
    again.checkpoints.load(again.model, again.optimizers, state={"trainer": again})
    with pytest.raises(ResumeError, match="samples=150, and these have 50"):
        again.fit(few(50), epochs=1, batch_size=BATCH)
    again.checkpoints.close()


def test_other_data_may_follow_a_run_that_was_finished(tmp_path):
    fit(trainer_for(tmp_path / "run"), tensors())
    again = trainer_for(tmp_path / "run")
    fit(again, tensors())  # no step is left to train
    assert again.state_dict()["place"] is None
    again.checkpoints = None
    again.fit(few(20), epochs=1, batch_size=BATCH)
    # A state of other data, in mid-epoch, is refused even if loaded by hand.
    with pytest.raises(Stopped):
        fit(trainer_for(tmp_path / "other", last=8), few(64))
    other = trainer_for(tmp_path / "other")
    other.checkpoints.load(other.model, other.optimizers, state={"trainer": other})
    other.checkpoints.close()
    again.load_state_dict(other.state_dict())
    assert again.steps == 8
    # A call that trains nothing keeps the position within an epoch.
    state = other.state_dict()
    state["place"] = {**state["place"], "batches": 3}
    again.load_state_dict(state)
    again.fit(few(64), epochs=0, batch_size=BATCH)
    assert again.state_dict()["place"]["batches"] == 3


class Stateful:
    """A loader whose state is empty at the start of an epoch."""

    def __init__(self):
        self.loaded = []

    def __iter__(self):
        return iter(batches(SAMPLES))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.loaded.append(state)


def test_a_reader_may_have_an_empty_state():
    generator, data = torch.Generator(), Stateful()
    place = resume.Position.begin(generator, FitData(data, None, None, 1), {})
    assert place.reader == {}
    place.batches = 4
    place.check(FitData(data, None, None, 1))
    place.find(generator, FitData(data, None, None, 1), None)
    place.reach(None)  # the reader is already at this position
    assert data.loaded == [{"step": 4}] * 2
    for other, named in ((batches(SAMPLES), "list"), (tensors(), "a tuple")):
        with pytest.raises(ResumeError, match=f"run on a reader, and now there is {named}$"):
            place.check(FitData(other, None, None, 1))


def test_a_place_without_facts_of_its_data_fits_any_data():
    place = resume.Position(torch.Generator().get_state(), torch.get_rng_state(), batches=3)
    data = FitData(tensors(), BATCH, None, 1)
    place.check(data)
    assert "facts" not in vars(data)  # no checksum has been computed


@pytest.mark.parametrize(("ranks", "there"), [(0, True), (1, True), (2, False)])
def test_a_place_of_other_ranks_is_the_start_of_its_epoch(ranks, there):
    generator, stream = torch.Generator(), io.StringIO()
    order, random = generator.get_state(), torch.get_rng_state()
    loader = FitData(batches(SAMPLES), None, None, 1)
    place = resume.Position(order, random, None, ranks, 3, 24, 1.5, {"total": 1.0})
    place.find(generator, loader, stream)
    found = place.ranks, place.batches, place.samples, place.seconds, place.losses
    assert found == ((1, 3, 24, 1.5, {"total": 1.0}) if there else (1, 0, 0, 0.0, {}))
    said = "resumed: the epoch begins again, as batches were those of 2 ranks, not 1\n"
    assert stream.getvalue() == ("" if there else said)


def test_a_run_may_begin_behind_a_checkpoint_of_its_start(tmp_path):
    trainer = trainer_for(tmp_path)
    first = Checkpoints(tmp_path)
    first.save(0, trainer.model)
    first.close()
    trainer.fit(few(BATCH), epochs=1, batch_size=BATCH)
    assert trainer.checkpoints.latest().name == "step-000000000001"
    trainer.checkpoints.close()
