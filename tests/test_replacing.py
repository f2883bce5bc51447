"""A file is replaced entirely or not at all, even after an error or with another writer."""

import os
import stat
import threading

import pytest

from sparsekit._replacing import replacing
from sparsekit.data import write_criteo_sample


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    with replacing(path) as part:
        part.write_text("new")
        assert part.parent == tmp_path
        assert not path.exists()
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_what_was_there_stays(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write():
        with replacing(path) as part:
            part.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_pipe_or_device_is_written_into(tmp_path):
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    with replacing(path) as part:
        part.write_text("all")
    reader.join()
    assert read == ["all"]
    assert stat.S_ISFIFO(path.stat().st_mode)
    with replacing("/dev/null") as part:
        part.write_text("nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_name_may_be_as_long_as_names_can_be(tmp_path):
    path = tmp_path / ("n" * 255)
    with replacing(path) as part:
        part.write_text("new")
    assert path.read_text() == "new"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there/a.txt"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link) as part:
        part.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert names(tmp_path / "there") == ["a.txt"]


def test_two_jobs_that_write_one_file_do_not_mix(tmp_path):
    path, both = tmp_path / "a.gz", threading.Barrier(2)

    def write(seed):
        write_criteo_sample(path, 20_000, seed=seed, on_rows=meet)

    def meet(_):
        if not both.broken:
            both.wait(30)

    jobs = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    written = path.read_bytes()
    alone = []
    for seed in (1, 2):
        write_criteo_sample(path, 20_000, seed=seed)
        alone.append(path.read_bytes())
    assert written in alone
    assert names(tmp_path) == ["a.gz"]
