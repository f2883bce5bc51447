"""The benchmarks run at toy size, so that they stay usable; no time is checked."""

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import SUITES, main
from benchmarks.common import Comparison
from benchmarks.cpu import Cpu, Side
from benchmarks.gpu import Gpu, Timing
from benchmarks.peers import native
from benchmarks.targets import CPU_TARGETS, GPU_TARGETS


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run_suite(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a suite of benchmarks; return the contents of its JSON file."""
    path = folder / "out.json"
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # installed peers may warn
        assert main(["run", *arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run all suites once; the GPU's suite is rehearsed on the CPU."""
    # Use one thread: several would spin while they wait for one another, which is slow on a busy
    # machine.
    options = {suite: ["--suite", suite, "--quick", "--threads", "1"] for suite in SUITES}
    options["gpu"] = ["--rehearse"]
    return {suite: run_suite(tmp_path_factory.mktemp(suite), *options[suite]) for suite in SUITES}


@pytest.mark.parametrize("suite", SUITES)
def test_all_run_and_write_json(quick: dict[str, dict[str, Any]], suite: str) -> None:
    run = quick[suite]
    assert run["suite"] == suite
    assert run["quick"]
    assert run["failed"] == []
    assert run["machine"]["build"]["version"]
    assert run["machine"]["commit"]
    assert len(run["results"]) >= len(SUITES[suite])
    for result in run["results"]:
        assert result["ms"] > 0
        assert result["ratio"] == pytest.approx(result["against_ms"] / result["ms"])
        assert len(result["samples"]) > 1
        assert (result["curve"] is not None) == (suite == "curves")
        if result["target"] is not None:
            assert result["met"] == (result["ratio"] >= result["target"])
    keys = [(x["case"], x["against"], x["clock"]) for x in run["results"]]
    assert len(keys) == len(set(keys))


def test_roofs(quick: dict[str, dict[str, Any]]) -> None:
    assert quick["gpu"]["machine"]["r1_bytes_per_s"] > 0
    assert quick["gpu"]["machine"]["r2_lines_per_s"]
    assert min(quick["cpu"]["machine"]["r1_bytes_per_s"].values()) > 0
    for suite in "cpu", "gpu", "curves":
        assert {"R1", "R2"} <= {x["against"] for x in quick[suite]["results"]}


def measured(*runs: dict[str, Any]) -> set[tuple[str, str]]:
    rows = [result for run in runs for result in run["results"]]
    return {(x["line"], x["against"]) for x in rows if x["target"] is not None}


def test_every_target_is_measured(quick: dict[str, dict[str, Any]]) -> None:
    assert measured(quick["gpu"]) == set(GPU_TARGETS)
    skipped = quick["cpu"]["skipped"] | quick["dist"]["skipped"]
    expected = {(line, against) for line, against in CPU_TARGETS if against not in skipped}
    assert measured(quick["cpu"], quick["dist"]) == expected
    # Each reason explains how to get the peer, and only optional peers are skipped.
    assert all("install" in reason or "compile" in reason for reason in skipped.values())
    assert not {against for _, against in CPU_TARGETS if "torch" in against} & set(skipped)


def test_what_is_missing_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.peers.optional.find_spec", lambda module: None)
    assert main(["run", "unique", "xxh64", "--quick"]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("skipped")]
    assert lines == [
        f"skipped: {peer}: {package} is not installed (pip install {package}, or make bench)"
        for peer, package in (
            ("pandas.factorize", "pandas"),
            ("loop over xxhash", "xxhash"),
            ("Arrow", "pyarrow"),
        )
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "no_such"], r"suite cpu has no benchmark \['no_such'\]; it has \['hash_table'"),
        (["run", "ranks"], "suite cpu has no benchmark"),
        (["run", "--suite", "tpu"], "invalid choice: 'tpu'"),
        (["run", "--threads", "0"], "0 is not at least 1"),
        (["run", "--json", "/no/such/folder/x.json"], "there is no such folder"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["run", "--suite", "gpu"])
    assert "torch finds no GPU" in capsys.readouterr().err


def test_a_failure_is_reported_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(gpu: Gpu) -> Iterator[Comparison]:
        yield gpu.against_r1("half a benchmark", Timing([2.0], [2.0]), 1, "bucketize")
        raise RuntimeError("no such luck")

    monkeypatch.setitem(SUITES["gpu"], "unique", broken)
    path = tmp_path / "out.json"
    assert main(["run", "--rehearse", "unique", "init_rows", "--json", str(path)]) == 1
    written = json.loads(path.read_text())
    assert written["failed"] == ["unique"]
    assert written["results"][0]["met"] is False
    assert any(result["case"].startswith("init_rows_") for result in written["results"])
    captured = capsys.readouterr()
    assert "NOT MET" in captured.out
    assert "no such luck" in captured.err


# ---- the CPU's clock ----


def test_sides_take_turns_and_inputs_rotate() -> None:
    calls: list[tuple[str, int]] = []

    def side(name: str) -> Side:
        return Side(
            [lambda i=i: calls.append((name, i)) for i in range(4)],
            lambda: calls.append((name, -1)),
        )

    times = Cpu(quick=True, threads=1).time([side("a"), side("b")])
    assert [len(x) for x in times] == [3, 3]
    assert all(i == -1 for _, i in calls[::2])  # set up before each call
    turns = calls[1::2]
    assert [name for name, _ in turns] == ["a"] * 2 + ["b"] * 2 + ["a", "b"] * 3
    assert turns[4:] == [("a", 0), ("b", 2), ("a", 1), ("b", 3), ("a", 2), ("b", 0)]


def test_threads_are_set_for_a_case_alone() -> None:
    cpu = Cpu(quick=True, threads=2)
    seen: list[int] = []
    calls = [lambda: seen.append(torch.get_num_threads())]
    list(cpu.compare("one", calls, {}, threads=1))
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2


def test_a_line_that_is_misspelt_is_an_error() -> None:
    with pytest.raises(KeyError, match="uniqe"):
        list(Cpu(quick=True).compare("x", [list], {"clone": [list]}, "uniqe"))


def test_more_copies_of_smaller_inputs() -> None:
    cpu = Cpu()
    assert cpu.copies(1) == 24
    assert cpu.copies(1 << 40) == 2
    assert cpu.copies(cpu.cache_bytes // 5) * (cpu.cache_bytes // 5) >= cpu.cache_bytes


# ---- the peers in C++ ----


def test_gather_reads_every_line() -> None:
    if native.missing("gather"):
        pytest.skip(f"R2's own loop: {native.missing('gather')}")
    for huge in (False, True):
        array = native.pages(64 * 100, huge).view(torch.int64).view(100, 8)
        assert not array.any()
        array[:, 3] = torch.arange(100)
        keys = torch.randint(0, 100, (77,))
        assert native.gather(array, keys) == int(keys.sum())


def test_flat_map() -> None:
    if native.missing("flat_map"):
        pytest.skip(f"boost: {native.missing('flat_map')}")
    flat_map = native.FlatMap(10)
    for _ in range(2):
        assert flat_map.emplace(torch.tensor([5, -7, 5])).tolist() == [0, 1, 0]
        assert flat_map.find(torch.tensor([-7, 6, 5])).tolist() == [1, -1, 0]
        flat_map.clear()


def test_a_peer_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in "missing", "_library":
        getattr(native, name).cache_clear()
    monkeypatch.setattr(native, "HERE", tmp_path)
    (tmp_path / "gather.cpp").write_text("no C++")
    try:
        if native._compiler() is None:
            pytest.skip("there is no C++ compiler to refuse it")
        assert re.search("gather.cpp did not compile: .*error", native.missing("gather") or "")
        monkeypatch.setenv("CXX", "/no/such/compiler")
        native.missing.cache_clear()
        assert "there is no C++ compiler" in (native.missing("gather") or "")
    finally:
        for name in "missing", "_library":
            getattr(native, name).cache_clear()


# ---- the GPU's clock ----


def test_a_device_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's timer works with a stand-in for a device, whose events are always 3 ms apart."""

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
    assert timing.events == [3.0] * gpu.repeats
    assert max(timing.wall) < 3.0
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
