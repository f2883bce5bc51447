"""`sparsekit serve demo` recommends from what another process goes on learning."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from patience import patience

from sparsekit import cli
from sparsekit.datasets import read_ratings
from sparsekit.recipes.ratings.served import Server, Training
from sparsekit.serving import Snapshot


@pytest.fixture
def ratings(tmp_path):
    """Write ratings of 60 films by 80 users, of whom each has rated 20 films."""
    rng = np.random.default_rng(0)
    lines = ["user,item,rating,timestamp"]
    for user in range(80):
        for place, film in enumerate(rng.choice(60, 20, replace=False)):
            stars = 1 + (user + film) % 5
            lines.append(f"{user},{film + 1000},{stars},{place}")
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_new_ratings_change_recommendations(ratings, capsys):
    assert cli.main(["serve", "demo", "--data", str(ratings), "--user", "7", "--seconds", "2"]) == 0
    printed = capsys.readouterr().out
    head, before, new, after, freshness = printed.split("\n\n")
    assert "1,600 ratings" in head
    assert before.startswith("User 7 has rated 20 films.")
    assert len(before.splitlines()) == len(new.splitlines()) == len(after.splitlines()) == 6
    films = [set(re.findall(r"^ +(\d{4})\b", part, re.MULTILINE)) for part in (before, new, after)]
    assert not films[1] & films[2]  # what the user has rated is not recommended
    assert before.splitlines()[1:] != after.splitlines()[1:]
    versions, p50, p99 = re.search(
        r"^(\d+) versions in .* p50 ([\d.]+) s, p99 ([\d.]+) s$", freshness
    ).groups()
    assert int(versions) > 1
    assert 0 < float(p50) <= float(p99) < patience(5)


def test_films_rise_that_the_user_rates(ratings, tmp_path):
    data = read_ratings(ratings)
    history = data.items[data.users == 7].numpy()
    with Training(str(tmp_path / "log"), data, 0.05) as trainer:
        trainer.wait()
        with Snapshot(tmp_path / "log") as snapshot:
            server = Server(snapshot)
            films = server.recommend(7, history)[0].tolist()
            worst = films[-6:]
            step = trainer.rate(7, np.array(worst), 5.0)
            trainer.alive_while(server.refresh, lambda: snapshot.step > step + 200)
            films = server.recommend(7, history)[0].tolist()
    assert sum(map(films.index, worst)) / 6 < len(films) / 2


def test_users_to_whom_nothing_can_be_recommended(ratings, capsys):
    assert cli.main(["serve", "demo", "--data", str(ratings), "--user", "99"]) == 2
    assert capsys.readouterr().err == "sparsekit: --user 99: has rated nothing\n"
    with ratings.open("a") as file:
        file.writelines(f"99,{film},3,1\n" for film in range(1000, 1060))
    assert cli.main(["serve", "demo", "--data", str(ratings), "--user", "99"]) == 2
    assert capsys.readouterr().err == "sparsekit: --user 99: has rated everything\n"


def is_running(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{process_id}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_training_ends_with_the_command(ratings, ended_by):
    command = [sys.executable, "-m", "sparsekit", "serve", "demo", "--seconds", "600"]
    with subprocess.Popen(
        [*command, "--data", ratings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        try:
            trainer = int(re.search(r"Process (\d+) trains", demo.stdout.readline())[1])
            while not demo.stdout.readline().startswith("User"):
                pass
            demo.send_signal(ended_by)
            assert demo.wait(patience(20)) == (130 if ended_by == signal.SIGINT else -9)
            assert "Traceback" not in demo.stderr.read()
        finally:
            demo.kill()
    end = time.monotonic() + patience(20)
    while is_running(trainer):
        assert time.monotonic() < end
        time.sleep(0.01)
