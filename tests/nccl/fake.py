"""Helpers for tests of the native exchange, run in a process whose libnccl is a stand-in.

The process must load the stand-in before any real libnccl.
"""

import contextlib
import ctypes
import os
import threading
from datetime import timedelta

import pytest
import torch
from ranks.pool import Ranks

import sparsekit
from sparsekit import _pybind
from sparsekit.distributed import nccl

BUILT = sparsekit.build_info()["nccl"]
CPU = torch.device("cpu")
LONG, SHORT = timedelta(seconds=60), timedelta(seconds=1)


@contextlib.contextmanager
def in_process_of_its_own(library):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEKIT_NCCL_LIBRARY", str(library))
        pool = Ranks(1)

    def call(function, *arguments):
        return pool(function, *arguments)[0]

    try:
        yield call
    finally:
        pool.close()


def the_fake():
    library = ctypes.CDLL(os.environ["SPARSEKIT_NCCL_LIBRARY"])
    library.fake_calls.restype = ctypes.c_char_p
    return library


def calls():
    """Return the NCCL calls made since the last query."""
    return the_fake().fake_calls().decode().split("\n")[:-1]


def one_rank(device=CPU, timeout=LONG):
    return nccl.NcclTransport(0, 1, _pybind.NcclCommunicator.unique_id(), device, timeout)


def on_threads(world_size, function, cuda=lambda: None):
    """Run function(transport) on each rank, with threads as ranks; return the results.

    Args:
        world_size: number of ranks.
        function: called by each rank.
        cuda: makes each rank's stand-in for torch.cuda.
    """
    unique_id = _pybind.NcclCommunicator.unique_id()
    results = [None] * world_size

    def run(rank):
        try:
            transport = nccl.NcclTransport(rank, world_size, unique_id, CPU, LONG, cuda())
            results[rank] = function(transport)
            transport.close()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def launch(watch):
    """Make `watch` believe that a collective has just been launched."""
    with watch.launch():
        pass
