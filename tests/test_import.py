"""Importing the package is fast, and `python -O` does not change the package's behaviour."""

import ast
import subprocess
import sys
from pathlib import Path

import sparsekit

PACKAGE = Path(sparsekit.__file__).parent

# Each of these takes about as long to import as the rest of the package, or longer.
HEAVY = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy")
# Packages of the extra sparsekit-torch[data].
OPTIONAL = ("pyarrow", "scipy")

LOOKUP = """
import sys, torch
before = set(sys.modules)
import sparsekit
layer = sparsekit.DistributedEmbedding("sum", 10, 4, 1, 2)
layer(torch.tensor([[[1, 2]]])).sum().backward()
print(*set(sys.modules) - before)
"""


def test_nothing_heavy_is_imported_with_it():
    command = [sys.executable, "-c", LOOKUP]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout
    imported = output.split()
    assert "sparsekit.nn" in imported
    assert [name for name in (*HEAVY, *OPTIONAL) if name in imported] == []


def test_no_check_is_an_assert():
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert found == []
