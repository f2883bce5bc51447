"""Settings of training commands: flags, ``--set`` and a YAML file are equivalent."""

import argparse

import pytest
import yaml

from sparsekit import cli
from sparsekit._extras import MissingPackageError
from sparsekit.cli.dispatch import make_parser
from sparsekit.train import config

FLAGS_ALONE = ("ratings", "wide", "autoencoder", "deepconn")


def parsed(*arguments: str) -> dict[str, object]:
    found = vars(make_parser().parse_args(["train", *arguments]))
    return {name: value for name, value in found.items() if name != "run"}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match=r"^2$"):
        make_parser().parse_args(["train", *arguments])
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    return message


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    with pytest.raises(SystemExit) as exit:
        make_parser().parse_args(["train", *arguments, "--show-config"])
    assert exit.value.code in (0, None)
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("model", FLAGS_ALONE)
def test_what_is_shown_can_be_given_as_a_file_or_one_by_one(model, tmp_path, capsys):
    given = ["--epochs=7", "--batch-size=33", "--seed=5", "--ranks=3", "--keep=2", "--data=a.csv"]
    settings = shown(capsys, model, *given)
    assert {"epochs": 7, "global-batch-size": 33, "seed": 5, "data": "a.csv"}.items() <= (
        settings.items()
    )
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    flags = parsed(model, *given)
    assert parsed(model, "--config", str(file)) == flags
    each = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    assert parsed(model, *each) == flags
    assert shown(capsys, model, f"--config={file}") == settings


def test_flags_and_set_count_more_than_the_file_wherever_it_stands(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 2\nbatch_size: 10\nlr: 0.5\n")
    found = parsed("ratings", "--epochs", "4", "--set", "lr=0.25", "--config", str(file))
    assert (found["epochs"], found["batch_size"], found["lr"]) == (4, 10, 0.25)
    assert parsed("ratings", "--set", "epochs=3", "--epochs", "4")["epochs"] == 4
    assert parsed("ratings", "--epochs", "4", "--set", "epochs=3")["epochs"] == 3


def test_switches_are_true_or_false(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    for text, on in (("original: true", True), ("original: false", False)):
        file.write_text(text)
        assert parsed("autoencoder", "--config", str(file))["original"] is on
    for text in ("true", "TRUE"):
        assert parsed("autoencoder", "--set", f"original={text}")["original"] is True
    message = refused(capsys, "autoencoder", "--set", "original=1")
    assert "--set: original must be true or false, got '1'" in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "epoch=3"), "--set: no setting 'epoch'; did you mean epochs?"),
        (("--set", "epochs"), "--set epochs: must be KEY=VALUE, such as epochs=3"),
        (("--set", "epochs=0"), "--epochs: 0 is not in [1, 2147483647]"),
        (("--set", "zzzz=3"), "--set: no setting 'zzzz'; there are data, save, "),
        (("--set",), "--set : must be KEY=VALUE, such as epochs=3"),
        (("--set=", "epochs=3"), "--set : must be KEY=VALUE, such as epochs=3"),
        (("--set", "config=a"), "--set: no setting 'config'"),
        (("--set", "set=a"), "--set: no setting 'set'"),
        (("--set", "resume=true"), "--set: no setting 'resume'"),
        (("--set", "show-config=true"), "--set: no setting 'show-config'"),
        (("--set", "help=true"), "--set: no setting 'help'"),
        (("--set", "run=a"), "--set: no setting 'run'"),
        (("--config", "{there}/none.yaml"), "none.yaml: No such file or directory"),
        (("--config", "{there}/wrnog.yaml"), "wrong.yaml?"),
        (("--config", "{there}/number.yaml"), "number.yaml: no setting '1'"),
        (("--config",), "--config : No such file or directory"),
        (("--config", "{there}/wrong.yaml"), "wrong.yaml: no setting 'dims'; did you mean dim?"),
        (("--config", "{there}/list.yaml"), "list.yaml: settings must be a mapping, got [1, 2]"),
        (("--se", "epochs=3"), "ambiguous option: --se could match --set, --seed"),
        (("--conf", "{there}/list.yaml"), "--config cannot be abbreviated"),
    ],
)
def test_wrong_settings_are_one_line(arguments, said, tmp_path, capsys):
    (tmp_path / "wrong.yaml").write_text("dims: 3")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    (tmp_path / "number.yaml").write_text("1: 2")
    assert said in refused(capsys, "ratings", *(word.format(there=tmp_path) for word in arguments))


def test_blanks_around_a_name_and_the_largest_seed():
    assert parsed("ratings", "--set", " epochs =4", "--set=lr=1")["epochs"] == 4
    assert parsed("ratings", "--seed", str(2**63 - 1))["seed"] == 2**63 - 1


def test_without_pyyaml(monkeypatch, capsys):
    def missing(*_):
        raise MissingPackageError("settings need pyyaml")

    monkeypatch.setattr(config, "needed", missing)
    assert "--config settings need pyyaml" in refused(capsys, "ratings", "--config", "x.yaml")
    for model in ("ratings", "dlrm"):
        assert cli.main(["train", model, "--show-config"]) == 2
        assert capsys.readouterr().err == "sparsekit: settings need pyyaml\n"


OF_RUN = {"seed": 0, "ranks": 2, "checkpoint-every": 1000, "keep": 3}
# The figures in the docs were measured with these settings.
DEFAULTS = {
    "ratings": {
        "epochs": 20, "global-batch-size": 1024, "dim": 32, "lr": 0.02,
        "wire-dtype": "float32", **OF_RUN,
    },
    "wide": {
        "epochs": 6, "global-batch-size": 256, "optimizer": "adam", "loss": "bce", **OF_RUN,
    },
    "autoencoder": {"original": False, **OF_RUN},
    "deepconn": {
        "placement": "single", "epochs": 3, "global-batch-size": 32, "length": 200, "lr": 1e-4,
        **{name: value for name, value in OF_RUN.items() if name != "ranks"},
    },
}  # fmt: skip
OPTIMIZER = {"name": "lazy_adam", "lr": 0.002, "dense_lr": 0.001, "lr_scale": 1.0}
TRAINER = {
    "epochs": 3, "global_batch_size": 1024, "accumulate": 1, "clip_norm": None, "bfloat16": False,
    "patience": None, "log_every": 20, "tensorboard": False,
}  # fmt: skip
MODEL = {
    "dlrm": {"bottom": [64], "top": [128, 64], "cross_layers": 3, "cross_rank": 64},
    "deepfm": {"deep": [128, 64]},
}


@pytest.mark.parametrize("model", FLAGS_ALONE)
def test_defaults(model, capsys):
    assert shown(capsys, model) == DEFAULTS[model]


@pytest.mark.parametrize("model", ["dlrm", "deepfm"])
def test_defaults_of_clicks(model, capsys):
    args = make_parser().parse_args(["train", model, "--show-config"])
    assert args.run(args) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"] == {"rows": None, "dim": 16, **MODEL[model]}
    assert config["optimizer"] == {**OPTIMIZER, "warmup_steps": 0}
    assert config["trainer"] == TRAINER
    files = {name: [] for name in ("train", "validation", "test", "dense", "sparse")}
    assert config["data"] == {**files, "format": "csv", "label": "label", "separator": None}


@pytest.mark.parametrize("model", ["dlrm", "deepfm"])
def test_each_setting_of_clicks_is_an_option_too(model, capsys):
    # Without these options the settings would be refused as incomplete.
    whole = ["--set", "data.sparse=user", "--set", "data.validation=v.csv"]

    def config(*arguments: str) -> dict[str, dict[str, object]]:
        args: argparse.Namespace = make_parser().parse_args(
            ["train", model, *whole, *arguments, "--show-config"]
        )
        assert args.run(args) == 0
        return yaml.safe_load(capsys.readouterr().out)

    other = {bool: "true", int: "7", float: "0.5", str: "tsv", list: "3", type(None): "4"}
    checked = 0
    for section, settings in config().items():
        for name, value in settings.items():
            text = "adagrad" if (section, name) == ("optimizer", "name") else other[type(value)]
            key = f"{section}.{name}"
            changed = config(f"--{key}", text)
            assert changed == config("--set", f"{key}={text}")
            assert changed[section].pop(name) != value
            checked += 1
    assert checked > 20
    assert config("--set", "model.dim=4", "--model.dim", "8")["model"]["dim"] == 8
