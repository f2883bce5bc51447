"""The benchmarks run at toy size, so that they do not rot; no time is judged here."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import BENCHMARKS, GPU_BENCHMARKS, main
from benchmarks.gpu import TARGETS, Comparison, Gpu, Timing


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


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the GPU's benchmarks write when they run on the CPU."""
    path = tmp_path_factory.mktemp("gpu") / "out.json"
    assert main(["--rehearse", "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_gpu_benchmarks_run_and_write_json(rehearsal: dict[str, Any]) -> None:
    assert rehearsal["failed"] == []
    assert rehearsal["machine"]["r1_bytes_per_s"] > 0
    assert rehearsal["machine"]["r2_lines_per_s"]
    for result in rehearsal["results"]:
        assert result["ms"] > 0
        assert result["ratio"] == pytest.approx(result["against_ms"] / result["ms"])
        if result["target"] is not None:
            assert result["met"] == (result["ratio"] >= result["target"])


def test_every_target_is_measured(rehearsal: dict[str, Any]) -> None:
    judged = [result for result in rehearsal["results"] if result["target"] is not None]
    seen = {(result["against"], result["target"]) for result in judged}
    assert seen == {(against, target) for (_, against), target in TARGETS.items()}


def test_a_failure_is_reported_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(gpu: Gpu) -> Iterator[Comparison]:
        yield gpu.against_r1("half a benchmark", Timing(2.0, 0.0, 2.0, 0.0), 1, "bucketize")
        raise RuntimeError("no such luck")

    monkeypatch.setitem(GPU_BENCHMARKS, "unique", broken)
    path = tmp_path / "out.json"
    assert main(["--rehearse", "unique", "init_rows", "--json", str(path)]) == 1
    written = json.loads(path.read_text())
    assert written["failed"] == ["unique"]
    assert written["results"][0]["met"] is False
    assert any(result["case"].startswith("init_rows_") for result in written["results"])
    captured = capsys.readouterr()
    assert "NOT MET" in captured.out
    assert "no such luck" in captured.err


def test_a_device_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one part that the rehearsal replaces, against a device that takes 3 ms for all."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

        def elapsed_time(self, end: "Event") -> float:
            return 3.0

    calls: list[str] = []
    gpu = Gpu(torch.device("cpu"), quick=True)
    monkeypatch.setattr(gpu, "on_gpu", True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait for all"))
    timing = gpu.time(lambda: calls.append("run"), lambda: calls.append("set up"))
    assert (timing.ms, timing.spread) == (3.0, 0.0)
    assert timing.wall_ms < 3.0
    warm, timed = ["set up", "run"], ["set up", "record", "run", "record", "wait"]
    by_wall = ["set up", "wait for all", "run", "wait for all"]
    assert calls == 2 * warm + gpu.repeats * timed + gpu.repeats * by_wall


def test_sizes_shrink_to_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(torch.device("cpu"), quick=True)
    monkeypatch.setattr(gpu, "on_gpu", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert gpu.fit(100, 8) == 100
    assert gpu.fit(101, 8) == 50
    assert gpu.fit(10**9, 1) * 1 <= 800
