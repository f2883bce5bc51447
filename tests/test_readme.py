"""Snippets in the README and the docs run and print the output shown: newcomers try them first."""

import re
from pathlib import Path

import pytest
import torch

# torch.distributed.checkpoint warns on a single process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable")

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_fits_in_one_reading() -> None:
    assert len(README.splitlines()) < 150
    assert "BENCH_TABLE" not in README


def snippets(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(text: str, names: dict[str, object]) -> None:
    for snippet in snippets(text):
        exec(snippet, names)


def test_python_snippets_run_in_order() -> None:
    assert len(snippets(README)) == 4
    names: dict[str, object] = {}
    run(README, names)

    layer, slots, table = names["layer"], names["slots"], names["table"]
    # The first example has trained its model.
    assert names["loss"] < 0.5
    assert layer(names["ids"]).shape == (2, 64)
    assert layer.weight.grad.is_coalesced()
    assert layer.weight.grad._nnz() == 5
    assert len(layer.table) == 5
    assert slots(names["keys"]).shape == (1, 2, 64)
    assert names["out"].shape == (1, 1, 16)
    assert table.find(torch.tensor([42, -7])).tolist() == [0, 1]
    assert names["rows"].tolist() == [0, 1, 0]
    assert names["sums"].shape == (2, 4)
    assert names["codes"].shape == (3,)


def test_the_first_example_is_one_line_away_from_torch() -> None:
    """The example also trains with the line that is commented out."""
    first = snippets(README)[0]
    theirs = re.search(r"^# (layer = torch\.nn\..*)$", first, re.MULTILINE)
    assert theirs
    swapped = re.sub(r"^layer = sparsekit.*$", theirs[1], first, flags=re.MULTILINE)
    swapped = swapped.replace("[10**18, 0, 3]", "[8, 0, 3]").replace("-1", "1")
    swapped = swapped.replace("1_000_000", "1000")
    swapped = re.sub(r"^len\(layer.table\).*$", "", swapped, flags=re.MULTILINE)
    names: dict[str, object] = {}
    exec(swapped, names)
    assert isinstance(names["layer"], torch.nn.EmbeddingBag)
    assert names["loss"] < 0.5


# For each page: definitions that its first example assumes.
GIVEN = {
    "optimizers.md": """
import torch, sparsekit
layer = sparsekit.Embedding(100, 4)
loss = layer(torch.arange(3)).sum()
""",
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_of_the_docs_run(
    page: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the snippets write files here
    text = page.read_text()
    names: dict[str, object] = {}
    exec(GIVEN.get(page.name, ""), names)
    run(text, names)
    # The snippets show their output as comments.
    commented = {line.removeprefix("# ") for line in text.splitlines()}
    assert set(capsys.readouterr().out.splitlines()) <= commented


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_shapes_in_the_docs_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a line in the docs ends in a comment with a shape, the line's result has this shape."""
    monkeypatch.chdir(tmp_path)
    found = 0
    for page in PAGES:
        names: dict[str, object] = {}
        exec(GIVEN.get(page.name, ""), names)
        for snippet in snippets(page.read_text()):
            exec(snippet, names)
            for line, shape in re.findall(r"^(.*\.shape) +# (\[.*\])$", snippet, re.MULTILINE):
                assert str(list(eval(line, names))) == shape, line
                found += 1
    assert found >= 3


def test_every_make_target_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test", "wheel", "bench"} <= named
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
