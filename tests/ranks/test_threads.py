"""Threads of one rank use its exchange one at a time."""

import threading
import time

import pytest
import torch

import sparsekit

WAYS = ("all_to_all", "reduce_scatter")


def made(name, way):
    layer = sparsekit.DistributedEmbedding("sum", 90, 3, 1, 2, name=name, strategy=way, seed=1)
    layer(keys(0))
    return layer


def keys(begin):
    return torch.arange(begin, begin + 12).view(-1, 1, 2)


def in_turns(rank, exchange, first, second):
    """Call two functions; on rank 0, a thread calls the second once the first has sent a header."""
    if rank == 1:
        first()
        second()
        return
    sent, errors = threading.Event(), []
    begin = exchange.transport.begin_all_to_all

    def pause_after_first(*arguments):
        begun = begin(*arguments)
        if not sent.is_set():
            sent.set()
            time.sleep(0.3)  # the other thread might get in between
        return begun

    def run(function):
        try:
            if function is second:
                sent.wait()
            function()
        except Exception as error:
            sent.set()
            errors.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange.transport, "begin_all_to_all", pause_after_first)
        threads = [threading.Thread(target=run, args=(call,)) for call in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def evaluations(rank, way, grouped):
    layer = made("t", way)
    layer.eval()
    group = sparsekit.EmbeddingGroup({"t": layer})
    expected = [layer(keys(begin)) for begin in (0, 30)]
    found = [None, None]

    def look_up(i):
        batch = keys(30 * i)
        found[i] = group({"t": batch})["t"] if grouped else layer(batch)

    in_turns(rank, layer.exchange, lambda: look_up(0), lambda: look_up(1))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_two_threads_in_evaluation(two_ranks, way, grouped):
    two_ranks(evaluations, way, grouped)


def backwards(rank, way):
    layers = [made(name, way) for name in ("a", "b")]
    losses = [layer(keys(6 * i)).square().sum() for i, layer in enumerate(layers)]
    for loss in losses:
        loss.backward(retain_graph=True)
    expected = [layer.weight.grad for layer in layers]
    for layer in layers:
        layer.weight.grad = None
    in_turns(rank, layers[0].exchange, losses[0].backward, losses[1].backward)
    for layer, grad in zip(layers, expected, strict=True):
        assert torch.equal(layer.weight.grad.to_dense(), grad.to_dense())


@pytest.mark.parametrize("way", WAYS)
def test_two_threads_in_backward(two_ranks, way):
    two_ranks(backwards, way)
