"""Each option of each command takes effect: an unusual value shows up where it is used."""

import argparse
import functools
import inspect
import json
import warnings
from pathlib import Path

import pytest
import torch

import sparsekit
from sparsekit import checkpoint, cli, data, models, optim, train
from sparsekit.cli import checkpoint as checkpoint_command
from sparsekit.cli import data as data_command
from sparsekit.cli import ranks, serve_bench
from sparsekit.cli import serve as serve_command
from sparsekit.cli import table as table_command
from sparsekit.cli.dispatch import make_parser
from sparsekit.distributed.world import settings
from sparsekit.serving import DeltaLog, export_module
from sparsekit.serving.timing import Load
from sparsekit.train.plots import read_run
from sparsekit.train.profile import Profile

# A row maps an option to a value (None for a switch), and to the place where the option's effect
# must show or the test file that uses the option.
COMMON = {
    "--seed": ("7", {"Trainer.seed": 7}),
    "--threads": ("3", {"threads": 3}),
    "--log-to": ("logs", {"written": "logs/metrics.jsonl"}),
    "--checkpoint": ("saved", {"Checkpoints.folder": "saved"}),
    "--checkpoint-every": ("6", {"Trainer.checkpoint_every": 6}),
    "--keep": ("2", {"Checkpoints.keep": 2}),
    "--resume": (None, {"fit.resume": True}),
    "--ranks": "test_cli_options.py",
    "--config": "test_cli_settings.py",
    "--set": "test_cli_settings.py",
    "--show-config": "test_cli_settings.py",
}
ONE_FILE = {
    **COMMON,
    "--data": ("file", {"output": "file: "}),
    "--epochs": ("2", {"fit.epochs": 2}),
    "--global-batch-size": ("4", {"fit.global_batch_size": 4}),
}
CLICKS = {
    **COMMON,
    "--set": "test_cli_clicks.py",
    "--config": "test_cli_clicks.py",
    "--show-config": "test_cli_clicks.py",
    "--seed": ("7", {"Trainer.seed": 7, "CsvReader.seed": 7}),
    "--save": ("model", {"written": "model/model.json"}),
    "--data.validation": ("valid", {"CsvReader.files": ("valid",), "metrics": "validation AUC"}),
    "--data.test": ("test", {"CsvReader.files": ("test",), "metrics": "test AUC"}),
    "--data.format": ("tsv", {"CsvReader.delimiter": "\t"}),
    "--data.label": ("click", {"CsvReader.label": "click"}),
    "--data.dense": ("price", {"CsvReader.dense": ("price",)}),
    "--data.sparse": ("user,item", {"keys": "user"}),
    "--data.separator": ("/", {"separators": "/"}),
    "--optimizer.name": ("row_wise_adagrad", {"RowWiseAdagrad.lr": 0.125}),
    "--optimizer.lr": ("0.125", {"RowWiseAdagrad.lr": 0.125}),
    "--optimizer.dense_lr": ("0.25", {"Adam.lr": 0.25}),
    "--optimizer.lr_scale": ("3", {"rate of step 4": 3}),
    "--optimizer.warmup_steps": ("4", {"rate of step 2": 2}),
    "--trainer.global_batch_size": ("4", {"CsvReader.batch_size": 4}),
    "--trainer.accumulate": ("2", {"Trainer.accumulate": 2}),
    "--trainer.clip_norm": ("0.5", {"Trainer.clip_norm": 0.5}),
    "--trainer.bfloat16": ("true", {"Trainer.autocast": torch.bfloat16}),
    "--trainer.patience": ("5", {"EarlyStopping.patience": 5}),
    "--trainer.log_every": ("4", {"Trainer.log_every": 4}),
    "--trainer.tensorboard": ("true", {"logs": "TensorBoard"}),
}
TABLE = {
    **{"on_full": "evict", "max_rows": 90, "low_watermark": 0.75, "score": "lfu", "ttl": 9},
    **{"admission": sparsekit.MinCount(1), "storage": "mmap:.", "max_resident_bytes": 4096},
}
CHECKPOINT = {"path": ("ckpt", {}), "out": ("out", {"written": "out"})}
COMMANDS = {
    "train ratings": {
        **ONE_FILE,
        "--seed": ("7", {"Trainer.seed": 7, "RatingModel.seed": 7}),
        "--save": ("model", {"written": "model"}),
        "--dim": ("3", {"RatingModel.dim": 3}),
        "--lr": ("0.125", {"LazyAdam.lr": 0.125}),
        "--capacity": ("99", {"RatingModel.capacity": 99}),
        "--wire-dtype": ("bfloat16", {"wire dtype": torch.bfloat16}),
    },
    "train wide": {
        **ONE_FILE,
        "--seed": ("7", {"Trainer.seed": 7, "WideModel.seed": 7}),
        "--save": ("model", {"written": "model"}),
        "--optimizer": ("ftrl", {"optimizer.name": "ftrl", "optimizer.batch_size": 4}),
        "--loss": ("mse", {"WideModel.loss": "mse"}),
    },
    "train autoencoder": {
        **ONE_FILE,
        "--seed": ("7", {"Trainer.seed": 7, "Autoencoder.seed": 7}),
        "--data": ("file", {"output": "file: ", "Autoencoder.source": "file"}),
        "--save": ("model", {"written": "model"}),
        "--recs": ("recs", {"written": "recs"}),
        "--dim": ("3", {"Autoencoder.dim": 3}),
        "--original": "test_cli_autoencoder.py",
    },
    "train deepconn": {
        **ONE_FILE,
        "--seed": ("7", {"Trainer.seed": 7, "DeepCoNN.seed": 7}),
        "--placement": "test_cli_deepconn.py",
        "--length": ("8", {"DeepCoNN.length": 8}),
        "--lr": ("0.125", {"Adam.lr": 0.125}),
    },
    "train dlrm": {
        **CLICKS,
        "--table.on_full": ("evict", {"DLRM.options": TABLE}),
        "--table.max_rows": ("90", {"DLRM.options": TABLE}),
        "--table.storage": ("mmap:.", {"DLRM.options": TABLE}),
        "--table.max_resident_bytes": ("4096", {"DLRM.options": TABLE}),
        "--table.low_watermark": ("0.75", {"DLRM.options": TABLE}),
        "--table.score": ("lfu", {"DLRM.options": TABLE}),
        "--table.ttl": ("9", {"DLRM.options": TABLE}),
        "--table.admission": ("1", {"DLRM.options": TABLE}),
        "--data": ("file", {"CsvReader.files": ("file",)}),
        "--data.train": "test_cli_options.py",
        "--epochs": ("2", {"fit.epochs": 2}),
        "--trainer.epochs": "test_cli_options.py",
        "--model.rows": ("99", {"DLRM.rows": 99, "DLRM.seed": 7}),
        "--model.dim": ("3", {"DLRM.dim": 3}),
        "--model.bottom": ("4,5", {"DLRM.bottom": (4, 5)}),
        "--model.top": ("6", {"DLRM.top": (6,)}),
        "--model.cross_layers": ("1", {"DLRM.cross_layers": 1}),
        "--model.cross_rank": ("2", {"DLRM.cross_rank": 2}),
    },
    "train deepfm": {
        **CLICKS,
        "--table.on_full": ("evict", {"DeepFM.options": TABLE}),
        "--table.max_rows": ("90", {"DeepFM.options": TABLE}),
        "--table.storage": ("mmap:.", {"DeepFM.options": TABLE}),
        "--table.max_resident_bytes": ("4096", {"DeepFM.options": TABLE}),
        "--table.low_watermark": ("0.75", {"DeepFM.options": TABLE}),
        "--table.score": ("lfu", {"DeepFM.options": TABLE}),
        "--table.ttl": ("9", {"DeepFM.options": TABLE}),
        "--table.admission": ("1", {"DeepFM.options": TABLE}),
        "--data": "test_cli_options.py",
        "--data.train": ("file", {"CsvReader.files": ("file",)}),
        "--epochs": "test_cli_options.py",
        "--trainer.epochs": ("2", {"fit.epochs": 2}),
        "--model.rows": ("99", {"DeepFM.rows": 99, "DeepFM.seed": 7}),
        "--model.dim": ("3", {"DeepFM.dim": 3}),
        "--model.deep": ("4,5", {"DeepFM.deep": (4, 5)}),
    },
    "predict": {
        "folder": ("trained", {"output": "20 probabilities, by deepfm"}),
        "--data": ("test", {"CsvReader.files": ["test"]}),
        "--out": ("out", {"written": "out"}),
        "--threads": ("3", {"threads": 3}),
        "--ranks": "test_cli_options.py",
    },
    "recommend": {
        "model": ("trained", {"output": "18 items for 9 users"}),
        "--out": ("out", {"written": "out"}),
        "--k": ("2", {"output": "18 items for 9 users"}),
        "--show": ("1", {"lines": 3}),
        "--snapshot": "serving/test_recommend.py",
    },
    "checkpoint inspect": {"path": ("ckpt", {"output": "step 5"})},
    "checkpoint verify": {"path": ("ckpt", {"output": "ckpt: whole"})},
    "checkpoint diff": {
        "path": ("ckpt", {"diff.a": "ckpt"}),
        "other": ("ckpt", {"diff.b": "ckpt"}),
    },
    "checkpoint reshard": {**CHECKPOINT, "--world": ("3", {"reshard.world_size": 3})},
    "checkpoint compact": {**CHECKPOINT, "out": ("out", {"reshard.world_size": 1})},
    "checkpoint forget": {
        "path": ("ckpt", {"output": "ckpt: 0 row(s) removed"}),
        "--keys": ("7", {"forget.keys": [7]}),
        "--table": ("t", {"forget.table": "t"}),
    },
    "checkpoint export": {**CHECKPOINT, "--format": ("npz", {"export.format": "npz"})},
    "checkpoint import": {
        **CHECKPOINT,
        "path": ("dump", {"sources_of.path": "dump"}),
        "--from": ("sok1", {"sources_of.kind": "sok1"}),
        "--dim": ("t=3", {"sources_of.dims": {"t": 3}}),
        "--rename": ("t=layer", {"import_tables.names": {"t": "layer"}}),
    },
    "serve export": {
        "path": ("ckpt", {"output": "1 table(s) of ckpt"}),
        "file": ("t.sks", {"written": "t.sks"}),
        "--rows": ("t=int8", {"export_checkpoint.rows": {"t": "int8"}}),
        "--miss": ("zeros", {"export_checkpoint.miss": {"t": "zeros"}}),
        "--tables": ("t", {"export_checkpoint.tables": ["t"]}),
    },
    "serve info": {
        "path": ("old.sks", {"output": "t: 0 rows of dim 3 in float32"}),
        "--verify": (None, {"output": "UTC, whole"}),
    },
    "serve demo": {
        "--data": ("file", {"output": "file: 81 ratings"}),
        "--user": ("3", {"output": "User 3 has rated 9 films"}),
        "--seconds": ("0.5", {"output": "versions in 0.5 s"}),
        "--every": ("0.05", {"output": "every 0.05 s"}),
    },
    "serve bench": {
        "path": (
            "rows.sks",
            {"output": "rows.sks: a sample has a bag of 2 keys"},
        ),
        "--threads": ("3", {"time_lookups.load": Load(5, 2, 0.25, 7, 3)}),
        "--batch": ("5", {"time_lookups.load": Load(5, 2, 0.25, 7, 3)}),
        "--keys": ("2", {"time_lookups.load": Load(5, 2, 0.25, 7, 3, cold=True)}),
        "--misses": ("0.25", {"time_lookups.load": Load(5, 2, 0.25, 7, 3)}),
        "--calls": ("7", {"time_lookups.load": Load(5, 2, 0.25, 7, 3)}),
        "--copy": (None, {"time_lookups.options": {"copy": True}}),
        "--json": ("t.json", {"written": "t.json"}),
        "--plot": ("t.png", {"written": "t.png"}),
    },
    "serve compact": {"path": ("log", {"output": "log: the base has version 0"})},
    "table": {
        "path": ("ckpt", {"output": "t: dim 3, float32, hash table"}),
        "--table": ("t", {"table_figures.names": ["t"]}),
        "--modulo": ("9", {"table_figures.modulo": 9}),
        "--json": ("t.json", {"written": "t.json"}),
        "--plot": ("t.png", {"written": "t.png"}),
    },
    "plot": {
        "folder": ("run", {}),
        "--out": ("out.png", {"written": "out.png"}),
    },
    "scaling": dict.fromkeys(
        ("--tables", "--rows", "--dim", "--batch", "--epochs", "--threads", "--ranks", "--json"),
        "test_cli_clicks.py",
    )
    | {"--plot": "test_cli_files.py"},
    "capacity": dict.fromkeys(
        (
            "--format",
            "--label",
            "--dense",
            "--int",
            "--hex",
            "--hash",
            "--separator",
            "--seed",
            "--skip-malformed",
            "--batch-size",
            "--epochs",
            "--rows",
            "--ttl",
            "--policy",
            "--admission",
            "--sample",
            "--dim",
            "--optimizer",
            "--ranks",
            "--budget",
            "--measure",
            "--json",
            "--plot",
            "source",
        ),
        "test_cli_capacity.py",
    ),
    "hash": {
        "file": ("file", {"CsvReader.delimiter": "\t"}),
        "--out": ("out", {"written": "out"}),
        "--format": ("tsv", {"CsvReader.delimiter": "\t"}),
        "--label": ("click", {"CsvReader.label": "click"}),
        "--dense": ("price", {"CsvReader.dense": ["price"]}),
        "--int": ("time", {"keys": ("time", "int")}),
        "--hex": ("code", {"keys": ("code", "hex")}),
        "--hash": ("user,item", {"keys": ("item", "hash")}),
        "--separator": ("/", {"separators": "/"}),
        "--seed": ("7", {"seeds of keys": 7}),
        "--skip-malformed": (None, {"CsvReader.on_error": "skip"}),
    },
    "data criteo-sample": {
        "--rows": ("5", {"write_criteo_sample.rows": 5}),
        "--out": ("out", {"written": "out"}),
        "--seed": ("7", {"write_criteo_sample.seed": 7}),
        "--multi-hot": (None, {"write_criteo_sample.multi_hot": True}),
    },
    "info": {},
    "bench": {},  # this command has its own parser
}
MODELS = [name.split()[1] for name in COMMANDS if name.startswith("train ")]
OF_PROFILE = {
    "--steps": ("2", {"output": "2 steps on 1 rank(s)"}),
    "--lines": ("4", {"table.most": 4}),
    "--trace": ("trace", {"written": "trace"}),
}
for name in MODELS:
    # A profile ends during training, so most options' effects do not show.
    options = {
        option: row if isinstance(row, str) else (row[0], {})
        for option, row in COMMANDS[f"train {name}"].items()
    }
    COMMANDS[f"profile {name}"] = options | OF_PROFILE


def commands(parser, words=()):
    """Yield (words, argument names) for each command without subcommands."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        names = {a.option_strings[0] if a.option_strings else a.dest for a in parser._actions}
        yield " ".join(words), names - {"-h"}
    for name, each in below[0].choices.items() if below else ():
        yield from commands(each, (*words, name))


def test_each_option_has_a_row():
    """A new option fails here until the tables above say where its effect shows up."""
    assert dict(commands(make_parser())) == {name: set(rows) for name, rows in COMMANDS.items()}
    for rows in COMMANDS.values():
        for option, row in rows.items():
            if isinstance(row, str):
                assert option in (Path(__file__).parent / row).read_text()


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """Record calls in a dict of "function or class.argument" to the argument's values."""
    found = {}

    def note(name, value):
        found.setdefault(name, []).append(value)

    def watch(owner, name):
        original, called = getattr(owner, name), name if name != "__init__" else owner.__name__
        signature = inspect.signature(original)

        @functools.wraps(original)
        def watched(*arguments, **named):
            bound = signature.bind(*arguments, **named)
            for key, value in [
                *bound.arguments.items(),
                *bound.arguments.get("others", {}).items(),
            ]:
                note(f"{called}.{key}", value)
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    for kind in (
        models.RatingModel, models.WideModel, models.Autoencoder, models.DeepCoNN, models.DLRM,
        models.DeepFM, optim.LazyAdam, optim.RowWiseAdagrad, optim.Adam, torch.optim.Adam,
        train.Trainer, train.EarlyStopping, checkpoint.Checkpoints, data.CsvReader,
    ):  # fmt: skip
        watch(kind, "__init__")
    watch(train.Trainer, "fit")
    watch(models.WideModel, "optimizer")
    watch(Profile, "table")
    for name in ("diff", "reshard", "forget", "export", "sources_of", "import_tables"):
        watch(checkpoint_command, name)
    watch(table_command, "table_figures")
    watch(serve_command, "export_checkpoint")
    watch(serve_bench, "time_lookups")
    watch(data_command, "write_criteo_sample")
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: note("threads", threads))
    monkeypatch.setattr(settings, "wire_dtype", None)  # so that the test's end restores the setting
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():  # undoes the filter that `train wide` adds
        yield found


def write(command):
    """Write the files that a command reads."""
    kind, *rest = command.split()
    name = rest[0] if rest else ""
    pairs = [(user, item) for user in range(9) for item in range(12) if (user + item) % 4]
    ratings = [(user, item, 1 + (user + item) % 5, item) for user, item in pairs]
    text = "user,item,rating,timestamp\n" + "".join("{},{},{},{}\n".format(*r) for r in ratings)
    if name == "wide":
        same = "1,HS-grad,9,Divorced,Sales,Wife,White,Female,0,0"
        incomes = [">50K" if i % 2 else "<=50K" for i in range(60)]
        text = "".join(f"{20 + i},Private,{same},{i},US,{x}\n" for i, x in enumerate(incomes))
    elif name == "deepconn":
        keys = ("reviewerID", "asin", "overall", "unixReviewTime", "reviewText")
        reviews = [(f"U{user}", f"I{item}", r, t, "a good film") for user, item, r, t in ratings]
        text = "\n".join(json.dumps(dict(zip(keys, each, strict=True))) for each in reviews)
    elif name in ("dlrm", "deepfm") or kind in ("predict", "hash"):
        text = "user\titem\tclick\tprice\ttime\tcode\n"
        text += "".join(f"u{i}\ti\t{i % 2}\t{i}\t{i}\tff\n" for i in range(20))
    for file in ("file", "valid", "test"):
        Path(file).write_text(text)
    if kind == "predict":
        clicks = {"label": "click", "dense": "price", "sparse": "user,item", "format": "tsv"}
        options = [f"--data.{option}={value}" for option, value in clicks.items()]
        command = ["train", "deepfm", "--data", "file", *options, "--save", "trained"]
        assert cli.main([*command, "--ranks=1", "--epochs=1"]) == 0
    elif kind == "recommend":
        command = ["train", "autoencoder", "--data", "file", "--save", "trained"]
        assert cli.main([*command, "--ranks=1", "--epochs=1"]) == 0
    elif kind in ("checkpoint", "serve", "table"):
        model = torch.nn.ModuleDict({"t": sparsekit.Embedding(9, 3)})
        checkpoint.save(model, "ckpt", step=5)
        export_module(model, "old.sks")
        DeltaLog("log", model).close()
        model["t"](torch.arange(5))
        export_module(model, "rows.sks")
        Path("dump").mkdir()
        Path("dump/t_keys.file").write_bytes(bytes(8))
        Path("dump/t_values.file").write_bytes(bytes(12))
    elif kind == "plot":
        Path("run").mkdir()
        step = {"step": 1, "loss": 1, "samples_per_second": 1, "bytes_sent_per_step": 0}
        Path("run/metrics.jsonl").write_text(json.dumps({"kind": "step", **step, "tables": {}}))


def seen_afterwards(seen, output):
    """Yield the values that a command has left in files and in objects."""
    yield from (("written", str(path)) for path in Path().rglob("*"))
    yield "lines", output.count("\n")
    yield "wire dtype", settings.wire_dtype
    log = Path("logs/metrics.jsonl")
    for record in read_run("logs") if log.exists() else ():
        yield from (("metrics", name) for name in record.get("metrics", ()))
    for name, keys in [
        pair for sparse in seen.get("CsvReader.sparse", ()) for pair in sparse.items()
    ]:
        yield from (("keys", name), ("keys", (name, keys.kind)))
        yield from (("separators", keys.separator), ("seeds of keys", keys.seed))
    for logs in seen.get("Trainer.logs", ()):
        yield from (("logs", type(each).__name__) for each in logs)
    for scheduler in [each for some in seen.get("Trainer.schedulers", ()) for each in some]:
        for factor in getattr(scheduler, "lr_lambdas", ()):
            yield from (("rate of step 2", factor(2)), ("rate of step 4", factor(4)))


PACKAGES = {
    **{"hash": "pyarrow", "plot": "matplotlib", "table": "matplotlib"},
    **{"dlrm": "tensorboard", "deepfm": "tensorboard"},
}


@pytest.mark.parametrize(
    "command",
    [name for name, rows in COMMANDS.items() if not all(isinstance(r, str) for r in rows.values())],
)
def test_each_option_arrives(command, seen, capsys):
    words = command.split()
    pytest.importorskip(PACKAGES.get(words[-1], "torch"))
    rows = {option: row for option, row in COMMANDS[command].items() if not isinstance(row, str)}
    words += [value for option, (value, _) in rows.items() if not option.startswith("-")]
    for option, (value, _) in rows.items():
        if option.startswith("-"):
            words += [option] if value is None else [option, value]
    if "--ranks" in COMMANDS[command]:
        words += ["--ranks", "1"]
    write(command)
    seen.clear()
    capsys.readouterr()
    assert cli.main(words) == 0
    output = capsys.readouterr().out
    for name, value in list(seen_afterwards(seen, output)):
        seen.setdefault(name, []).append(value)
    for option, (value, expected) in rows.items():
        for name, wanted in expected.items():
            found = output if name == "output" else seen.get(name, [])
            assert wanted in found, (option, value, name)


@pytest.mark.parametrize(
    "command",
    [
        name
        for name in COMMANDS
        if name not in ("scaling", "capacity") and "--ranks" in COMMANDS[name]
    ],
)
def test_as_many_ranks_are_started_as_are_asked_for(command, seen, monkeypatch):
    def start(world_size, *_):
        raise ZeroDivisionError(world_size)

    write(command)
    monkeypatch.setattr(ranks, "run_on_ranks", start)
    options = ["--data", "file"]
    if command.split()[-1] in ("dlrm", "deepfm"):
        options += ["--data.sparse", "user"]
    place = ["trained"] if command == "predict" else []
    with pytest.raises(ZeroDivisionError, match=r"^3$"):
        cli.main([*command.split(), *place, *options, "--ranks", "3"])
