"""Formats results as verdicts and tables, and finds slowdowns between two runs."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .targets import TARGETS

Run = dict[str, Any]
Row = dict[str, Any]
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


class ReportError(Exception):
    """Raised if a file cannot be used: it was not written by `run`, or the runs do not match."""


def read(path: Path) -> Run:
    """Read a run written by `run --json`."""
    try:
        run = json.loads(path.read_text())
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ReportError(f"{path} is no JSON: {error}") from None
    if not isinstance(run, dict) or not {"suite", "machine", "results"} <= set(run):
        raise ReportError(f"{path} was not written by `run --json`")
    return run


def brief(run: Run) -> str:
    """Format a run as JSON for tables and plots: one line per result, without samples."""
    head = json.dumps({name: value for name, value in run.items() if name != "results"}, indent=1)
    samples = ("samples", "against_samples")
    rows = [{name: each[name] for name in each if name not in samples} for each in run["results"]]
    lines = ",\n".join(map(json.dumps, rows))
    return f'{head[:-2]},\n "results": [\n{lines}\n ]\n}}\n'


def title(suite: str, machine: dict[str, Any], quick: bool) -> str:
    """Return the header line of a suite's output."""
    build = machine["build"]
    threads = f", {machine['threads']} threads" if "threads" in machine else ""
    toy = ": TOY SIZES, no time means anything" if quick else ""
    return (
        f"suite {suite}{toy}; {machine.get('device', machine['cpu'])}{threads}, torch "
        f"{machine['torch']}, sparsekit {build['version']} at {machine['commit']}"
    )


def _by_line(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["target"] is not None:
            lines.setdefault((row["line"], row["against"]), []).append(row)
    return lines


def verdicts(rows: Iterable[Row]) -> str:
    """Format the worst and the median ratio of each target's cases as a table."""
    lines = [f"{'line':<42}{'against':<32}{'worst':>8}{'median':>8}{'target':>8}{'cases met':>12}"]
    met = 0
    for (line, against), cases in (groups := _by_line(rows)).items():
        ratios = [row["ratio"] for row in cases]
        good = sum(row["met"] for row in cases)
        met += good == len(cases)
        lines.append(
            f"{line:<42}{against:<32}{min(ratios):>7.2f}x{statistics.median(ratios):>7.2f}x"
            f"{cases[0]['target']:>7.2f}x{f'{good} of {len(cases)}':>12}"
        )
    return "\n".join([*lines, f"{met} of {len(groups)} targets met"]) if groups else "no targets"


# ---- two runs ----


def compare(before: Run, after: Run, threshold: float) -> tuple[list[str], list[str]]:
    """Return a line about the change in each case, and the names of slower cases and benchmarks.

    The measure is our time divided by the peer's time, because machine speed drifts and both were
    timed alternately. If there are several peers, the median change is used. If both runs used the
    same processor, our time alone must also have changed by half of the threshold; otherwise a peer
    that happened to run faster would make us look slower.

    A case is slower if this quotient has grown by more than the threshold, and its new lower
    quartile is above its old upper quartile. All cases of a benchmark together can reveal a change
    that noise hides in each of them: a benchmark is slower if the median of its cases has grown by
    more than the threshold, and three quarters of them by more than half of the threshold.
    """
    for what in ("suite", "quick"):
        if before.get(what) != after.get(what):
            raise ReportError(f"the runs differ in {what}, so nothing can be compared")
    if any("samples" not in row for row in (*before["results"], *after["results"])):
        raise ReportError("compare needs the samples of `run --json`, which `keep` leaves out")
    lines, slower = [], []
    same = all(before["machine"].get(x) == after["machine"].get(x) for x in ("cpu", "device"))
    if not same:
        lines.append("different processors: only ratios to roofs and peers are judged")
    old, new = _by_case(before), _by_case(after)
    limit, half = 1 + threshold, 1 + threshold / 2
    groups: dict[str, list[tuple[float, float]]] = {}
    for case in (case for case in old if case in new):
        pairs = [(old[case][x], new[case][x]) for x in old[case] if x in new[case]]
        # Ignore roofs that were not timed alternately with our calls, unless there is nothing else.
        pairs = [x for x in pairs if all(map(_in_turns, x))] or pairs
        if not pairs:
            continue
        changes = sorted((_change(a, b), a["against"]) for a, b in pairs)
        (change, low, high), against = changes[(len(changes) - 1) // 2]
        time = statistics.median(b["ms"] / a["ms"] for a, b in pairs)
        groups.setdefault(pairs[0][0]["benchmark"], []).append((change, time))
        verdict = ""
        if change > limit and low > 1 and (time > half or not same):
            verdict = "  SLOWER"
            slower.append(case)
        elif change < 1 / limit and high < 1 and (time < 1 / half or not same):
            verdict = "  faster"
        lines.append(f"{case:<80}{time:>7.2f} time{change:>7.2f} vs {against}{verdict}")
    judged = len(lines) - (not same)
    lines.sort(key=lambda line: "SLOWER" in line)  # slower cases last, where readers notice them
    for name, cases in groups.items():
        change, time = (statistics.median(x[i] for x in cases) for i in range(2))
        verdict = ""
        if len(cases) > 2 and change > limit and (time > half or not same):
            grown = sum(x[0] > half for x in cases)
            if grown >= 0.75 * len(cases):
                verdict = "  SLOWER"
                slower.append(name)
        what = f"{name}, {len(cases)} cases"
        lines.append(f"{what:<80}{time:>7.2f} time{change:>7.2f} in the middle{verdict}")
    lines += [f"{case:<80} only before" for case in old if case not in new]
    lines += [f"{case:<80} only after" for case in new if case not in old]
    cases_slower = sum(case not in groups for case in slower)
    lines.append(
        f"slower: {cases_slower} of {judged} cases, {len(slower) - cases_slower} of {len(groups)} "
        f"benchmarks as a whole"
    )
    return lines, slower


def _by_case(run: Run) -> dict[str, dict[str, Row]]:
    cases: dict[str, dict[str, Row]] = {}
    for row in run["results"]:
        clock = "" if row["clock"] == "wall" else f" [{row['clock']}]"
        cases.setdefault(f"{row['case']}{clock}", {})[row["against"]] = row
    return cases


def _in_turns(row: Row) -> bool:
    return row["against"] != "R1" and len(row["samples"]) == len(row["against_samples"])


def _change(before: Row, after: Row) -> tuple[float, float, float]:
    """Return the new median of `_quotients` divided by the old; bounds use opposite quartiles."""
    old, new = _quotients(before), _quotients(after)
    (a25, a50, a75), (b25, b50, b75) = (statistics.quantiles(x, n=4) for x in (old, new))
    return b50 / a50, b25 / a75, b75 / a25


def _quotients(row: Row) -> list[float]:
    """Divide our samples pairwise by the peer's, or by the peer's median if the counts differ."""
    ours, theirs = row["samples"], row["against_samples"]
    if len(ours) != len(theirs):
        theirs = [statistics.median(theirs)] * len(ours)
    quotients = [a / b for a, b in zip(ours, theirs, strict=True)]
    return quotients if len(quotients) > 1 else quotients * 2


# ---- tables ----


def table(runs: Sequence[Run]) -> str:
    """Format runs as two Markdown tables of medians, one for all targets and one for all cases."""
    suites = {"gpu" if run["suite"] == "gpu" else "cpu" for run in runs} or {"cpu"}
    lines = _stamps(runs)
    lines += [
        "| what | against | target | worst case: median (each run) | spread ours / theirs "
        "| median case | cases met | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [_by_line(run["results"]) for run in runs]
    for suite in sorted(suites):
        for (line, against), target in TARGETS[suite].items():
            of_runs = [x[line, against] for x in rows if (line, against) in x]
            cells = _cells(of_runs, target, runs, against)
            lines.append(f"| {line} | {against} | ≥ {target:.2f}x | {cells} |")
    lines += ["", *_cases(runs)] if runs else []
    return "\n".join(lines)


def _stamps(runs: Sequence[Run]) -> list[str]:
    stamps: dict[str, None] = {}  # used as an ordered set
    for run in runs:
        machine = run["machine"]
        packages = machine.get("packages", {}).items()
        peers = ", ".join(f"{name} {version}" for name, version in packages if version)
        toy = " TOY SIZES." if run.get("quick") else ""
        stamps[
            f"{machine.get('device', machine['cpu'])}, {machine.get('threads', 1)} threads, "
            f"torch {machine['torch']}; {peers}. Commit {machine['commit']}.{toy}"
        ] = None
    return [*stamps, ""] if stamps else []


def _cells(of_runs: list[list[Row]], target: float, runs: Sequence[Run], against: str) -> str:
    if not of_runs:
        reasons = [run["skipped"][against] for run in runs if against in run.get("skipped", {})]
        return f"not measured{': ' + reasons[0] if reasons else ''} | | | | "
    cases: dict[str, list[Row]] = {}
    for rows in of_runs:
        for row in rows:
            cases.setdefault(row["case"], []).append(row)
    ratios = {case: _median(rows, "ratio") for case, rows in cases.items()}
    worst = min(ratios, key=lambda case: ratios[case])
    each = ", ".join(f"{row['ratio']:.2f}" for row in cases[worst])
    met = sum(ratio >= target for ratio in ratios.values())
    name = f"; {worst}" if len(cases) > 1 else ""
    return (
        f"**{ratios[worst]:.2f}x** ({each}){name} "
        f"| {_median(cases[worst], 'spread'):.0%} / {_median(cases[worst], 'against_spread'):.0%} "
        f"| {statistics.median(ratios.values()):.2f}x | {met} of {len(cases)} "
        f"| {'met' if met == len(cases) else 'not met'}"
    )


def _cases(runs: Sequence[Run]) -> list[str]:
    cases: dict[str, dict[str, list[Row]]] = {}
    for run in runs:
        for row in run["results"]:
            case = f"{row['case']}{'' if row['clock'] == 'wall' else ' [' + row['clock'] + ']'}"
            cases.setdefault(case, {}).setdefault(row["against"], []).append(row)
    lines = ["| case | ms | spread | times as fast as |", "|---|---|---|---|"]
    for case, by_peer in cases.items():
        rows = [row for of_peer in by_peer.values() for row in of_peer]
        ratios = [f"{peer} {_median(x, 'ratio'):.2f}" for peer, x in by_peer.items()]
        ms, spread = _median(rows, "ms"), _median(rows, "spread")
        lines.append(f"| {case} | {ms:.3g} | {spread:.0%} | {', '.join(ratios)} |")
    return lines


def _median(rows: Sequence[Row], field: str) -> float:
    return statistics.median(row[field] for row in rows)


def write_into(path: Path, text: str) -> None:
    """Replace the text between the marks BEGIN and END in a document."""
    try:
        document = path.read_text()
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ReportError(f"{path} has no {BEGIN} and {END}")
    path.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")
