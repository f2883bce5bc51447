"""Tests of the reports on benchmark results: comparisons of two runs, tables, plots."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots, report
from benchmarks.__main__ import main
from benchmarks.common import Comparison
from benchmarks.targets import CPU_TARGETS

DOC = Path(__file__).parent.parent / "docs" / "performance.md"


def synthetic(factor: float = 1.0, peer: float = 1.0, noise: float = 0.02) -> dict[str, Any]:
    """Return a run of two cases; our times and the peers' times are multiplied by factors."""
    wiggle = [1 + noise * x for x in (0, 1, -1, 2, -2, 1, -1)]
    rows = [
        Comparison(
            case, against, [ours * factor * x for x in wiggle],
            [ours * ratio * peer] * 7, "unique", 3.0,
        ).row() | {"benchmark": "unique"}
        for case, ours in (("unique a", 1.0), ("unique b", 20.0))
        for against, ratio in (("torch.unique", 4.0), ("np.unique", 9.0), ("R1", 0.1))
    ]  # fmt: skip
    machine = {
        "cpu": "x",
        "commit": "c0ffee",
        "torch": "2",
        "threads": 2,
        "packages": {"numpy": "2"},
    }
    return {"suite": "cpu", "quick": False, "machine": machine, "skipped": {}, "results": rows}


def written(folder: Path, name: str, run: dict[str, Any]) -> str:
    path = folder / name
    path.write_text(json.dumps(run))
    return str(path)


@pytest.mark.parametrize(
    ("after", "slower"),
    [
        (synthetic(), 0),
        (synthetic(1.3), 2),
        (synthetic(1.3, noise=0.03), 2),
        (synthetic(1.3, peer=1.3), 0),  # the machine is slower, not our code
        (synthetic(1.0, peer=0.75), 0),  # peers happen to be quicker
        (synthetic(0.7), 0),
        (synthetic(1.1), 0),  # below the threshold
        (synthetic(1.3, noise=0.3), 0),  # within the noise
    ],
)
def test_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: dict[str, Any], slower: int
) -> None:
    files = written(tmp_path, "a.json", synthetic()), written(tmp_path, "b.json", after)
    assert main(["compare", *files]) == (1 if slower else 0)
    output = capsys.readouterr().out
    assert output.count("SLOWER") == slower
    assert f"slower: {slower} of 2 cases" in output


def test_compare_flags_the_one_that_is_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = copy.deepcopy(synthetic())
    for row in after["results"]:
        if row["case"] == "unique b":
            row["ms"] *= 1.3
            row["samples"] = [1.3 * x for x in row["samples"]]
    files = written(tmp_path, "a.json", synthetic()), written(tmp_path, "b.json", after)
    assert main(["compare", *files]) == 1
    flagged = [x for x in capsys.readouterr().out.splitlines() if "SLOWER" in x]
    assert len(flagged) == 1
    assert flagged[0].startswith("unique b ")
    assert main(["compare", *files, "--threshold", "0.4"]) == 0


def many(factor: float) -> dict[str, Any]:
    """Return a run of five cases, each too noisy to show the change; all five together show it."""
    run = synthetic(noise=0.2)
    one, changes = run["results"][0], (0.9, 1.02, 1.0, 0.97, 1.05)
    run["results"] = [
        one
        | {"case": f"case {i}", "ms": one["ms"] * factor * change}
        | {"samples": [x * factor * change for x in one["samples"]]}
        for i, change in enumerate(changes if factor > 1 else [1] * 5)
    ]
    return run


def test_compare_sees_in_all_cases_what_none_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = written(tmp_path, "a.json", many(1.0))
    assert main(["compare", a, written(tmp_path, "b.json", many(1.3))]) == 1
    output = capsys.readouterr().out
    assert "slower: 0 of 5 cases, 1 of 1 benchmarks" in output
    assert re.search(r"unique, 5 cases .*SLOWER", output)
    assert main(["compare", a, written(tmp_path, "c.json", many(1.01))]) == 0


def test_compare_needs_runs_of_one_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = written(tmp_path, "a.json", synthetic())
    b = written(tmp_path, "b.json", synthetic() | {"suite": "dist"})
    assert main(["compare", a, b]) == 2
    assert "differ in suite" in capsys.readouterr().err
    renamed = synthetic()
    for row in renamed["results"]:
        row["case"] = row["case"].replace("unique b", "unique c")
    c = written(tmp_path, "c.json", renamed)
    assert main(["compare", a, c]) == 0
    output = capsys.readouterr().out
    assert re.search(r"unique b .*only before", output)
    assert re.search(r"unique c .*only after", output)


def test_table_of_three_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        written(tmp_path, f"{i}.json", synthetic(factor)) for i, factor in enumerate((1, 2, 1.25))
    ]
    assert main(["table", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [x for x in lines if x.startswith("| unique | torch.unique |")]
    assert "≥ 3.00x" in row
    assert "**3.20x** (4.00, 2.00, 3.20)" in row  # the median, not the mean
    assert "| 2 of 2 | met" in row
    (row,) = [x for x in lines if x.startswith("| unique | pandas.factorize |")]
    assert "not measured" in row
    assert any("c0ffee" in x for x in lines)
    assert any(x.startswith("| unique b |") and "np.unique 7.20" in x for x in lines)


def test_table_goes_into_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "doc.md"
    run = written(tmp_path, "a.json", synthetic())
    document.write_text("no place")
    assert main(["table", run, "--into", str(document)]) == 2
    assert report.BEGIN in capsys.readouterr().err
    document.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):
        assert main(["table", run, "--into", str(document)]) == 0
        text = document.read_text()
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert "old" not in text
        assert text.count("| unique | torch.unique |") == 1


def test_the_documents_table_has_a_row_for_each_target() -> None:
    table = DOC.read_text().partition(report.BEGIN)[2].partition(report.END)[0]
    for line, against in CPU_TARGETS:
        assert f"| {line} | {against} |" in table


def test_what_is_kept_makes_the_same_table_in_a_line_for_each_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    run = written(tmp_path, "a.json", synthetic())
    assert main(["keep", run, "--out", str(kept)]) == 0
    brief = str(kept / "a.json")
    tables = []
    for file in (run, brief):
        assert main(["table", file]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    lines = Path(brief).read_text().splitlines()
    assert sum('"case"' in line for line in lines) == len(synthetic()["results"])
    assert "samples" not in Path(brief).read_text()
    assert main(["compare", run, brief]) == 2
    assert "which `keep` leaves out" in capsys.readouterr().err


def test_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if plots.missing():
        with pytest.raises(SystemExit):
            main(["plot", "curves.json"])
        assert "matplotlib is not installed (pip install" in capsys.readouterr().err
        pytest.skip(f"no plot can be made: {plots.missing()}")
    file = tmp_path / "curves.json"
    assert main(["run", "load", "unique", "--suite", "curves", "--quick", "--json", str(file)]) == 0
    assert main(["plot", str(file), "--out", str(tmp_path / "png")]) == 0
    plotted = {path.name for path in (tmp_path / "png").glob("*.png")}
    assert plotted == {"find-by-load.png", "unique.png", "unique-by-duplication.png"}
    assert main(["plot", written(tmp_path, "cpu.json", synthetic())]) == 2
    assert "no curves" in capsys.readouterr().err


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    for text, message in (
        (None, "No such file"),
        ("{", "is no JSON"),
        ("[1]", "was not written by"),
        ('{"suite": "cpu"}', "was not written by"),
    ):
        if text is not None:
            other.write_text(text)
        for command in (["compare", str(other), str(other)], ["table", str(other)]):
            assert main(command) == 2
            error = capsys.readouterr().err
            assert message in error
            assert "other.json" in error
