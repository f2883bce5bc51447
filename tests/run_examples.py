"""Runs scripts of examples/, each in a forked process, and stores the output of rank 0.

Importing torch and the trainers takes longer than the scripts, so all scripts share one import.
"""

import importlib
import json
import os
import runpy
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, port: str, printed: Path) -> dict[str, Any]:
    """Run an example whose ranks connect through the port; return its global variables."""
    os.environ["MASTER_PORT"] = port
    with printed.open("w") as file, redirect_stdout(file if os.environ["RANK"] == "0" else None):
        return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def main(folder: Path, calls: dict[str, tuple[str, list[str]]]) -> None:
    """Run the examples; `calls` maps each name to its port and to the packages to import first."""
    sys.path.insert(0, str(EXAMPLES))
    for package in ["sparsekit", *{p for _, packages in calls.values() for p in packages}]:
        with suppress(ImportError):
            importlib.import_module(package)
    for name, (port, _) in calls.items():
        child = os.fork()
        if child == 0:
            left = run(name, port, folder / f"{name}-{os.environ['RANK']}")
            # Skip Python's clean-up: a process group of torch 2.13 that is freed right after a
            # collective may wait for its thread while it holds a lock that the thread needs (one
            # run in eight hung).
            assert left
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"{name} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
