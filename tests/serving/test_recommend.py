"""`sparsekit recommend --snapshot` recommends by the vectors of a snapshot."""

import re

import numpy as np
import torch

from sparsekit import cli
from sparsekit.datasets import Ratings
from sparsekit.models import Autoencoder, DenseAutoencoder, RatedItems, recommend
from sparsekit.recipes.autoencoder.served import recommend_from
from sparsekit.serving import Snapshot
from sparsekit.serving.delta_log import DeltaLog
from sparsekit.serving.export import export_module


def model_of(seed=0, **options):
    """Make a model of random ratings of 70 items by 40 users, with vectors of some size."""
    rng = np.random.default_rng(seed)
    users = torch.arange(40).repeat_interleave(12) * 3
    items = torch.from_numpy(np.concatenate([rng.choice(70, 12, False) for _ in range(40)])) + 500
    stars = torch.from_numpy(rng.integers(1, 6, len(users))).float()
    history = RatedItems(Ratings(users, items, stars, torch.arange(len(users)).double()))
    model = Autoencoder(history, dim=6, seed=seed, **options)
    for name in ("rated", "scored"):
        model._table(name).assign(history.items, torch.from_numpy(
            rng.standard_normal((len(history.items), 6 + (name == "scored"))).astype(np.float32)
        ))  # fmt: skip
    return model


def test_a_snapshot_recommends_what_the_model_does(tmp_path):
    model = model_of()
    whole = recommend(model, 8)
    with Snapshot(export_module(model, tmp_path / "model.sks", rows="float32")) as snapshot:
        best = recommend_from(snapshot, model, 8)
    assert best.users.tolist() == whole.users.tolist()
    assert best.items.tolist() == whole.items.tolist()
    torch.testing.assert_close(best.scores, whole.scores)
    with Snapshot(export_module(model, tmp_path / "small.sks", rows="int8")) as snapshot:
        rounded = recommend_from(snapshot, model, 8)
    torch.testing.assert_close(rounded.scores, whole.scores, atol=0.1, rtol=0)
    assert not torch.equal(rounded.scores, whole.scores)


def test_places_without_an_item(tmp_path):
    """A user who has rated all but a few items gets those, and nothing else."""
    model = model_of()
    with Snapshot(export_module(model, tmp_path / "model.sks")) as snapshot:
        best = recommend_from(snapshot, model, 69)
    items = len(model.history.items)
    assert best.scores.isfinite().sum(1).tolist() == [items - 12] * 40
    assert len(list(best.rows())) == 40 * (items - 12)


def test_the_command_reads_a_file_and_the_newest_version_of_a_log(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = model_of()
    model.save("model.pt")
    export_module(model, "model.sks", rows="float32")
    assert cli.main(["recommend", "model.pt", "--out", "of_model.tsv"]) == 0
    assert (
        cli.main(["recommend", "model.pt", "--out", "of_file.tsv", "--snapshot", "model.sks"]) == 0
    )

    def written(name):
        rows = [line.split("\t") for line in (tmp_path / name).read_text().splitlines()]
        return [row[:2] for row in rows]

    assert written("of_file.tsv") == written("of_model.tsv")
    log = DeltaLog("log", model, rows="float32", compact_at=None)
    scored = model._table("scored")
    with torch.no_grad():
        scored.assign(model.history.items, -scored.vectors(model.history.items))
    log.flush()
    log.close()
    model.save("later.pt")
    assert cli.main(["recommend", "later.pt", "--out", "later.tsv"]) == 0
    assert cli.main(["recommend", "model.pt", "--out", "of_log.tsv", "--snapshot", "log"]) == 0
    assert written("of_log.tsv") == written("later.tsv") != written("of_model.tsv")


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = model_of()
    model.save("model.pt")
    export_module(model, "scored.sks", tables=["embeddings.layers.scored"])
    other = Autoencoder(model.history, dim=5)
    other.save("other.pt")
    export_module(model, "model.sks")
    DenseAutoencoder(model.history).save("dense.pt")
    for name, snapshot, message in [
        ("model.pt", "none.sks", "--snapshot none.sks: .*No such file"),
        ("model.pt", "model.pt", "--snapshot model.pt: "),
        ("model.pt", "scored.sks", "--snapshot scored.sks: no table of a layer named rated"),
        ("other.pt", "model.sks", "table embeddings.layers.rated has dim 6, but the model needs 5"),
        ("dense.pt", "model.sks", "dense.pt has no tables, as it is dense"),
    ]:
        assert cli.main(["recommend", name, "--snapshot", snapshot]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error), error
