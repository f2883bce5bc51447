"""A mistyped command gives exit code 2 and a one-line error that suggests the intended word."""

import re
from types import SimpleNamespace

import pytest

from sparsekit import cli
from sparsekit.cli import ranks
from sparsekit.cli.common import EXPECTED
from sparsekit.errors import DivergedError
from sparsekit.recipes.ratings import command as train_ratings
from sparsekit.train.launch import RankError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Create the folder in which commands run."""
    (tmp_path / "clicks.csv").write_text("user,item,click\na,b,1\nc,d,0\n")
    (tmp_path / "empty.csv").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "metrics.jsonl").write_text('{"kind": "step"}\n')
    (tmp_path / "linked").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(capsys, command):
    """Run a command that must fail; return its error message."""
    try:
        code = cli.main(command.split())
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.count("\n") == 1, error
    return error


CLICKS = "--ranks 1 --epochs 1 --set data.sparse=user --set data.label=click"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        # Misspelt options and words: the message names their command and suggests only this
        # command's options.
        ("--verison", r"^sparsekit: unrecognized arguments: --verison; did you mean --version\?"),
        ("train dlrm --confg x", r"^sparsekit train dlrm: .*; did you mean --config\? .*dlrm -"),
        ("profile dlrm --trce x", r"^sparsekit profile dlrm: .*; did you mean --trace\?"),
        ("info extra", r"^sparsekit info: unrecognized arguments: extra \(see"),
        ("info --x", r"^sparsekit info: unrecognized arguments: --x \(see"),
        ("bench", r"^sparsekit bench: the following arguments are required"),
        ("bench rn", r"^sparsekit bench: .*; did you mean run\?"),
        ("bench run --suite cpuu", r"^sparsekit bench run: .*; did you mean cpu\?"),
        ("train autoencoder --original --dim 5", "--dim 5: --original has layers of its own"),
        # Files that do not exist.
        ("train ratings --data clciks.csv", r"No such file.*; did you mean clicks\.csv\?"),
        ("train wide --data clicks.cvs", r"No such file.*; did you mean clicks\.csv\?"),
        ("train deepconn --data click.csv", r"No such file.*; did you mean clicks\.csv\?"),
        (f"train dlrm --data click.csv {CLICKS}", r"does not exist; did you mean clicks\.csv\?"),
        ("train dlrm --config ../nowhere.yaml", r"nowhere\.yaml: No such file or directory$"),
        ("recommend cliks.csv", r"No such file.*; did you mean clicks\.csv\?"),
        ("hash clics.csv --out x.parquet", r"No such file.*; did you mean clicks\.csv\?"),
        ("plot rnus", r"rnus/metrics\.jsonl: No such file.*; did you mean runs\?"),
        ("train ratings --data linked", r"linked: No such file or directory$"),
        ("plot .", r"metrics\.jsonl: No such file or directory$"),
        # Files and folders of the wrong kind.
        ("hash runs --out x.parquet --format csv", "runs: Is a directory"),
        ("recommend runs", r"^sparsekit: runs: is a folder; needed is the file that .*autoencoder"),
        ("train ratings --save runs/metrics.jsonl --log-to runs", r"is the file of --log-to;"),
        ("plot runs", r"metrics\.jsonl:1: no record of training"),
        (f"train dlrm --data empty.csv {CLICKS}", r"empty\.csv is empty"),
        (f"train dlrm --data clicks.csv {CLICKS} --log-to linked", "--log-to linked: "),
    ],
)  # fmt: skip
def test_one_line(command, message, folder, capsys):
    assert re.search(message, error_of(capsys, command))


COMMON = f"--ranks 0|--ranks 1025|--threads 0|--threads 1025|--seed -1|--seed {2**63}|--epochs 0"
COMMON += f"|--epochs {2**31}|--checkpoint-every 0|--keep 0"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "train ratings --data none",
            f"{COMMON}|--batch-size 0|--dim 0|--lr 0|--lr 1e13|--capacity 0",
        ),
        ("train autoencoder --data none", f"{COMMON}|--batch-size 0|--dim 0|--dim 65537"),
        (
            "train deepconn --data none",
            f"{COMMON}|--batch-size 0|--length 3|--length 100001|--lr 0",
        ),
        ("train wide --data none", f"{COMMON}|--batch-size 0"),
        ("train dlrm --data none", COMMON),
        ("profile dlrm --data none", "--steps 0|--lines 0"),
        ("scaling", "--threads 0|--tables 0|--rows 0|--dim 0|--batch 0"),
        ("checkpoint reshard none out", "--world 0|--world 4097"),
        ("checkpoint forget none", f"--keys {2**63}|--keys {-(2**63) - 1}"),
        ("data criteo-sample --out out/none", "--rows -1|--rows 1 --seed -1"),
        ("recommend none", "--k 0|--show -1"),
        ("hash none --out out/none", f"--seed -1|--seed {2**64}"),
    ],
)
def test_numbers_out_of_their_range(command, options, folder, capsys):
    for option in options.split("|"):
        *_, name, value = option.split()
        error = error_of(capsys, f"{command} {option}")
        assert re.search(rf"argument .*{name}.*: {value} is not in \[", error), option


@pytest.mark.parametrize("kind", [*EXPECTED, DivergedError, ZeroDivisionError])
def test_what_a_rank_raises_ends_as_it_would_without_ranks(kind, monkeypatch, capsys):
    def fail(world_size, *_):
        raised = {"message": f"{kind.__name__}: why: x", "extraInfo": {"py_callstack": "where\n"}}
        raise RankError(1, SimpleNamespace(exitcode=1, message=raised))

    monkeypatch.setattr(train_ratings, "load_ratings", lambda args: None)
    monkeypatch.setattr(ranks, "run_on_ranks", fail)
    assert cli.main(["train", "ratings", "--ranks", "2"]) == (2 if kind in EXPECTED else 1)
    said = "rank 1 failed\nwhere" if kind is ZeroDivisionError else "why: x"
    assert capsys.readouterr().err == f"sparsekit: {said}\n"


def test_a_record_that_is_cut_off_is_left_out(folder, capsys):
    record = (
        '{"kind": "step", "step": %d, "loss": 1, "samples_per_second": 1, '
        '"bytes_sent_per_step": 0, "tables": {}}\n'
    )
    file = folder / "runs" / "metrics.jsonl"
    file.write_text(record % 1 + record % 2 + (record % 3)[:20])
    assert cli.main(["plot", "runs"]) == 0
    assert (folder / "runs" / "plot.png").stat().st_size > 10_000
    file.write_text(record % 1 + (record % 2)[:20] + "\n" + record % 3)
    assert "metrics.jsonl:2: no record" in error_of(capsys, "plot runs")
