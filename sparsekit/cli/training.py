"""Options, settings and the Trainer shared by all training commands."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .._arguments import Parser
from .._extras import MissingPackageError
from .._nearest import did_you_mean
from ..train import Trainer
from ..train.config import ConfigError, read_yaml, to_yaml
from . import checkpoints, ranks
from .common import UsageError, count, number, why, writing

# Options that are not settings: they specify where settings come from, or what the command does.
_NO_SETTINGS = {"help", "config", "set", "show-config", "resume"}


class TrainingParser(Parser):
    """Parser for a training command; its flags can also be set in a YAML file or with ``--set``.

    Settings from the file and from ``--set`` are converted to flags, so only flags need checks.
    """

    flags_are_settings = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse like argparse; flags and ``--set`` override the settings in the YAML file."""
        if not self.flags_are_settings:
            return super().parse_known_args(args, namespace)
        found, unknown = super().parse_known_args(self._as_flags(args), namespace)
        if found.config is not None:  # `_as_flags` knows only options' full names
            self.error("--config cannot be abbreviated")
        if found.show_config:
            values = {name: getattr(found, each.dest, None) for name, each in self._flags().items()}
            given = {name: value for name, value in values.items() if value is not None}
            print(to_yaml(given), end="")
            self.exit()
        return found, unknown

    def _flags(self) -> dict[str, argparse.Action]:
        # Skip the first action, --help.
        named = {action.option_strings[0][2:]: action for action in self._actions[1:]}
        return {name: action for name, action in named.items() if name not in _NO_SETTINGS}

    def _as_flags(self, args: Iterable[str]) -> list[str]:
        of_file: list[str] = []
        given: list[str] = []
        rest = iter(args)
        for each in rest:
            option, equals, value = each.partition("=")
            if option not in ("--config", "--set"):
                given.append(each)
                continue
            value = value if equals else next(rest, "")
            if option == "--set":
                name, equals, text = value.partition("=")
                if not equals:
                    self.error(f"--set {value}: must be KEY=VALUE, such as epochs=3")
                given += self._flag("--set", name.strip(), text)
                continue
            try:
                settings = read_yaml(value)
            except OSError as error:
                self.error(f"--config {value}: {why(error, value)}")
            except (ConfigError, MissingPackageError) as error:
                self.error(f"--config {error}")
            for name, setting in settings.items():
                of_file += self._flag(f"--config {value}", name, setting)
        return of_file + given

    def _flag(self, where: str, name: Any, value: Any) -> list[str]:
        """Convert a setting to command-line arguments; a switch that is off becomes no argument."""
        flags = self._flags()
        flag = str(name).replace("_", "-")
        action = flags.get(flag) or self._option_string_actions.get(f"--{flag}")
        if action is None or flag in _NO_SETTINGS:
            hint = did_you_mean(flag, flags) or f"; there are {', '.join(flags)}"
            self.error(f"{where}: no setting {flag!r}{hint}")
        if action.nargs != 0:
            return [f"--{flag}={value}"]
        if (switch := str(value).lower()) not in ("true", "false"):
            self.error(f"{where}: {flag} must be true or false, got {value!r}")
        return [f"--{flag}"] * (switch == "true")


def add(
    models: argparse._SubParsersAction[TrainingParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    data: str,
    save: str | None = None,
) -> TrainingParser:
    """Add a command that trains on one file, with --data, --save and the options for settings.

    Args:
        models: subparsers to add the command to.
        name: name of the command.
        run: function to call with the parsed arguments.
        help: one line for the list of models.
        description: first paragraph of the command's help.
        data: help text of --data.
        save: help text of --save; None for a command without this option.
    """
    parser = models.add_parser(
        name,
        help=help,
        description=description,
    )
    parser.set_defaults(run=run, save=None)
    parser.flags_are_settings = True
    parser.add_argument("--data", metavar="FILE", help=data)
    if save is not None:
        parser.add_argument("--save", metavar="FILE", help=save)
    add_settings(parser, "epochs=3")
    return parser


def add_settings(parser: argparse.ArgumentParser, example: str) -> None:
    """Add the options that set and print settings."""
    parser.add_argument("--config", metavar="FILE", help="settings in YAML; see --show-config")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        dest="settings",
        help=f"one setting, such as {example}; may be repeated",
    )
    parser.add_argument(
        "--show-config",
        action="store_true",
        help="print the settings, each that has a value, as YAML, and end",
    )


def add_options(parser: argparse.ArgumentParser, seed: str, num_ranks: int | None = 2) -> None:
    """Add the options common to all models; ``seed`` is the help text of ``--seed``.

    ``num_ranks`` is the default value of ``args.ranks``, or None.
    """
    parser.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0, help=seed)
    parser.add_argument(
        "--log-to",  # not --log, which torchrun would mistake for one of its own options
        dest="log",
        metavar="FOLDER",
        help="where to write metrics.jsonl, for `sparsekit plot FOLDER`",
    )
    ranks.add_ranks(parser, num_ranks)
    checkpoints.add_options(parser)


def add_batch_size(
    parser: argparse.ArgumentParser, samples: str, default: Any, shown: str = ""
) -> None:
    """Add the option for the batch size; ``shown`` describes the default in the help."""
    parser.add_argument(
        "--global-batch-size",
        "--batch-size",
        dest="batch_size",
        metavar="N",
        type=count,
        default=default,
        help=f"{samples} in a step, of all ranks together{shown}",
    )


@contextlib.contextmanager
def reading(option: str, file: str | None) -> Iterator[None]:
    """Convert an OSError raised in this context to a UsageError about reading the file."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option} {file}: {why(error, str(file))}") from error


def make_trainer(
    args: argparse.Namespace,
    model: torch.nn.Module,
    losses: Callable[..., Any],
    optimizers: Sequence[torch.optim.Optimizer],
    **others: Any,
) -> Trainer:
    """Make a `Trainer` that logs and saves as ``args`` specifies; it gets all other arguments."""
    others = {"stream": sys.stdout, "logs": ranks.logs(args), **others}
    return Trainer(model, losses, optimizers, seed=args.seed, **checkpoints.options(args), **others)


def falling(
    optimizers: Iterable[torch.optim.Optimizer], steps: int
) -> list[torch.optim.lr_scheduler.LRScheduler]:
    """Return schedulers that decrease the learning rates linearly to zero over ``steps``."""
    return [
        torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        for optimizer in optimizers
    ]


def save(args: argparse.Namespace, model: Any) -> None:
    """Write the trained model to the file given by ``--save``, if any."""
    if args.save is not None:
        with writing("--save", args.save):
            model.save(args.save)
