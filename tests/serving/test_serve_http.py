"""The example of a server answers lookups, follows a log, and survives bad requests."""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from patience import patience

from sparsekit.serving import Snapshot

from .logs import Log

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving" / "serve_http.py"


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "log")


@pytest.fixture
def ask(log):
    """Start the server on the log, and return a function that asks it."""
    command = [sys.executable, EXAMPLE, log.path, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=EXAMPLE.parents[2]
    ) as server:
        try:
            port = re.search(r"on port (\d+)$", server.stdout.readline())[1]

            def ask(page, status=200, **content):
                data = json.dumps(content).encode() if content else None
                request = urllib.request.Request(f"http://127.0.0.1:{port}/{page}", data)
                try:
                    answer = urllib.request.urlopen(request, timeout=patience(30))
                except urllib.error.HTTPError as error:
                    answer = error
                with answer:
                    assert answer.status == status
                    return json.load(answer)

            yield ask
        finally:
            server.kill()


def test_lookups_and_best_rows(log, ask):
    keys = np.array(list(log.versions[0]["films"])[:6]).reshape(3, 2)
    query = np.linspace(-1, 1, 6, dtype=np.float32)
    with Snapshot(log.path) as snapshot:
        vectors = snapshot.lookup("films", keys, combiner="mean")
        best, scores = snapshot.top_k("films", query, 7)
    answer = ask("lookup", table="films", keys=keys.tolist(), combiner="mean")
    assert (answer["version"], answer["vectors"]) == (0, vectors.tolist())
    answer = ask("top_k", table="films", query=query.tolist(), k=7)
    assert (answer["keys"], answer["scores"]) == (best.tolist(), scores.tolist())


def test_new_versions_are_served(log, ask):
    assert ask("health")["version"] == 0
    log.add()
    end = time.monotonic() + patience(10)
    while (health := ask("health"))["version"] < 1:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert health["tables"]["films"] == len(log.versions[1]["films"])
    assert health["error"] is None
    key, vector = list(log.versions[1]["films"].items())[-1]
    answer = ask("lookup", table="films", keys=[key])
    assert answer == {"version": 1, "vectors": [vector.tolist()]}


def test_bad_requests_get_an_answer(ask):
    for page, status, content, message in [
        ("nothing", 404, {}, "no such page: /nothing"),
        ("nothing", 404, {"a": 1}, "no such page: /nothing"),
        ("lookup", 400, {"table": "filmz", "keys": [1]}, "no table named 'filmz'"),
        ("lookup", 400, {"table": "films"}, "missing 1 required positional argument"),
        ("lookup", 400, {"table": "films", "keys": [2**63]}, "too large"),
        ("top_k", 400, {"table": "films", "query": [1.0]}, r"queries must be \[6\]"),
    ]:
        assert re.search(message, ask(page, status, **content)["error"])
    assert ask("health")["version"] == 0
