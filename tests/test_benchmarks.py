"""The benchmarks run at toy size, so that they do not rot; no time is judged here."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, main


def test_all_run_and_write_json(tmp_path: Path) -> None:
    main(["--quick", "--json", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["machine"]["build"]["version"]
    assert len(written["results"]) >= len(BENCHMARKS)
    for result in written["results"]:
        assert result["ms"] > 0
        assert result["ratio"] == pytest.approx(result["peer_ms"] / result["ms"])


def test_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no_such_benchmark"])
    assert "no_such_benchmark" in capsys.readouterr().err
