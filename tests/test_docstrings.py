"""Examples in docstrings print what they say, and texts avoid words that need a second reading."""

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
    for folder in ("sparsekit", "csrc", "docs")
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh", ".md"}
]


def test_words_that_need_a_second_reading() -> None:
    """Texts use no vague words, and no openings that do not say what a thing is or does."""
    words = re.compile(r"\b(so many|shall|somebody)\b|(//|#|\"\"\") Of the file\b", re.IGNORECASE)
    assert len(TEXTS) > 400
    found = [f"{path}: {match[0]}" for path in TEXTS for match in words.finditer(path.read_text())]
    assert found == []
