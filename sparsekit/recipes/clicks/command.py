"""``sparsekit train dlrm`` and ``deepfm``: trains on files of clicks or on the Adult data."""

from __future__ import annotations

import argparse
import csv
import functools
import math
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from ...cli import ranks, training
from ...cli.common import UsageError, count, rank, world_size
from ...data import Batch, Keys, Prefetcher
from ...data.formats import FORMATS
from ...data.reader import Reader
from ...datasets import Adult
from ...datasets.adult import CATEGORIES, LABEL, NUMBERS
from ...errors import DivergedError, TableFullError
from ...optim import split_embedding_variable_from_others
from ...train import EarlyStopping, TensorBoard, Trainer, linear_warmup
from ...train.config import names, read_yaml, to_yaml, updated, with_setting
from ...train.metrics import auc, gather, log_loss
from ..buckets import QuantileBuckets
from ..wide.command import NUMBER_BUCKETS, SPLIT_SEED, TEST_FRACTION, load_people
from . import trained
from .check import check_files
from .config import CONFIG, OPTIMIZERS, DataConfig, RunConfig, TrainerConfig, check
from .trained import MODELS, scores


def add(models: argparse._SubParsersAction[training.TrainingParser]) -> None:
    """Add ``sparsekit train dlrm`` and ``sparsekit train deepfm`` to the parser."""
    for name, title in (("dlrm", "DLRM-DCNv2"), ("deepfm", "DeepFM")):
        settings = list(names(RunConfig(MODELS[name][1]())))
        train = models.add_parser(
            name,
            help=f"train {title} on clicks: CSV, Criteo's format or Parquet",
            description=f"Train {title} on files of clicks, which are read as a stream; without "
            "any, on the Adult census data, from raw text.",
            epilog=f"Settings, each of them an option too: {', '.join(settings)}.",
        )
        train.set_defaults(run=_train, model=name, save=None)
        training.add_settings(train, "optimizer.lr=0.01 or model.top=64,32")
        for setting in settings:
            train.add_argument(
                f"--{setting}", type=f"{setting}={{}}".format, action="append", dest="settings",
                help=argparse.SUPPRESS,
            )  # fmt: skip
        train.add_argument(
            "--data",
            metavar="FILE",
            nargs="+",
            help="files to train on: data.train in short",
        )
        train.add_argument(
            "--epochs",
            type=count,
            help=f"passes over the data: trainer.epochs in short (default: {TrainerConfig.epochs})",
        )
        train.add_argument(
            "--save",
            metavar="RUN",
            dest="run_folder",
            help="folder to make for the trained model, for `sparsekit predict`",
        )
        training.add_options(train, seed="of initial weights and the order of rows")


def _train(args: argparse.Namespace) -> int:
    config = _config(args)
    if args.show_config:
        print(to_yaml(config), end="")
        return 0
    trained.check_new(args)
    # Store settings by name, so that a resumed run fails if the config file has changed.
    settings = {n: functools.reduce(getattr, n.split("."), config) for n in names(config)}
    vars(args).update(settings)
    return ranks.train(args, _load, _fit_and_report)


def _config(args: argparse.Namespace) -> RunConfig:
    """Return the default settings, overridden by the config file and then by flags."""
    config = RunConfig(MODELS[args.model][1]())
    if args.config is not None:
        with training.reading("--config", args.config):
            config = updated(config, read_yaml(args.config), args.config)
    for setting in args.settings or ():
        config = with_setting(config, setting)
    if args.data is not None:
        config = replace(config, data=replace(config.data, train=tuple(args.data)))
    if args.epochs is not None:
        config = replace(config, trainer=replace(config.trainer, epochs=args.epochs))
    check(config)
    return config


def _load(args: argparse.Namespace) -> tuple[Adult, Adult] | None:
    config = _config(args)
    for file in (*config.data.train, *config.data.validation, *config.data.test):
        if Path(file).is_fifo():
            raise UsageError(f"{file}: is a pipe, but each epoch reads anew; write it to a file")
    if config.data.train:
        return None
    return load_people(args)


def _fit_and_report(data: tuple[Adult, Adult] | None, args: argparse.Namespace) -> int:
    config, buckets = _config(args), None
    with tempfile.TemporaryDirectory() as folder:
        if data is not None:
            config, buckets = _write_adult(data, config, Path(folder))
        try:
            return _fit(config, args, buckets)
        except TableFullError as error:
            raise UsageError(f"{error} Here that is model.rows.") from error


def _write_adult(
    data: tuple[Adult, Adult], config: RunConfig, folder: Path
) -> tuple[RunConfig, QuantileBuckets]:
    """Write the Adult data to CSV files; return a config that reads them, and the buckets."""
    train, test = data
    parts = {"train": train, "test": test}
    if config.trainer.patience is not None:
        parts["train"], parts["validation"] = train.split(TEST_FRACTION, SPLIT_SEED + 1)
    buckets = QuantileBuckets.fit(parts["train"].columns, NUMBERS, NUMBER_BUCKETS)
    files: dict[str, tuple[str]] = {}
    for name, people in parts.items():
        files[name] = (str(folder / f"{name}.csv"),)
        numbers = {
            f"{key} bucket": value.tolist() for key, value in buckets(people.columns).items()
        }
        columns = {LABEL: people.labels.int().tolist(), **people.columns, **numbers}
        with open(files[name][0], "w", newline="") as file:
            csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    data_config = DataConfig(
        files["train"],
        files.get("validation", ()),
        files["test"],
        label=LABEL,
        dense=NUMBERS,
        sparse=(*CATEGORIES, *(f"{name} bucket" for name in NUMBERS)),
    )
    return replace(config, data=data_config), buckets


def reader_of(config: RunConfig, files: Sequence[str], seed: int | None) -> Reader:
    """Return a reader for this rank's share of each batch, shuffled unless seed is None."""
    data = config.data
    batch = -(-config.trainer.global_batch_size // world_size())
    order: dict[str, Any] = {"shuffle": seed is not None, "seed": seed or 0}
    form = FORMATS[data.format]
    keys = Keys(form.keys, separator=data.separator)
    if form.open is None:
        return form.reader(files, batch, keys=keys, **order)
    return form.reader(
        files,
        batch,
        label=data.label,
        dense=data.dense,
        sparse=dict.fromkeys(data.sparse, keys),
        **order,
    )


def _losses(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        scores(model, batch).float(),
        cast(torch.Tensor, batch.label),  # never None in a training run
        reduction="none",
    )
    return losses, 0.0


def _fit(config: RunConfig, args: argparse.Namespace, buckets: QuantileBuckets | None) -> int:
    try:
        reader = reader_of(config, config.data.train, args.seed)
        tested = {
            name: reader_of(config, files, None)
            for name in ("validation", "test")
            if (files := getattr(config.data, name))
        }
        check_files(config, {"train": reader, **tested})
        model = _model(reader, config, args)
        trainer = _trainer(model, config, args)
        stop = None
        if config.trainer.patience is not None:
            patience = config.trainer.patience
            stop = EarlyStopping("validation AUC", patience, larger_is_better=True)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    trainer.fit(
        reader,
        epochs=config.trainer.epochs,
        evaluate=functools.partial(_evaluate, tested),
        stop=stop,
        resume=args.resume,
    )
    if trainer.interrupted:
        return 130
    if args.run_folder is not None:
        trained.save(args, model, config, reader.columns, buckets)
    if rank() == 0:
        _report(trainer)
    return 0


def _model(reader: Reader, config: RunConfig, args: argparse.Namespace) -> torch.nn.Module:
    kind, _ = MODELS[args.model]
    columns = reader.columns
    settings = vars(config.model)
    try:
        return kind(
            *(list(columns.sparse), len(columns.dense)),
            **settings,
            seed=args.seed,
            **config.table.options(),
        )
    except RuntimeError as error:  # torch's allocator is out of memory
        size = "" if config.model.rows is None else f" of {config.model.rows:,} rows"
        raise UsageError(
            f"no memory for tables{size} of dim {config.model.dim}: use a smaller model.rows or "
            f"model.dim"
        ) from error


def _trainer(model: torch.nn.Module, config: RunConfig, args: argparse.Namespace) -> Trainer:
    sparse, dense = split_embedding_variable_from_others(model)
    chosen, settings = config.optimizer, config.trainer
    optimizers = [
        OPTIMIZERS[chosen.name](sparse, lr=chosen.lr),
        torch.optim.Adam(dense, lr=chosen.dense_lr),
    ]
    logs = ranks.logs(args)
    if logs:
        folder = Path(args.log)
        (folder / CONFIG).write_text(to_yaml(config))
        if settings.tensorboard:
            logs.append(TensorBoard(folder))
    return training.make_trainer(
        args,
        model,
        _losses,
        optimizers,
        schedulers=[linear_warmup(o, chosen.lr_scale, chosen.warmup_steps) for o in optimizers],
        accumulate=settings.accumulate,
        clip_norm=settings.clip_norm,
        autocast=torch.bfloat16 if settings.bfloat16 else None,
        logs=logs,
        log_every=settings.log_every,
    )


def _evaluate(tested: dict[str, Reader], model: torch.nn.Module) -> dict[str, float]:
    """Compute metrics for each reader; each rank predicts its share of each batch."""
    metrics = {}
    for name, reader in tested.items():
        found = [(scores(model, batch).sigmoid(), batch.label) for batch in Prefetcher(reader)]
        probabilities, labels = (gather(torch.cat(each)) for each in zip(*found, strict=True))
        if not probabilities.isfinite().all():  # the last update may have diverged
            raise DivergedError(
                "a probability is not finite: training has diverged in its last step"
            )
        both = 0 < labels.sum() < len(labels)
        metrics[f"{name} AUC"] = auc(probabilities, labels) if both else math.nan
        metrics[f"{name} log loss"] = log_loss(probabilities, labels)
    return metrics


def _report(trainer: Trainer) -> None:
    last = trainer.history[-1]
    seconds = sum(epoch.seconds for epoch in trainer.history)
    rows = ", ".join(f"{n} {f['rows']:,.0f}" for n, f in last.tables.items() if "rows" in f)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # converts Linux's KiB to MiB
    print(
        f"\n{len(trainer.history)} epochs in {seconds:.1f} s, the last at "
        f"{last.samples_per_second:,.0f} samples/s; peak memory {peak:,.0f} MiB on rank 0"
    )
    print(f"rows in the tables: {rows}")
    for name, value in last.metrics.items():
        if math.isnan(value):
            print(f"{name} is undefined (nan), as all samples have one label")
