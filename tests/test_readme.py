"""The README is what newcomers run first: its snippets must run and show what they say."""

import re
from pathlib import Path

import torch

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_fits_in_one_reading() -> None:
    assert len(README.splitlines()) < 150
    assert "BENCH_TABLE" not in README


def test_python_snippets_run_in_order() -> None:
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippets) == 3
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(snippet, names)

    layer, table = names["layer"], names["table"]
    assert layer(names["keys"]).shape == (1, 2, 64)
    assert layer.weight.grad.is_coalesced()
    assert layer.weight.grad._nnz() == 5
    assert len(layer.table) == 5
    assert names["out"].shape == (1, 1, 16)
    assert table.find(torch.tensor([42, -7])).tolist() == [0, 1]
    assert names["rows"].tolist() == [0, 1, 0]
    assert names["sums"].shape == (2, 4)
    assert names["codes"].shape == (3,)


def test_every_make_target_it_names_exists() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test", "wheel", "bench"} <= named
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
