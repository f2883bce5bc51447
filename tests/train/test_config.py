"""Settings of a run are dataclasses, which YAML files and key=value arguments change."""

from dataclasses import dataclass, field
from types import MappingProxyType

import pytest

from sparsekit.train.config import (
    ConfigError,
    names,
    read_yaml,
    to_yaml,
    updated,
    with_setting,
)


@dataclass(frozen=True)
class Inner:
    lr: float = 0.5
    steps: int = 3
    widths: tuple[int, ...] = (4, 2)
    files: tuple[str, ...] = ()
    clip: float | None = None
    fast: bool = False
    name: str = "adam"


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    seed: int = 0


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("inner.lr=0.1", "lr", 0.1),
        ("inner.lr=1", "lr", 1.0),
        (" inner.lr =1", "lr", 1.0),
        ("inner.steps=7", "steps", 7),
        ("inner.widths=8,4,2", "widths", (8, 4, 2)),
        ("inner.widths=", "widths", ()),
        ("inner.files=a.csv,b=c.csv", "files", ("a.csv", "b=c.csv")),
        ("inner.clip=2", "clip", 2.0),
        ("inner.clip=", "clip", None),
        ("inner.fast=true", "fast", True),
        ("inner.name=sgd", "name", "sgd"),
    ],
)
def test_a_setting(setting, name, value):
    found = getattr(with_setting(Outer(), setting).inner, name)
    assert found == value
    assert type(found) is type(value)
    assert Outer() == Outer()  # the default is unchanged


def test_a_file_and_back(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("seed: 4\ninner: {lr: 2, widths: [1], clip: null, files: [a]}\n")
    config = updated(Outer(), read_yaml(path))
    assert config == Outer(Inner(lr=2.0, widths=(1,), files=("a",)), 4)
    path.write_text(to_yaml(config))
    assert updated(Outer(), read_yaml(path)) == config
    path.write_text("")
    assert updated(Outer(), read_yaml(path)) == Outer()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sed": 1}, r"x\.yaml: no setting sed; did you mean seed\?"),
        ({"inner": {"step": 1}}, r"no setting inner\.step; did you mean inner\.steps\?"),
        ({"widths": [1]}, r"no setting widths; did you mean inner\.widths\?"),
        ({"zzz": 1}, r"no setting zzz; there are inner, seed"),
        ({"inner": 3}, r"inner is a section with inner\.lr, .*, got 3"),
        ({"seed": {"a": 1}}, r"seed must be an integer, got \{'a': 1\}"),
        ({"seed": True}, "seed must be an integer, got True"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"inner": {"lr": "fast"}}, r"inner\.lr must be a number, got 'fast'"),
        ({"inner": {"clip": "x"}}, r"inner\.clip must be a number or none, got 'x'"),
        ({"inner": {"fast": 1}}, r"inner\.fast must be true or false, got 1"),
        ({"inner": {"name": 1}}, r"inner\.name must be a text, got 1"),
        ({"inner": {"widths": ["a"]}}, r"inner\.widths must be an integer, got 'a'"),
        ({"inner": {"widths": 3}}, r"inner\.widths must be a list of an integer, got 3"),
    ],
)
def test_wrong_values(values, message):
    with pytest.raises(ConfigError, match=message):
        updated(Outer(), values, "x.yaml")


def test_wrong_settings():
    with pytest.raises(ConfigError, match=r"'inner\.lr' must be KEY=VALUE"):
        with_setting(Outer(), "inner.lr")
    with pytest.raises(ConfigError, match=r"no setting inner\.rl; did you mean inner\.lr\?"):
        with_setting(Outer(), "inner.rl=1")


@pytest.mark.parametrize(
    "text", ["a: [", "- 1\n- 2\n", "text", "\x00", "a: !!python/name:os.system"]
)
def test_no_settings_in_a_file(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml: (not valid YAML|settings must be a mapping)"):
        read_yaml(path)


def test_another_name_of_a_setting():
    @dataclass(frozen=True)
    class Renamed:
        new: int = field(default=1, metadata={"also": "old"})

    assert with_setting(Renamed(), "old=7") == updated(Renamed(), {"old": 7}) == Renamed(7)
    assert list(names(Renamed())) == ["new"]
    with pytest.raises(ConfigError, match="no setting odl; there are new"):
        with_setting(Renamed(), "odl=7")


def test_names():
    assert list(names(Outer()))[:2] == ["inner.lr", "inner.steps"]
    assert list(names(Outer()))[-1] == "seed"


def test_yaml_keeps_the_order_and_reads_well():
    """YAML keeps the order of fields and writes a list in one line."""
    assert (
        to_yaml({"b": (1, 2), "a": {"d": (), "c": None}})
        == "b:\n- 1\n- 2\na:\n  d: []\n  c: null\n"
    )
    assert to_yaml(MappingProxyType({"a": 1})) == "a: 1\n"
    lines = to_yaml(Outer()).splitlines()
    assert lines[:5] == ["inner:", "  lr: 0.5", "  steps: 3", "  widths: [4, 2]", "  files: []"]
    assert lines[-1] == "seed: 0"
