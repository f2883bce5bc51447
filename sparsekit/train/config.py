"""Settings of a run as dataclasses, which YAML files and ``key=value`` arguments override."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any, TypeVar

from .._extras import needed
from .._nearest import did_you_mean

Config = TypeVar("Config", bound=Any)


class ConfigError(ValueError):
    """A setting does not exist, or its value has the wrong type."""


def read_yaml(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read a YAML file that is empty or contains a mapping.

    Raises:
        ConfigError: the file is not YAML, or its content is not a mapping.
        ImportError: the package pyyaml is not installed.
        OSError: the file cannot be read.
    """
    yaml = needed("yaml", "YAML")
    with open(path, encoding="utf-8") as file:
        try:
            loaded = yaml.safe_load(file)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{os.fspath(path)}: not valid YAML: {reason}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{os.fspath(path)}: settings must be a mapping, got {loaded!r:.80}")
    return loaded


def to_yaml(config: Any) -> str:
    """Format a dataclass or mapping of settings as YAML, in the order of the settings.

    Raises:
        ImportError: the package pyyaml is not installed.
    """
    yaml = needed("yaml", "YAML")

    if isinstance(config, Mapping):  # write one line for each entry
        return yaml.safe_dump(dict(config), sort_keys=False)
    return yaml.safe_dump(asdict(config), sort_keys=False, default_flow_style=None)


def updated(config: Config, values: Mapping[str, Any], where: str = "", prefix: str = "") -> Config:
    """Return a copy of the settings with some values replaced.

    Args:
        config: a dataclass. A field's type is a dataclass, int, float, bool, str, or a tuple of
            ints, floats or strings; any of these may be optional (``| None``). A field's metadata
            ``"also"`` is an alias.
        values: the new values, by name; for a field that is a dataclass, another mapping.
        where: start of error messages, such as the name of a file.
        prefix: name of the section that ``config`` represents, followed by a dot.

    Raises:
        ConfigError: a name is unknown (the message suggests the nearest one), or a value has
            the wrong type.
    """
    start = f"{where}: " * bool(where)
    kinds = typing.get_type_hints(type(config))
    changed = {}
    also = {each.metadata["also"]: each.name for each in fields(config) if "also" in each.metadata}
    for given, value in values.items():
        name = also.get(given, given)
        full = f"{prefix}{name}"
        if name not in kinds:
            hint = did_you_mean(full, [prefix + each for each in kinds])
            # Suggest full names, in case the user has left out the section.
            within = [each for each in names(config, prefix) if each.endswith(f".{name}")]
            hint = hint or (f"; did you mean {within[0]}?" if within else "")
            hint = hint or f"; there are {', '.join(kinds)}"
            raise ConfigError(f"{start}no setting {full or repr(full)}{hint}")
        now = getattr(config, name)
        if not is_dataclass(now):
            changed[name] = _converted(value, kinds[name], f"{start}{full}")
        elif isinstance(value, Mapping):
            changed[name] = updated(now, value, where, f"{full}.")
        else:
            inner = ", ".join(names(now, f"{full}."))
            raise ConfigError(f"{start}{full} is a section with {inner}, got {value!r}")
    return replace(config, **changed)


def with_setting(config: Config, setting: str) -> Config:
    """Return a copy of the settings with one value changed, as in ``optimizer.lr=0.1``.

    ``model.top=64,32`` sets a tuple. An empty value, as in ``model.top=``, means an empty tuple, or
    None if the setting's type allows None.

    Raises:
        ConfigError: as for `updated`, or ``setting`` is not of the form KEY=VALUE.
    """
    key, equals, text = setting.partition("=")
    if not equals:
        raise ConfigError(f"{setting!r} must be KEY=VALUE, such as optimizer.lr=0.1")
    values: Any = text
    for name in reversed(key.strip().split(".")):
        values = {name: values}
    return updated(config, values)


def names(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the full name of each setting, such as ``optimizer.lr``."""
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            yield from names(value, f"{prefix}{each.name}.")
        else:
            yield prefix + each.name


def _converted(value: Any, kind: Any, full: str) -> Any:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for option in options:
        if option is type(None):
            if value is None or value == "":
                return None
        elif typing.get_origin(option) is tuple:
            many = value.split(",") if isinstance(value, str) and value else value or ()
            if isinstance(many, list | tuple):
                of = typing.get_args(option)[0]
                return tuple(_converted(each, of, full) for each in many)
        else:
            try:
                return _one(value, option)
            except ValueError:
                pass
    wanted = " or ".join("none" if o is type(None) else _name(o) for o in options)
    raise ConfigError(f"{full} must be {wanted}, got {value!r}")


def _one(value: Any, kind: type) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        if value in ("true", "false"):
            return value == "true"
    elif isinstance(value, str) or type(value) is kind or (type(value) is int and kind is float):
        return kind(value)
    raise ValueError


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list of {_name(typing.get_args(kind)[0])}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[kind]
