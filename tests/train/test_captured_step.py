"""A captured step and its replays give the bits of the step, under a schedule and with new keys.

The graphs are stand-ins that record and replay the launches of the host runner (tests/graphs.py).
"""

import pytest
import torch
from captured_steps import STEPS, Trained, assert_same, batch
from conftest import same_bits
from graphs import HostGraph, host_graphs

import sparsekit
from sparsekit import checkpoint, optim
from sparsekit.train import CapturedStep


@pytest.fixture
def graphs():
    with host_graphs():
        yield


KINDS = {
    "SGD": (optim.SGD, {}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "LazyAdam": (optim.LazyAdam, {"weight_decay": 0.01}),
    "LazyAdam per row": (optim.LazyAdam, {"bias_correction": "per_row"}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "RowWiseAdagrad": (optim.RowWiseAdagrad, {}),
    "RMSProp": (optim.RMSProp, {"momentum": 0.5, "form": "tensorflow"}),
    "Ftrl": (optim.Ftrl, {"l1": 0.01}),
    "PartialRowWiseAdam": (optim.PartialRowWiseAdam, {}),
    "LazyLAMB": (optim.LazyLAMB, {"weight_decay": 0.1}),
}


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tables", [1, 3])
def test_replays_follow_a_schedule_and_insert_keys(tables, name):
    kind, settings = KINDS[name]
    found = []
    for captured in (True, False):
        trained = Trained(tables, kind, captured, **settings)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.8)
        losses = []
        for i in range(STEPS):
            losses += trained.run(i, 1)
            scheduler.step()
        found.append((losses, trained.contents()))
        assert HostGraph.replays == STEPS - 3
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])
    assert found[0][1]["keys of captured 0"].numel() > 40
    assert len(set(found[0][0])) == STEPS


def counting():
    """Return a list that gets an entry for each wait, and a function for `host_graphs`."""
    waits = []
    return waits, lambda: waits.append(None)


def test_replays_do_not_wait_while_keys_fit():
    waits, on_wait = counting()
    with host_graphs(on_wait=on_wait):
        trained = Trained(3, rows=100_000)
        trained.run(steps=4)  # the first lookup and the capture wait
        waits.clear()
        trained.run(4, 20)
    assert not waits


@pytest.mark.parametrize("tables", [1, 3])
def test_a_full_table_raises_in_the_step_whose_keys_do_not_fit(tables):
    """No report arrives by itself here: the replay must know that it has to wait."""
    found = []
    for captured in (True, False):
        with host_graphs(is_made=lambda looks: False):
            trained, losses = Trained(tables, captured=captured, rows=60), []
            with pytest.raises(sparsekit.TableFullError) as raised:
                losses.extend(trained.run(i, 1) for i in range(40))
            found.append((losses, str(raised.value)))
    assert found[0] == found[1]
    assert len(found[0][0]) > 4


class BadKey:
    """A model without hash tables, and steps whose fifth has a key beyond the table."""

    def __init__(self):
        self.trained = Trained(1, hashed=False, rows=200)

    def run(self, steps):
        for i in range(steps):
            keys, labels = batch(i)
            if i == 4:
                keys[0, 0, 0] = 200
            self.trained.captured(keys, labels)
            yield i


def test_a_bad_key_in_a_replay_raises_at_most_eight_calls_later():
    with host_graphs(is_made=lambda looks: False):
        calls = []
        with pytest.raises(IndexError, match=r"captured 0: .*keys\[0\] was out of range"):
            calls.extend(BadKey().run(40))
        assert 4 < len(calls) <= 4 + 8
        sparsekit.raise_errors("cpu")  # the update says nothing more of the key


@pytest.mark.parametrize("way", ["raise_errors", "save"])
def test_errors_of_replays_are_raised_on_request(tmp_path, way):
    with host_graphs(is_made=lambda looks: False):
        bad = BadKey()
        assert len(list(bad.run(5))) == 5
        model, path = bad.trained.model, tmp_path / "saved"
        ask = sparsekit.raise_errors if way == "raise_errors" else checkpoint.save
        with pytest.raises(IndexError, match=r"captured 0: .*keys\[0\] was out of range"):
            ask(*(() if way == "raise_errors" else (model, path)))
        assert not path.exists()


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("calls", [1, 5])
def test_inputs_of_another_form(calls):
    trained = Trained()
    trained.run(steps=calls)
    keys, labels = batch(6)
    before = trained.contents()
    for inputs, message in (
        ((keys[:5], labels[:5]), r"input 0 must be int64 \[6, 2, 3\], .* got int64 \[5, 2, 3\]; "),
        ((keys.int(), labels), r"input 0 must be int64 .* got int32 \[6, 2, 3\]"),
        ((keys, labels.tolist()), r"inputs must have the structure of the first call"),
        ((keys, 5.0), r"input 1 must be float32 \[6\], .* got 5.0"),
        (({"t0": keys}, labels), r"inputs must have the structure of the first call"),
        ((keys,), r"inputs must have the structure of the first call"),
    ):
        with pytest.raises(ValueError, match=f"^CapturedStep: {message}"):
            trained.captured(*inputs)
    assert_same(before, trained.contents())


@pytest.mark.usefixtures("graphs")
def test_an_input_that_is_no_tensor_is_part_of_the_capture():
    trained, factors = Trained(), []

    def step(keys, labels, factor):
        factors.append(factor)
        return trained.step(keys, labels * factor)["loss"]

    captured = CapturedStep(step, trained.model, trained.optimizer, warm_ups=1)
    for i in range(3):
        captured(*batch(i), 2.0)
    assert factors == [2.0, 2.0]
    with pytest.raises(ValueError, match=r"input 2 must be 2\.0, as in the first call, got 3\.0"):
        captured(*batch(4), 3.0)


REFUSED = {
    "not fused": (ValueError, r"captured 0 has a gradient whose length .* fuse_in_backward"),
    "exact": (ValueError, r"rows of captured 0 catch up with steps that they have missed"),
    "other optimizer": (ValueError, r"optimizers lacks the LazyAdam that updates captured 0"),
    "maximize": (RuntimeError, r"the step cannot be captured, since it waits"),
    "item": (RuntimeError, r"the step cannot be captured, since it waits"),
    "error": (RuntimeError, r"the step cannot be captured, since it waits for the device or fails"),
}


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("case", REFUSED)
def test_steps_that_cannot_be_captured(case):
    """The step itself goes on as before."""
    kind = optim.Adam if case == "exact" else optim.LazyAdam
    trained = Trained(kind=kind, captured=False, maximize=case == "maximize")
    if case == "not fused":
        trained.handle.remove()
    optimizers = [] if case == "other optimizer" else [trained.optimizer]
    fails = []

    def step(keys, labels):
        result = trained.step(keys, labels)
        if case == "item" and fails:
            result["loss"].item()
        if case == "error" and fails:
            raise KeyError("mine")
        return result

    captured = CapturedStep(step, trained.model, optimizers, warm_ups=2)
    for i in range(2):
        captured(*batch(i))
    fails.append(True)
    error, message = REFUSED[case]
    before = trained.contents()
    for _ in range(2):
        with pytest.raises(error, match=f"^CapturedStep: .*{message}") as raised:
            captured(*batch(2))
    if case == "error":
        assert isinstance(raised.value.__cause__, KeyError)
    assert HostGraph.replays == 0
    trained.optimizer.zero_grad()
    assert_same(before, trained.contents())
    trained.run(2, 1)


@pytest.mark.usefixtures("graphs")
def test_tables_of_several_ranks_are_refused():
    trained = Trained(captured=False)
    trained.model.layers[0].world_size = 2
    with pytest.raises(ValueError, match=r"^CapturedStep: captured 0 is sharded over 2 ranks"):
        CapturedStep(trained.step, trained.model, trained.optimizer)


def test_arguments_that_are_refused():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"^CapturedStep: the model must be on one .* got cpu"):
        CapturedStep(print, model, [])
    model.register_buffer("other", torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match=r"on one CUDA device, got cpu, meta$"):
        CapturedStep(print, model, [])
    with pytest.raises(ValueError, match=r"on one CUDA device, got none$"):
        CapturedStep(print, torch.nn.Identity(), [])
    with pytest.raises(ValueError, match=r"^CapturedStep: warm_ups must be in \[1, .* got 0$"):
        CapturedStep(print, model, [], warm_ups=0)
    with pytest.raises(TypeError, match=r"^CapturedStep: warm_ups must be an int, got 1\.5$"):
        CapturedStep(print, model, [], warm_ups=1.5)


@pytest.mark.usefixtures("graphs")
def test_vectors_of_rows_without_a_key_are_noticed_as_in_a_lookup():
    trained = Trained()
    trained.run(steps=5)
    with torch.no_grad():
        trained.model.layers[0].weight += 1
    with pytest.raises(RuntimeError, match=r"captured 0"):
        trained.run(5, 1)


@pytest.mark.usefixtures("graphs")
def test_outputs_are_the_same_tensors_in_all_replays():
    trained = Trained()
    outputs = [trained.captured(*batch(i)) for i in range(6)]
    assert outputs[3]["loss"] is outputs[5]["loss"]
    assert outputs[2]["loss"] is not outputs[3]["loss"]
    assert not any(output["loss"].requires_grad for output in outputs)
    assert outputs[5]["count"] == batch(5)[1].sum()


@pytest.mark.usefixtures("graphs")
def test_autograd_notices_that_a_replay_has_changed_a_weight():
    trained = Trained()
    trained.run(steps=4)
    weight = trained.model.layers[0].weight
    version, squares = weight._version, (trained.model.head.weight**2).sum()
    trained.run(4, 1)
    assert weight._version > version
    assert not weight.written()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.usefixtures("graphs")
def test_lookups_between_replays_see_their_keys():
    trained = Trained()
    trained.run()
    model, found = trained.model, []
    model.eval()
    found.append(model(batch(STEPS - 1)[0]).detach())
    model.train()
    trained.run(STEPS, 2)
    expected = Trained(captured=False)
    expected.run()
    expected.model.eval()
    assert same_bits(found[0], expected.model(batch(STEPS - 1)[0]).detach())
    expected.model.train()
    expected.run(STEPS, 2)
    assert_same(trained.contents(), expected.contents())
