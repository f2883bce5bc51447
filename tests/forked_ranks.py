"""Lets commands fork their ranks from the test's process, so that these need not import torch."""

import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  (the first optimizer of each rank would import it)

from sparsekit.train import launch

_elastic_launch = launch.elastic_launch


@contextmanager
def forked() -> Iterator[None]:
    """Context in which `run_on_ranks` forks this process. What ranks get is pickled all the same.

    New processes, as users have them, are tested in tests/test_cli.py and
    tests/ranks/test_launch.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "elastic_launch", _launch)
        yield


def _launch(config: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    config.start_method = "fork"
    start = _elastic_launch(config, _call)
    return lambda *arguments: start(pickle.dumps((function, arguments)))


def _call(pickled: bytes) -> Any:
    # These signals have the launcher's handlers here, which a new process would not have.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    function, arguments = pickle.loads(pickled)
    return function(*arguments)
