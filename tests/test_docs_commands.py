"""Commands in the README and the docs are valid as printed, and the quick ones run."""

import argparse
import contextlib
import io
import itertools
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.__main__ import _parser as parser_of_benchmarks
from sparsekit import cli
from sparsekit.cli import train
from sparsekit.cli.dispatch import make_parser
from sparsekit.data import write_criteo_sample

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHANGELOG = ROOT / "CHANGELOG.md"
LAUNCHER = re.compile(r"^torchrun .*? -m ")


def printed(page: Path) -> list[str]:
    """Return the lines of a page's code blocks without a language, with continued lines joined."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = (
        "\n".join(text for language, text in blocks if not language)
        .replace("\\\n", " ")
        .splitlines()
    )
    return [line.partition(" # ")[0].strip() for line in lines]


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of each `sparsekit` command on the page, without redirections."""
    lines = [LAUNCHER.sub("", line).partition(" > ")[0] for line in printed(page)]
    return [shlex.split(line)[1:] for line in lines if line.startswith("sparsekit ")]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse arguments as the command line does."""
    if arguments[0] == "bench":
        return parser_of_benchmarks("sparsekit bench").parse_args(arguments[1:])
    if arguments[0] == "train":
        arguments = ["train", *train.with_model(arguments[1:])]
    return make_parser().parse_args(arguments)


def test_there_are_commands_to_check() -> None:
    assert len([each for page in PAGES for each in commands(page)]) >= 25
    assert any(line.startswith("torchrun") for line in printed(ROOT / "docs" / "training.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_blocks_are_understood(page: Path) -> None:
    for arguments in commands(page):
        message = io.StringIO()
        with contextlib.redirect_stderr(message):
            try:
                parse(arguments)
            except SystemExit:
                pytest.fail(f"{page.name}: sparsekit {' '.join(arguments)}: {message.getvalue()}")


def known(arguments: list[str]) -> bool:
    """Return whether a part of a command line names existing commands and options."""
    if arguments[:1] == ["bench"]:
        parser: argparse.ArgumentParser = parser_of_benchmarks("sparsekit bench")
        arguments = arguments[1:]
    else:
        parser = make_parser()
        if arguments[:1] == ["train"] and len(arguments) > 1:
            arguments = ["train", *train.with_model(arguments[1:])]
    for word in arguments:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
                break
        else:
            if word.startswith("-"):
                if word.partition("=")[0] not in parser._option_string_actions:
                    return False
            elif re.fullmatch("[a-z]+", word) and parser._subparsers is not None:
                return False
    return True


@pytest.mark.parametrize("page", [*PAGES, CHANGELOG], ids=lambda page: page.name)
def test_commands_in_sentences_are_there(page: Path) -> None:
    found = re.findall(r"`sparsekit ([^`]+)`", page.read_text())
    for text in found:
        # A word may list alternatives, such as dlrm|deepfm.
        words = [word.split("|") for word in text.replace("…", "").split()]
        for each in itertools.product(*words):
            assert known(list(each)), f"{page.name}: sparsekit {text}"


@pytest.mark.parametrize("page", [*PAGES, CHANGELOG], ids=lambda page: page.name)
def test_targets_of_make_are_there(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    assert set(named) <= set(targets)


def test_commands_on_files_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("pyarrow", "yaml", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    rows = [f"user {i % 9},{i % 7},{i % 5}.5,{i % 2}" for i in range(60)]
    Path("clicks.csv").write_text("\n".join(["user,item,price,click", *rows]) + "\n")
    for name in ("day_0", "day_0.gz", "day_0.tsv", "day_1.gz"):
        write_criteo_sample(name, rows=60)
    pages = [commands(ROOT / "docs" / f"{n}.md") for n in ("data", "training", "capacity")]
    small = ["--ranks", "1", "--set", "model.rows=5000", "--set", "model.dim=4"]
    ran = 0
    for command in itertools.chain(*pages):
        if command[0] == "train" and ("--data" in command or "--show-config" in command):
            command = [*command, *small]
        elif command[0] not in ("hash", "plot", "predict", "capacity"):
            continue  # needs other data or takes long; other tests cover it
        assert cli.main(command) == 0, command
        ran += 1
    assert ran == 11
    assert "model:" in capsys.readouterr().out  # printed by --show-config
    for written in (
        "clicks.parquet",
        "day_0.parquet",
        "run/metrics.jsonl",
        "run/plot.png",
        "predictions.txt",
        "capacity.json",
        "capacity.png",
    ):
        assert Path(written).stat().st_size > 100
