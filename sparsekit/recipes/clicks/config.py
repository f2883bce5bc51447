"""Settings for `sparsekit train dlrm` and `deepfm`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..._nearest import did_you_mean
from ...cli.common import UsageError
from ...data.formats import FORMATS
from ...optim import Adagrad, LazyAdam, RowWiseAdagrad
from ...tables.admission import MinCount, Probability

# Name of the file that contains a run's settings, in the folder passed to --log-to.
CONFIG = "config.yaml"
OPTIMIZERS = {"lazy_adam": LazyAdam, "adagrad": Adagrad, "row_wise_adagrad": RowWiseAdagrad}


@dataclass(frozen=True)
class DataConfig:
    """Data files, and how to read them. Without files, the Adult census data is used."""

    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    format: str = "csv"
    label: str = "label"
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    separator: str | None = None  # separates the values in a bag


@dataclass(frozen=True)
class DLRMConfig:
    """Settings for a `DLRM`."""

    rows: int | None = None
    dim: int = 16
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (128, 64)
    cross_layers: int = 3
    cross_rank: int = 64


@dataclass(frozen=True)
class DeepFMConfig:
    """Settings for a `DeepFM`."""

    rows: int | None = None
    dim: int = 16
    deep: tuple[int, ...] = (128, 64)


@dataclass(frozen=True)
class TableConfig:
    """Options for each table, named as in `DistributedEmbedding`; None keeps the default.

    A number for admission becomes a `MinCount` if it is at least 1, else a `Probability`.
    """

    on_full: str | None = None
    storage: str | None = None
    max_resident_bytes: int | None = None
    max_rows: int | None = None
    low_watermark: float | None = None
    score: str | None = None
    ttl: int | None = None
    admission: float | None = None

    def options(self) -> dict[str, Any]:
        """Return the options that have been set, in the form that a layer takes.

        Raises:
            ValueError: the number for admission is out of range.
        """
        given = {name: value for name, value in vars(self).items() if value is not None}
        if self.admission is not None:
            if self.admission >= 1 and self.admission.is_integer():
                given["admission"] = MinCount(int(self.admission))
            elif 0 < self.admission < 1:
                given["admission"] = Probability(self.admission)
            else:
                raise ValueError(
                    f"table.admission must be a whole number, the count at which a key gets a row, "
                    f"or a probability in (0, 1), got {self.admission:g}"
                )
        return given


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings for Adam on the dense part, and for the tables' optimizer, chosen by name."""

    name: str = "lazy_adam"
    lr: float = 0.002
    dense_lr: float = 0.001
    lr_scale: float = 1.0  # multiplies lr and dense_lr, for larger batches
    warmup_steps: int = 0


@dataclass(frozen=True)
class TrainerConfig:
    """Settings for `Trainer`."""

    epochs: int = 3
    # Training rounds this up to a multiple of the number of ranks.
    global_batch_size: int = field(default=1024, metadata={"also": "batch_size"})
    accumulate: int = 1
    clip_norm: float | None = None
    bfloat16: bool = False
    patience: int | None = None  # stop after this many epochs without a better AUC
    log_every: int = 20  # an epoch of the Adult census data has 39 steps
    tensorboard: bool = False


@dataclass(frozen=True)
class RunConfig:
    """All settings for a training run."""

    model: Any
    data: DataConfig = field(default_factory=DataConfig)
    table: TableConfig = field(default_factory=TableConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


def check(config: RunConfig) -> None:
    """Raise UsageError if a setting is invalid, or if two settings contradict each other."""
    data, trainer = config.data, config.trainer
    for name, value, choices in (
        ("data.format", data.format, tuple(FORMATS)),
        ("optimizer.name", config.optimizer.name, tuple(OPTIMIZERS)),
    ):
        if value not in choices:
            near = did_you_mean(value, choices)
            raise UsageError(f"{name} must be one of {', '.join(choices)}, got {value}{near}")
    if data.train and FORMATS[data.format].open is not None and not data.sparse:
        raise UsageError(
            f"data.sparse must name the categorical columns of {data.train[0]}: "
            f"--set data.sparse=user,item --set data.dense=price --set data.label=click"
        )
    if data.train and trainer.patience is not None and not data.validation:
        raise UsageError("trainer.patience needs data.validation, files to decide by")
    columns = [data.label, *data.dense, *data.sparse]
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise UsageError(
            f"data.label, data.dense and data.sparse name the column {twice[0]!r} twice"
        )
    for section, names in (
        ("trainer", ("epochs", "global_batch_size", "accumulate", "log_every", "patience")),
        ("model", ("rows", "dim", "cross_rank")),
    ):
        for name in names:
            count = getattr(getattr(config, section), name, None)
            if count is not None and count < 1:
                raise UsageError(f"{section}.{name} must be >= 1, got {count}")
    for name in ("lr", "dense_lr", "lr_scale"):
        if not 0 < getattr(config.optimizer, name) < float("inf"):
            raise UsageError(f"optimizer.{name} must be > 0, got {getattr(config.optimizer, name)}")
