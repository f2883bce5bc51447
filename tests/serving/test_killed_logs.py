"""Trainers and readers of a log are killed at random moments: what is served always was."""

import multiprocessing
import os
import random
import time

import pytest
import torch
from patience import patience

from sparsekit.serving import DeltaLog, Snapshot, delta_log

from .following import assert_serves, made, train

# `make test` kills few times. SPARSEKIT_KILLS=50 takes about two minutes.
KILLS = int(os.environ.get("SPARSEKIT_KILLS", "6"))


def at_step(step):
    """Return the model after a number of steps, which are the same in each process."""
    torch.manual_seed(0)
    model, optimizer = made(rows=2000)
    for each in range(step):
        train(model, optimizer, each)
    return model, optimizer


def train_for_ever(folder, step, connection):
    torch.set_num_threads(1)
    delta_log._FEW_BYTES = 0  # small logs are compacted, too
    model, optimizer = at_step(step)
    log = DeltaLog(
        folder, model, rows="float32", every_steps=1, compact_at=0.1, dense_version=step, step=step
    )
    while True:
        connection.send(step)
        train(model, optimizer, step)
        step += 1
        log.step(dense_version=step)


def read_for_ever(folder, _, connection):
    torch.set_num_threads(1)
    with Snapshot(folder) as snapshot:
        while True:
            snapshot.refresh()
            connection.send(snapshot.dense_version)


def check(snapshot, reference):
    """Compare a snapshot with the model at the step that it says it has."""
    step = snapshot.dense_version
    model, optimizer, at = reference
    assert step >= at
    for each in range(at, step):
        train(model, optimizer, each)
    reference[2] = step
    assert_serves(snapshot, model)


@pytest.mark.time_limit(max(180, 8 * KILLS))
def test_the_log_has_a_state_that_was(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "sparsekit", "serving.following"])
    chance = random.Random(KILLS)
    DeltaLog(
        tmp_path, at_step(0)[0], rows="float32", every_steps=1, dense_version=0, step=0
    ).close()
    following, step = Snapshot(tmp_path), 0
    reference = [*at_step(0), 0]  # model, optimizer, and its step
    for kill in range(KILLS):
        function = train_for_ever if kill % 3 < 2 else read_for_ever
        ours, theirs = context.Pipe()
        process = context.Process(target=function, args=(tmp_path, step, theirs), daemon=True)
        process.start()
        theirs.close()
        for _ in range(1 + chance.randrange(8)):
            assert ours.poll(patience(100))
            step = max(step, ours.recv())
            following.refresh()
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -9
        following.refresh()
        assert following.dense_version >= step  # all that has been written is there
        check(following, reference)
        with Snapshot(tmp_path, verify=True) as opened:
            opened.refresh()
            assert opened.version == following.version
            check(opened, reference)
        step = following.dense_version
    following.close()
