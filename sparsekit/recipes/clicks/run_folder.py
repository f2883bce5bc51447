"""Reads a training run's data again, using the settings in its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...cli.common import UsageError, why
from ...data.reader import Reader
from ...tables.embedding_table import EmbeddingTable
from ...train.config import ConfigError, read_yaml, updated
from .command import reader_of
from .config import CONFIG, OPTIMIZERS, RunConfig, check
from .trained import MODELS


class Run(NamedTuple):
    """The data that a training run read, and facts about the run's tables.

    Attributes:
        reader: the batches of all ranks together, shuffled with seed 0.
        epochs: number of passes over the batches.
        dims: number of elements in a vector, by feature.
        optimizer: the tables' optimizer.
    """

    reader: Reader
    epochs: int
    dims: Mapping[str, int]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def read_run(folder: str, batch_size: int | None = None) -> Run:
    """Read a run's settings.

    Args:
        folder: folder that was passed to --log-to.
        batch_size: samples in a batch; None for the run's batch size.

    Raises:
        UsageError: the folder has no settings from a run that read files, or the files are gone.
    """
    path = Path(folder) / CONFIG
    try:
        values = read_yaml(path)
    except OSError as error:
        raise UsageError(f"{path}: {why(error, str(path))}") from error
    kind = next(
        (each for each in MODELS.values() if set(values.get("model", {})) <= set(vars(each[1]()))),
        next(iter(MODELS.values())),
    )
    try:
        config = updated(RunConfig(kind[1]()), values, str(path))
    except ConfigError as error:
        raise UsageError(str(error)) from error
    if not config.data.train:
        raise UsageError(f"{path}: names no files in data.train")
    if batch_size is not None:
        config = replace(config, trainer=replace(config.trainer, global_batch_size=batch_size))
    check(config)
    try:
        reader = reader_of(config, config.data.train, 0)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    model = kind[0](
        *(list(reader.columns.sparse), len(reader.columns.dense)),
        **{**vars(config.model), "rows": 1},
        seed=0,
    )
    dims = {
        one.name: one.embedding_vec_size
        for one in model.modules()
        if isinstance(one, EmbeddingTable)
    }
    return Run(reader, config.trainer.epochs, dims, OPTIMIZERS[config.optimizer.name])
