"""sparsekit's modules are short and import without cycles, and a lookup enters few files."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest
import torch

import sparsekit

PACKAGE = Path(sparsekit.__file__).parent
MOST_LINES = 400
# Maximum number of times that a forward on one rank may enter a file.
MOST_ENTRIES = 12


def files(package):
    """Return a dict of module name to file."""
    found = {}
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.pyi")]):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class Imports(ast.NodeVisitor):
    """Visitor that collects all imports of a file, even in functions or under TYPE_CHECKING."""

    def __init__(self, name, path, modules):
        self.package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.modules, self.found = modules, set()
        self.visit(ast.parse(path.read_text()))

    def visit_Import(self, node):
        self.found |= {alias.name for alias in node.names} & set(self.modules)

    def visit_ImportFrom(self, node):
        parents = self.package.split(".")
        above = parents[: len(parents) + 1 - node.level] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            names = [f"{module}.{alias.name}", module]
            self.found |= {next((name for name in names if name in self.modules), "")} - {""}


def circle(package):
    """Return modules that form an import cycle, or None."""
    modules = files(package)
    graph = {name: Imports(name, path, modules).found for name, path in modules.items()}
    assert any(graph.values())
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_no_circle_among_modules():
    assert circle(PACKAGE) is None


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from .b import g", True),
        ("from . import b", True),
        ("from p.sub import b", True),
        ("import p.sub.b", True),
        ("def f():\n    from .b import g", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import g", True),
        ("from .c import g", False),
    ],
)
def test_a_circle_is_found(tmp_path, line, found):
    (tmp_path / "p/sub").mkdir(parents=True)
    for name, text in {
        "__init__": "from .sub import a",
        "sub/__init__": "from .a import f\nfrom .b import g",
        "sub/a": line,
        "sub/b": "from ..sub.a import f",
        "sub/c": "g = 1",
    }.items():
        (tmp_path / f"p/{name}.py").write_text(text)
    assert (circle(tmp_path / "p") is not None) == found


def test_no_long_file():
    lines = {path: len(path.read_text().splitlines()) for path in files(PACKAGE).values()}
    assert len(lines) > 50
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def entries(call):
    """Return the calls from one file of sparsekit to a function in another."""
    found = []

    def of_package(frame):
        return Path(frame.f_code.co_filename).is_relative_to(PACKAGE)

    def at_event(frame, event, _):
        if event != "call" or not of_package(frame):
            return
        caller = frame.f_back
        while caller is not None and not of_package(caller):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename != frame.f_code.co_filename:
            file = Path(frame.f_code.co_filename).relative_to(PACKAGE)
            found.append(f"{file}: {frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(at_event)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_enters_few_files(training):
    layer = sparsekit.DistributedEmbedding("mean", 1000, 8, 2, 3).train(training)
    keys = torch.tensor([[[7, -1, 7], [10**12, 0, 3]]])
    layer(keys)  # the first call of a layer checks more
    found = entries(lambda: layer(keys))
    assert "lookup/local.py: outputs" in found
    assert len(found) <= MOST_ENTRIES, "\n".join(found)
