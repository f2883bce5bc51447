"""The examples in docstrings print what they say."""

import doctest
import importlib

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
        "models.deepconn",
        "models.wide",
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
