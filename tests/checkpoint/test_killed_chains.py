"""A run that evicts and saves changes is killed at random moments: what is on disk always was."""

import multiprocessing
import os
import random
import time

import pytest
import torch
from patience import patience

from sparsekit.checkpoint import Checkpoints

from .evicting import made, state_of, train
from .models import assert_equal

# `make test` kills few times. SPARSEKIT_KILLS=50 takes about half a minute.
KILLS = int(os.environ.get("SPARSEKIT_KILLS", "9"))


def train_for_ever(folder, score, seed, connection):
    """Go on from the latest checkpoint, and save after each step, until the process is killed."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    layer, optimizer = made(score)
    keep = Checkpoints(folder, keep=chance.choice([1, 3]), complete_every=4)
    step = keep.load(layer, optimizer).step
    while True:
        connection.send(step)
        step += 1
        train(layer, optimizer, step, step + 1)
        if chance.random() < 0.5:
            keep.async_save(step, layer, optimizer)
        else:
            keep.save(step, layer, optimizer)


@pytest.mark.time_limit(max(180, 6 * KILLS))
@pytest.mark.parametrize("score", ["lru", "lfu", "admission"])
def test_the_chain_restores_a_state_that_was(tmp_path, score):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "sparsekit", "checkpoint.evicting"])
    chance = random.Random(score)
    reference, of_reference = made(score)
    last = 7
    train(reference, of_reference, 0, last + 1)
    assert reference.life.evicted > 0
    keep = Checkpoints(tmp_path)
    keep.save(last, reference, of_reference)
    keep.close()
    for seed in range((KILLS + 2) // 3):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=train_for_ever, args=(tmp_path, score, seed, theirs), daemon=True
        )
        process.start()
        theirs.close()
        for number in range(1 + chance.randrange(6)):
            assert ours.poll(patience(100))
            assert ours.recv() == last + number
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -9
        layer, optimizer = made(score, seed=9)
        step = Checkpoints(tmp_path).load(layer, optimizer).step
        assert step >= last + number - 1  # the last one may have been written in the background
        train(reference, of_reference, last + 1, step + 1)
        last = step
        assert_equal(state_of(layer, optimizer), state_of(reference, of_reference))
        assert torch.equal(layer.table.keys(), reference.table.keys())
