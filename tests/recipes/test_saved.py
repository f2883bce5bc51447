"""Files of trained models are written by rank 0, and other files are refused."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sparsekit.nn import DistributedEmbedding
from sparsekit.recipes import saved

FORMAT = "sparsekit ratings 1"


class Model(saved.SavedModel):
    FORMAT = FORMAT

    def content(self):
        return {"weight": torch.ones(2)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pt"


def test_what_is_written_is_read(path):
    Model().save(path)
    found = saved.read(path, "sparsekit other 1", FORMAT)
    assert found.keys() == {"format", "weight"}
    assert [file.name for file in path.parent.iterdir()] == ["model.pt"]


def test_a_save_that_fails_leaves_the_earlier_file(path, monkeypatch):
    def disk_full(content, file):
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    Model().save(path)
    before = path.read_bytes()
    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(OSError, match="No space left"):
        Model().save(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["model.pt"]


@pytest.mark.parametrize("content", [[1], {}, {"format": None}, {"format": 1}, {"format": "x 1"}])
def test_other_contents_are_no_models(path, content):
    torch.save(content, path)
    message = rf"^{path}: no model that sparsekit train --save has written$"
    with pytest.raises(ValueError, match=message):
        saved.read(path, FORMAT)


def test_a_model_of_another_kind_is_named(path):
    Model().save(path)
    message = rf"^{path}: holds a model of '{FORMAT}'; needed is 'a' or 'b'$"
    with pytest.raises(ValueError, match=message):
        saved.read(path, "a", "b")


def test_no_object_but_tensors_is_unpickled(path):
    torch.save({"format": FORMAT, "path": Path("x")}, path)
    with pytest.raises(ValueError, match="no model that"):
        saved.read(path, FORMAT)


def test_errors_of_the_system_pass(tmp_path):
    with pytest.raises(FileNotFoundError):
        saved.read(tmp_path / "missing", FORMAT)
    with pytest.raises(IsADirectoryError):
        saved.read(tmp_path, FORMAT)


def test_rank_0_alone_writes(path, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    Model().save(path)
    assert not path.exists()
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    Model().save(path)
    assert path.exists()


def test_the_rows_of_all_ranks_are_on_rank_0(monkeypatch):
    layer = DistributedEmbedding("sum", 9, 2, 1)
    keys, vectors = torch.tensor([5, 7]), torch.tensor([[1.0, 2], [3, 4]])
    layer.assign(keys, vectors)
    found = saved.all_items(layer)
    assert [part.tolist() for part in found] == [keys.tolist(), vectors.tolist()]
    assert [part.shape for part in saved.all_items(DistributedEmbedding("sum", 9, 2, 1))] == [
        (0,), (0, 2)
    ]  # fmt: skip

    def gather(own, into):
        if into is not None:
            into[:] = [own, [], [(keys + 10, -vectors)]]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "gather_object", gather)
    for rank, expected in ((0, [5, 7, 15, 17]), (1, [])):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        keys_of_all, vectors_of_all = saved.all_items(layer)
        assert keys_of_all.tolist() == expected
        assert vectors_of_all.shape == (len(expected), 2)
