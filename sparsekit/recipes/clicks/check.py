"""Checks the files for `sparsekit train dlrm` and `deepfm` before training begins."""

from __future__ import annotations

from collections.abc import Mapping

from ...cli.common import UsageError, sum_over_ranks
from ...data.reader import Reader
from .config import RunConfig


def check_files(config: RunConfig, readers: Mapping[str, Reader]) -> None:
    """Read the first batch from each reader, and make readers reject rows with invalid labels.

    Args:
        config: settings of the run.
        readers: readers by name: train, validation or test, as in config's ``data`` section.

    Raises:
        UsageError: files have no rows, or early stopping is impossible with the validation files.
        DataFormatError: a row is malformed.
    """
    for name, reader in readers.items():
        # In training, labels between 0 and 1 are valid, too. An AUC needs labels 0 or 1.
        reader.limit_labels(0, 1, between=name == "train")
        if next(iter(reader), None) is None:
            raise UsageError(f"data.{name}: no rows in {', '.join(getattr(config.data, name))}")
        reader.set_epoch(0)
    if config.trainer.patience is not None:
        labels = [batch.label for batch in readers["validation"] if batch.label is not None]
        here = [sum(label.sum().item() for label in labels), sum(map(len, labels))]
        ones, rows = sum_over_ranks(here)
        if ones in (0, rows):
            raise UsageError(
                f"trainer.patience: all labels in {', '.join(config.data.validation)} are "
                f"{int(ones > 0)}, so there is no AUC by which to stop"
            )
