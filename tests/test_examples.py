"""The examples run on two ranks and learn; examples of one model take the same steps."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patience

ROOT = Path(__file__).parent.parent
# The packages that each example needs.
NEEDS = {
    "ddp": [],
    "fsdp2": [],
    "lightning_auto": ["lightning"],
    "lightning_manual": ["lightning"],
    "accelerate_loop": ["accelerate"],
    "huggingface": ["transformers", "accelerate"],
    "quickstart": [],
    "train_dlrm": [],
    "two_tower": [],
}


def absent(name: str) -> list[str]:
    return [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the examples whose packages are installed; return the output of each."""
    folder = tmp_path_factory.mktemp("examples")
    names = [name for name in NEEDS if not absent(name)]
    ports = free_ports(len(names))
    calls = json.dumps({n: (port, NEEDS[n]) for n, port in zip(names, ports, strict=True)})
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            **{"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"},
            # Lightning recognises torchrun by these variables. Only the variable of torchrun's
            # store is left out.
            **{"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "examples", "MASTER_PORT": ports[0]},
        }
        command = [sys.executable, "-W", "ignore", "tests/run_examples.py", str(folder), calls]
        with (folder / f"errors-{rank}").open("w") as errors:
            ranks.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, stderr=errors, stdout=subprocess.DEVNULL
                )
            )
    try:
        codes = [rank.wait(patience(150)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], "".join((folder / f"errors-{r}").read_text() for r in range(2))
    return {name: (folder / f"{name}-0").read_text() for name in names}


@pytest.mark.parametrize("name", NEEDS)
def test_example(name: str, request: pytest.FixtureRequest) -> None:
    if absent(name):
        pytest.skip(f"needs {', '.join(absent(name))}, which is not installed")
    printed = request.getfixturevalue("printed")
    (loss,) = re.findall(r"^loss (\d\.\d+)$", printed[name], re.MULTILINE)
    if name == "two_tower":  # 0.05 by chance
        assert float(re.findall(r"^recall@10 (.*)$", printed[name], re.MULTILINE)[0]) > 0.9
    else:
        assert float(loss) < 0.3
    if name in ("fsdp2", "lightning_auto"):
        assert loss == re.findall(r"^loss (.*)$", printed["ddp"], re.MULTILINE)[0]


def test_examples_are_short() -> None:
    lengths = {path.stem: len(path.read_text().splitlines()) for path in ROOT.glob("examples/*.py")}
    assert lengths.keys() == {*NEEDS, "model"}
    assert max(lengths.pop("quickstart"), lengths.pop("two_tower")) < 60
    assert max(lengths.values()) <= 45, lengths
