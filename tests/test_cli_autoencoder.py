"""Tests of ``sparsekit train autoencoder`` and ``sparsekit recommend``."""

import hashlib
import re

import pytest
import torch

from sparsekit import cli
from sparsekit.datasets import (
    DatasetUnavailableError,
    films,
    movielens_100k,
    movielens_100k_titles,
)
from sparsekit.datasets.fetch import PackagedFile
from sparsekit.models import Autoencoder, DenseAutoencoder, RatingModel, load_recommender
from sparsekit.recipes.autoencoder import command as train_autoencoder
from sparsekit.recipes.autoencoder import recommend as command
from sparsekit.train.plots import read_run


@pytest.fixture
def data(tmp_path):
    """Write the ratings of 40 users; each user has rated items of one half of the 30 items."""
    generator = torch.Generator().manual_seed(0)
    lines = ["user,item,rating,timestamp"]
    for user in range(40):
        items = torch.randperm(15, generator=generator)[:10] * 2 + user % 2
        lines += [
            f"{user},{item},{1 + item % 5},{time}" for time, item in enumerate(items.tolist())
        ]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(lines))
    return path


def train(data, *arguments):
    return cli.main(["train", "autoencoder", "--data", str(data), "--ranks", "1", *arguments])


def results(output):
    """Return the printed table as a dict of name to precision, recall and NDCG."""
    rows = re.findall(r"^(popularity|model) +([\d.]+) +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    return {name: tuple(map(float, values)) for name, *values in rows}


def test_it_beats_what_is_popular(data, capsys):
    assert train(data, "--epochs", "20", "--batch-size", "8") == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0] == (
        f"{data}: 400 ratings; 320 are trained on, the latest fifth of each user's, 80, are tested "
        f"on"
    )
    found = results(output)
    assert found["model"][0] > 1.5 * found["popularity"][0]
    assert f"test P@10 {found['model'][0]:.4f}" in output.splitlines()[20]


def test_the_options_reach_the_model(data, tmp_path, capsys):
    saved, run = tmp_path / "model.pt", tmp_path / "run"
    written = ["--save", str(saved), "--log-to", str(run)]
    assert train(data, "--epochs", "2", "--batch-size", "7", "--dim", "8", *written) == 0
    assert [r["step"] for r in read_run(run)] == [6, 12]
    assert "2 epochs in " in capsys.readouterr().out
    model = load_recommender(saved)
    assert isinstance(model, Autoencoder)
    assert (model.source, model.bias.shape, model.steps) == (str(data), (8,), 2 * 6)
    assert train(data, "--epochs", "3", "--original", *written) == 0
    assert len(read_run(run)) == 3
    assert "epoch 3/3  loss 0." in capsys.readouterr().out
    assert isinstance(load_recommender(saved), DenseAutoencoder)


def test_the_seed_is_obeyed(data, capsys):
    def loss(*arguments):
        assert train(data, "--epochs", "2", *arguments) == 0
        return re.findall(r"loss ([\d.]+)", capsys.readouterr().out)

    for kind in ([], ["--original"]):
        assert loss(*kind) == loss(*kind)
        assert loss(*kind) != loss(*kind, "--seed", "1")


def test_titles_are_shown_where_there_are_any(data, tmp_path, capsys, monkeypatch):
    saved = tmp_path / "model.pt"
    assert train(data, "--epochs", "1", "--save", str(saved)) == 0
    capsys.readouterr()
    Autoencoder.load(saved).save(saved)
    arguments = ["recommend", str(saved), "--out", str(tmp_path / "recs.tsv"), "--show", "2"]
    assert cli.main([*arguments, "--k", "3"]) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path / 'recs.tsv'}: 120 items for 40 users"
    assert head.split() == ["user", "item", "score"]
    assert len(rows) == 2
    # With such a large k, every item that a user has not rated is recommended.
    assert cli.main([*arguments, "--k", str(2**20), "--show", "0"]) == 0
    assert re.search(r": 8\d\d items for 40 users\n$", capsys.readouterr().out)

    monkeypatch.setattr(command, "MOVIELENS", str(data))
    monkeypatch.setattr(command, "movielens_100k_titles", lambda: dict.fromkeys(range(30), "A (1)"))
    assert cli.main(arguments) == 0
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["user", "item", "score", "title"]
    assert all(row.endswith("  A (1)") for row in rows)

    def unavailable():
        raise DatasetUnavailableError("cannot be had")

    monkeypatch.setattr(command, "movielens_100k_titles", unavailable)
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[1] == head.removesuffix("  title")


def test_titles_come_from_the_wheel(tmp_path, monkeypatch):
    content = (
        "item_id:token\ttitle\tyear\tclass\n7\tMépris, Le\t1963\tDrama\n-1\tB\t\tx y\n".encode()
    )
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(
        films, "MOVIELENS_100K_ITEMS", PackagedFile("t", "p==1", "a/b.item", digest, "none")
    )
    (tmp_path / "b.item").write_bytes(content)
    assert movielens_100k_titles(tmp_path) == {7: "Mépris, Le (1963)", -1: "B ()"}


def test_titles_of_movielens_are_of_its_films():
    try:
        found, ratings = movielens_100k_titles(), movielens_100k()
    except DatasetUnavailableError as error:
        pytest.skip(f"MovieLens-100K cannot be had here: {error}")
    assert found[50] == "Star Wars (1977)"
    assert set(ratings.items.tolist()) <= set(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "autoencoder", "--data", "missing"], "--data missing: No such file"),
        (["train", "autoencoder", "--recs", "no/recs.tsv"], "--recs no/recs.tsv: cannot write"),
        (["recommend", "missing"], "missing: No such file"),
        (["recommend", __file__], "test_cli_autoencoder.py: no model that sparsekit train"),
        (["recommend", "ratings"], "ratings: holds a model of 'sparsekit ratings 1'; needed is '"),
        (["recommend", "foreign"], "foreign: no model that sparsekit train --save has written"),
        (["recommend", "missing", "--out", "no/recs.tsv"], "--out no/recs.tsv: cannot write"),
    ],
)
def test_files_that_are_no_use(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The format that `train ratings --save` writes.
    torch.save({"format": RatingModel.FORMAT}, "ratings")
    torch.save({"format": "pt 2"}, "foreign")
    assert cli.main(arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.startswith("sparsekit: ")
    assert errors.count("\n") == 1


def test_what_the_original_way_cannot_hold(data, capsys, monkeypatch):
    monkeypatch.setattr(train_autoencoder, "ORIGINAL_CELLS", 1199)
    assert train(data, "--original") == 2
    assert "a dense matrix of 40 users and 30 items" in capsys.readouterr().err


def test_divergence_in_the_last_step(data, monkeypatch, capsys):
    monkeypatch.setattr(Autoencoder, "score", lambda self, c, v: (c @ v.T).fill_(torch.nan))
    monkeypatch.setattr(Autoencoder, "losses", lambda self, rows: 0 * self.bias.sum() + rows * 0.0)
    assert train(data, "--epochs", "1") == 1
    assert "training has diverged in its last step" in capsys.readouterr().err
