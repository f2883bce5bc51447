"""Tests of the command line on small generated ratings."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

import sparsekit
from sparsekit import cli
from sparsekit._arguments import Parser
from sparsekit.cli import bench, ranks, train
from sparsekit.cli.common import UsageError, writing
from sparsekit.datasets import DatasetUnavailableError, read_ratings
from sparsekit.distributed.world import settings
from sparsekit.models import RatingModel, fit_bias_baseline
from sparsekit.models import rmse as error
from sparsekit.recipes.ratings import command as train_ratings
from sparsekit.train.plots import read_run
from sparsekit.train.step import Step


@pytest.fixture
def data(tmp_path) -> Path:
    """Write 2,000 ratings; each user likes either items with even ids or items with odd ids."""
    generator = torch.Generator().manual_seed(0)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for time in range(2000):
        user, item = torch.randint(10**6, (2,), generator=generator).tolist()
        user, item = user % 50, item % 40
        rating = 5 if (user + item) % 2 else 1
        lines.append(f"{user - 10**17}\t{item * 10**14}\t{rating}\t{time}")
    path = tmp_path / "ratings.inter"
    path.write_text("\n".join(lines))
    return path


SMALL = ["--batch-size", "64", "--dim", "8", "--capacity", "100"]
# Use one rank, since starting more takes seconds. Tests of several ranks are below.
ONE = ["--ranks", "1"]


def results(output: str) -> dict[str, float]:
    rows = re.findall(r"^(\w.*?) +(\d\.\d{4})$", output, re.MULTILINE)
    return {name: float(value) for name, value in rows}


def test_train_prints_epochs_and_a_table(data, capsys):
    assert cli.main(["train", "--data", str(data), "--epochs", "6", *SMALL, *ONE]) == 0
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert "2,000 ratings; 1,6" in lines[0]
    for number in range(1, 7):
        pattern = rf"epoch {number}/6  loss \d\.\d{{4}}  test RMSE \d\.\d{{4}}  [\d,]+ samples/s"
        assert re.fullmatch(pattern, lines[number]), lines[number]
    rmse = results(output)
    assert list(rmse) == ["global mean", "user + item bias", "model"]
    train, test = read_ratings(data).split_by_time()
    mean, bias = train.ratings.mean(), fit_bias_baseline(train)
    expected = [error(mean.expand(len(test)), test.ratings)]
    expected.append(error(bias.predict(test.users, test.items), test.ratings))
    assert [rmse["global mean"], rmse["user + item bias"]] == pytest.approx(expected, abs=1e-4)
    assert rmse["model"] < 0.5 * min(rmse["global mean"], rmse["user + item bias"])
    assert f"test RMSE {rmse['model']:.4f}" in lines[6]
    assert re.fullmatch(
        r"6 epochs in [\d.]+ s; rows in the tables: user 50, item 40, rated 40", lines[-1]
    )


def test_a_file_that_cannot_be_written_in_the_end():
    message = "^--save model.pt: No space left on device$"
    with pytest.raises(UsageError, match=message), writing("--save", "model.pt"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_no_option_abbreviates_one_of_torchruns():
    """torchrun would parse an ambiguous abbreviation as its own option, even after the script."""
    models = Parser().add_subparsers()
    train.add_models(models)
    names = {name for model in models.choices.values() for name in model._names(True)}
    ours = {name for name in names if name.startswith("--")} - {"--help"}
    theirs = get_args_parser()._option_string_actions
    assert {"--save", "--set", "--log-to"} <= ours
    assert [(o, t) for o in sorted(ours) for t in theirs if t.startswith(o)] == []


def test_what_is_logged(data, tmp_path, capsys):
    folder = tmp_path / "run"
    command = ["train", "--data", str(data), "--epochs", "2", *SMALL, *ONE, "--log-to", str(folder)]
    assert cli.main(command) == 0
    epochs = [record for record in read_run(folder) if record["kind"] == "epoch"]
    shown = re.findall(r"loss ([\d.]+)  test RMSE ([\d.]+)", capsys.readouterr().out)
    assert [(f"{r['loss']:.4f}", f"{r['metrics']['test RMSE']:.4f}") for r in epochs] == shown
    assert set(epochs[0]["tables"]) == {"user", "item", "rated"}
    expect_error(capsys, ["train", "--data", "x", "--log-to", str(data)], "--log-to .*: is a file")


def test_seed_decides_the_result(data, capsys):
    def losses(*arguments):
        command = ["train", "--data", str(data), *SMALL, *ONE, "--epochs", "2", *arguments]
        assert cli.main(command) == 0
        return re.findall(r"loss ([\d.]+)  test RMSE ([\d.]+)", capsys.readouterr().out)

    assert losses("--seed", "5") == losses("--seed", "5")
    assert losses("--seed", "5") != losses("--seed", "6")
    # In a single batch the order makes no difference; the initial vectors do.
    one_batch = ["--batch-size", "2000", "--epochs", "1", "--seed"]
    assert losses(*one_batch, "5") != losses(*one_batch, "6")


@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [(None, [], [1]), ("3", [], []), ("3", ["--threads", "2"], [2])],
)
def test_number_of_threads(data, monkeypatch, environment, arguments, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    command = ["train", "--data", str(data), "--epochs", "1", *SMALL, *ONE, *arguments]
    assert cli.main(command) == 0
    assert asked == expected


@pytest.mark.parametrize(
    ("arguments", "expected"), [([], None), (["--wire-dtype", "bfloat16"], torch.bfloat16)]
)
def test_dtype_between_ranks(data, monkeypatch, arguments, expected):
    monkeypatch.setattr(settings, "wire_dtype", torch.float16)  # the command overwrites it
    command = ["train", "--data", str(data), "--epochs", "1", *SMALL, *ONE, *arguments]
    assert cli.main(command) == 0
    assert settings.wire_dtype is expected


def test_a_model_is_saved(data, tmp_path, capsys):
    saved = tmp_path / "model.pt"
    command = ["train", "--data", str(data), "--epochs", "2", *SMALL, "--save", str(saved)]
    assert cli.main([*command, *ONE]) == 0
    rmse = results(capsys.readouterr().out)["model"]
    _, test = read_ratings(data).split_by_time()
    with torch.no_grad():
        predicted = RatingModel.load(saved).eval()(test.users, test.items)
    assert error(predicted, test.ratings) == pytest.approx(rmse, abs=1e-4)
    assert [path.name for path in tmp_path.iterdir() if "model" in path.name] == ["model.pt"]


def test_where_no_model_can_be_saved(data, tmp_path, capsys):
    command = ["train", "--data", "missing", "--save"]  # fails before data are read
    expect_error(capsys, [*command, str(tmp_path / "no" / "model.pt")], "--save .*cannot write")
    expect_error(capsys, [*command, str(tmp_path)], "--save .*is a folder")
    other = tmp_path / "model.pt"
    for content in (b"", b"something else"):
        other.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.pt: no model that"):
            RatingModel.load(other)
    torch.save({"weight": torch.zeros(3)}, other)
    with pytest.raises(ValueError, match=r"model\.pt: no model that"):
        RatingModel.load(other)


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"sparsekit {sparsekit.__version__}\n"


def test_info_prints_what_build_info_says(capsys):
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{key}: {value}" for key, value in sparsekit.build_info().items()]


def expect_error(capsys, arguments: list[str], message: str) -> None:
    assert cli.main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)


def test_errors_of_files(tmp_path, capsys):
    missing = tmp_path / "missing"
    expect_error(capsys, ["train", "--data", str(missing)], "missing: No such file")
    expect_error(capsys, ["train", "--data", str(tmp_path)], "Is a directory")
    malformed = tmp_path / "malformed"
    malformed.write_text("a\tb\tc\td\n")
    expect_error(capsys, ["train", "--data", str(malformed)], "malformed:1: the header")
    header = "user_id\titem_id\trating\ttimestamp\n"
    malformed.write_text(header + "1\t2\t3\t4\n" * 4)
    expect_error(capsys, ["train", "--data", str(malformed)], "no user has the 5 ratings")


def test_unavailable_data(monkeypatch, capsys):
    def unavailable(data):
        raise DatasetUnavailableError("cannot be had; use --data FILE")

    monkeypatch.setattr(train_ratings, "movielens_100k", unavailable)
    expect_error(capsys, ["train"], "^sparsekit: cannot be had; use --data FILE\n$")


def test_full_table(data, capsys):
    arguments = ["train", "--data", str(data), "--capacity", "30", *ONE]
    expect_error(capsys, arguments, r"user: .* of 30 rows .*--capacity")


def test_tables_beyond_memory(data, capsys):
    arguments = ["train", "--data", str(data), "--capacity", str(2**31 - 1), "--dim", "1000000"]
    arguments += ONE
    expect_error(capsys, arguments, r"no memory for tables of 2,147,483,647 rows")


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_that_diverges(data, capfd, forked_ranks, ranks):
    command = ["train", "--data", str(data), *SMALL, "--ranks", str(ranks), "--epochs", "2"]
    assert cli.main([*command, "--lr", "1e12"]) == 1
    output, errors = capfd.readouterr()
    pattern = (
        r"sparsekit: (epoch \d/2: the loss is infinite or NaN from step \d+ of 26 on: training has "
        r"diverged|the test RMSE is \w+: training has diverged in its last step)"
        r"; try a smaller --lr than 1e\+12\n"
    )
    assert re.fullmatch(pattern, errors)
    assert "nan" not in output
    assert "test RMSE\n" not in output


def test_divergence_in_the_last_step(data, monkeypatch, capsys):
    """Only the evaluation sees the divergence: a step computes its loss from earlier weights."""
    update = Step.update

    def broken(step, loss_fn, shares, following):
        if following is None:
            for group in (group for o in step._optimizers for group in o.param_groups):
                group["lr"] = torch.inf
        return update(step, loss_fn, shares, following)

    monkeypatch.setattr(Step, "update", broken)
    arguments = ["train", "--data", str(data), *SMALL, *ONE, "--epochs", "1"]
    assert cli.main(arguments) == 1
    message = "test RMSE is nan: training has diverged in its last step; try a smaller"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("batch_size", [64, 100, 1600, 5000])
def test_the_learning_rate_reaches_zero_after_the_last_step(data, monkeypatch, batch_size):
    """The rate reaches zero even if the last batch of an epoch is smaller."""
    rates = []
    update = Step.update

    def recorded(step, *arguments):
        rates.append([group["lr"] for o in step._optimizers for group in o.param_groups])
        rates.append(step)
        return update(step, *arguments)

    monkeypatch.setattr(Step, "update", recorded)
    command = ["train", "--data", str(data), *SMALL, *ONE, "--epochs", "3"]
    assert cli.main([*command, "--batch-size", str(batch_size), "--lr", "0.5"]) == 0
    step, before = rates[-1], rates[::2]
    train, _ = read_ratings(data).split_by_time()
    steps = 3 * -(-len(train) // batch_size)
    assert len(before) == steps
    first = [0.5, train_ratings.DENSE_LR]
    for done, now in enumerate(before):
        assert now == pytest.approx([rate * (1 - done / steps) for rate in first], rel=1e-9)
    after = [group["lr"] for o in step._optimizers for group in o.param_groups]
    assert after == pytest.approx([0, 0], abs=1e-15)


def test_bench_is_the_benchmarks(capsys):
    assert cli.main(["bench", "run", "overhead", "--quick"]) == 0
    assert "call of unique, 8 keys" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["bench", "run", "no_such"])
    assert "sparsekit bench run: suite cpu has no benchmark" in capsys.readouterr().err


def test_bench_without_the_repository(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site-packages/sparsekit/cli/bench.py"))
    monkeypatch.chdir(tmp_path)
    expect_error(capsys, ["bench", "run"], "^sparsekit: bench: .*clone the repository and run this")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["train", "--epochs", "0"],
        ["train", "--epochs", "many"],
        ["train", "--capacity", str(2**31)],
        ["train", "--lr", "nan"],
        ["train", "--lr", "-1"],
        ["train", "--seed", "9" * 400],
        ["train", "--threads", "0"],
        ["train", "--wire-dtype", "qqq"],
        ["train", "--ranks", "0"],
    ],
)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("sparsekit")
    assert error.count("\n") == 1
    assert "did you mean" not in error


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["trian"], "train"),
        (["train", "--bach-size", "3"], "--batch-size"),
        (["train", "--wire-dtpye=float32-or-bfloat16"], "--wire-dtype"),
        (["train", "--wire-dtype", "bflaot16"], "bfloat16"),
    ],
)
def test_wrong_names(arguments, right, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"; did you mean {right}? (see sparsekit" in error
    assert error.count("\n") == 1


def test_ctrl_c_before_training(monkeypatch, capsys):
    def interrupt(data):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_ratings, "movielens_100k", interrupt)
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "sparsekit: interrupted\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_in_training(data, ranks):
    # Restore the default handler: if the tests run in the background, SIGINT may be ignored.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from sparsekit.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "train", "--data", str(data)]
    command += ["--epochs", "100000", "--ranks", str(ranks), *SMALL]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the test can send a signal to the whole process group
    ) as process:
        try:
            seen = [process.stdout.readline() for _ in range(3)]
            assert seen[2].startswith("epoch 2/100000"), process.stderr.read()
            os.killpg(process.pid, signal.SIGINT)  # to all processes, as a terminal does
            # communicate() returns when the last process that holds the pipes has ended, so no
            # rank is left.
            output, errors = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 130
    if ranks == 1:
        assert re.search(r"^interrupted: \d+ of 100000 epochs are finished$", output, re.MULTILINE)
        assert errors == ""
    else:
        assert errors == "sparsekit: interrupted\n"


def summary(output: str) -> list[float]:
    """Return the numbers printed: losses and errors of epochs, results, sizes of tables."""
    numbers = re.findall(r"^epoch \d/\d  loss ([\d.]+)  test RMSE ([\d.]+)", output, re.MULTILINE)
    sizes = re.findall(r"rows in the tables: user (\d+), item (\d+), rated (\d+)$", output)
    assert len(sizes) == 1
    return [float(x) for x in (*sum(numbers, ()), *results(output).values(), *sizes[0])]


def torchrun(folder: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--log-dir", str(folder), *arguments]


def test_ranks_train_as_one_does(data, capfd):
    command = ["train", "--data", str(data), "--epochs", "2", *SMALL]
    assert cli.main([*command, *ONE]) == 0
    expected = summary(capfd.readouterr().out)
    assert cli.main(command) == 0  # on 2 ranks
    output, errors = capfd.readouterr()
    assert errors == ""
    assert len(expected) == 2 * 2 + 3 + 3
    assert summary(output) == pytest.approx(expected, abs=1e-3)


def test_a_full_table_on_ranks(data, capfd, forked_ranks):
    assert cli.main(["train", "--data", str(data), "--epochs", "1", "--capacity", "20"]) == 2
    errors = capfd.readouterr().err
    assert re.fullmatch(r"sparsekit: \w+: the table on rank \d is full: .*--capacity\.\n", errors)


def end_at_once(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_ends(data, monkeypatch, capfd, forked_ranks):
    monkeypatch.setattr(ranks, "run_as_rank", end_at_once)
    assert cli.main(["train", "--data", str(data), "--epochs", "1", *SMALL]) == 1
    errors = capfd.readouterr().err
    assert re.fullmatch(r"sparsekit: rank [01] was ended by SIGKILL\n", errors)


def test_under_torchrun(data, capfd, tmp_path):
    command = ["train", "--data", str(data), "--epochs", "2", *SMALL]
    assert cli.main([*command, *ONE]) == 0
    expected = summary(capfd.readouterr().out)
    done = subprocess.run(
        torchrun(tmp_path, "--nproc-per-node", "3", "-m", "sparsekit", *command),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert summary(done.stdout) == pytest.approx(expected, abs=1e-3)


def test_a_missing_file_under_torchrun(tmp_path):
    command = torchrun(tmp_path, "--nproc-per-node", "2", "-m", "sparsekit", "train", "--data")
    done = subprocess.run([*command, str(tmp_path / "missing")], capture_output=True, text=True)
    assert done.returncode != 0
    assert len(re.findall("^sparsekit: .*missing: No such file", done.stderr, re.MULTILINE)) == 1


def test_ranks_whose_reader_goes_away(data):
    done = subprocess.run(
        f"{sys.executable} -m sparsekit train --data {data} --epochs 5 {' '.join(SMALL)}"
        " | head -1; exit ${PIPESTATUS[0]}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (141, "")


def test_python_m_and_a_reader_that_goes_away():
    done = subprocess.run(
        f"{sys.executable} -m sparsekit info | head -0; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
