"""Examples in docstrings print the output shown, and texts avoid words that are hard to read."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

import sparsekit


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(
    "module",
    [
        "tables.hash_table",
        "hashing.values",
        "hashing.split_hash",
        "recipes.deepconn.model",
        "recipes.wide.model",
        "nn.embedding",
        "nn.dropin_embedding",
        "nn.dropin_embedding_bag",
    ],
)
def test_examples(module: str) -> None:
    names = {"torch": torch, **vars(sparsekit), **vars(sparsekit.hashing)}
    result = doctest.testmod(importlib.import_module(f"sparsekit.{module}"), extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0


ROOT = Path(__file__).parent.parent
TEXTS = [
    path
    for folder in ("sparsekit", "csrc", "docs", "tests", "benchmarks", "examples", "tools")
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh", ".md"} and path != Path(__file__)
]


def test_words_that_need_a_second_reading() -> None:
    """Texts contain no vague words, and no opening that hides what a thing is or does."""
    words = re.compile(
        r"\b(so many|shall|somebody|lest|no more than one)\b"
        r"|(//|#|\"\"\") (?-i:Of (the|a|an)|In place of|For what)\b",
        re.IGNORECASE,
    )
    assert len(TEXTS) > 700
    found = [f"{path}: {match[0]}" for path in TEXTS for match in words.finditer(path.read_text())]
    assert found == []


def test_native_comments_need_no_guess() -> None:
    """Comments in native code do not open with a subordinate clause or use archaic words."""
    words = re.compile(
        r"// (What|Whether|Those (of|that|with))\b|//.*\b(anew|beside|likewise|nobody|whoever)\b"
    )
    native = [path for path in TEXTS if ROOT / "csrc" in path.parents]
    assert len(native) > 100
    found = [f"{path}: {match[0]}" for path in native for match in words.finditer(path.read_text())]
    assert found == []


def test_comments_of_python_need_no_guess() -> None:
    """Comments and docstrings of Python do not open with a subordinate clause."""
    words = re.compile(
        r"(# |// |\"\"\")(What|Whether|Which|Whose|Behind|So that|Those (of|that|with))\b"
    )
    names = ("sparsekit", "tests", "benchmarks", "examples", "tools")
    folders = {ROOT / name for name in names}
    others = [path for path in TEXTS if not folders.isdisjoint(path.parents)]
    assert len(others) > 550
    found = [f"{path}: {match[0]}" for path in others for match in words.finditer(path.read_text())]
    assert found == []


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """A function's docstring begins with a verb; noun phrases are for classes and properties."""
    nouns = ("The", "A", "An", "Each", "All", "Those", "These", "Its", "Their", "This")
    found, checked = [], 0
    for path in (ROOT / "sparsekit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
                continue
            if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            checked += 1
            if (ast.get_docstring(node) or "").split()[0] in nouns:
                found.append(f"{path}:{node.lineno} {node.name}")
    assert checked > 700
    assert found == []
