"""The examples in docstrings print what they say."""

import doctest
import importlib

import pytest
import torch

import sparsekit


@pytest.mark.parametrize(
    "module",
    [
        "table",
        "hashing.values",
        "hashing.split_hash",
        "nn.embedding",
        "nn.dropin_embedding",
        "nn.dropin_embedding_bag",
    ],
)
def test_examples(module: str) -> None:
    names = {"torch": torch, **vars(sparsekit), "xxh64": sparsekit.hashing.xxh64}
    result = doctest.testmod(importlib.import_module(f"sparsekit.{module}"), extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0
