"""Processes share a table in memory: one process inserts keys, the others only read."""

import copy

import pytest
import torch
import torch.multiprocessing

import sparsekit

KEYS = torch.arange(50)


def table():
    layer = sparsekit.Embedding(300, 2, name="t")
    layer(KEYS)
    return layer


def in_another(layer, answers):
    """Send the result of `use`, or the error that it raised, to the queue `answers`."""
    try:
        answers.put(use(layer))
    except BaseException as error:
        answers.put(repr(error))
        raise


def use(layer):
    """Use a layer in another process; return the vectors read and the errors raised."""
    calls = [
        # Repeat the call from before the fork, whose plan is kept.
        lambda: layer(torch.arange(60)),
        lambda: layer.train()(torch.arange(60)),
        lambda: layer.assign(torch.tensor([70]), torch.ones(1, 2)),
        lambda: layer.table.find_or_insert(torch.tensor([80])),
    ]
    errors, read = [], []
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))
        if not read:
            layer.eval()
            read = [layer(torch.arange(60)).sum(), layer.vectors(KEYS).sum()]
    own = copy.deepcopy(layer)
    if not own.table.buckets.is_shared():
        own(torch.arange(60))
    layer.insert = False
    trained = layer(torch.arange(60)).sum()
    sums = [tensor.item() for tensor in (*read, trained)]
    return *sums, errors, len(own.table), len(layer.table)


@pytest.mark.parametrize("way", ["fork", "shared fork", "fork after a lookup", "spawn"])
def test_only_the_process_that_made_a_table_inserts(way):
    layer = table()
    if way in ("shared fork", "fork after a lookup"):
        torch.nn.Sequential(layer).share_memory()
    if way == "fork after a lookup":
        layer(KEYS)
    context = torch.multiprocessing.get_context("spawn" if way == "spawn" else "fork")
    answers = context.SimpleQueue()
    process = context.Process(target=in_another, args=(layer, answers))
    process.start()
    answer = answers.get()
    process.join()
    assert isinstance(answer, tuple), answer
    *read, errors, own, size = answer
    expected = layer.eval()(torch.arange(60)).sum(), layer.vectors(KEYS).sum()
    sums = [tensor.item() for tensor in (*expected, expected[0])]
    assert read == pytest.approx(sums)
    if way == "fork":  # the child has its own copy
        assert (errors, own, size) == ([], 62, 62)
    else:
        assert len(errors) == 4
        assert all("t: processes share this table's memory, and only pr" in e for e in errors)
        assert (own, size) == (60, 50)
    layer.train()(torch.arange(90))  # the process that made the table may still insert
    assert len(layer.table) == 90
    copy.deepcopy(layer)(torch.arange(99))
