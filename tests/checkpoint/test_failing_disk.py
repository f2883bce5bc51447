"""If the disk fails when data are synced, the save raises and no checkpoint appears."""

import importlib.util
import os

import numpy as np
import pytest
import torch

import sparsekit
from sparsekit import checkpoint
from sparsekit.checkpoint import CheckpointError, Checkpoints, draft
from sparsekit.checkpoint.files import write_small
from sparsekit.checkpoint.reshard import ColumnWriter, columns_of
from sparsekit.checkpoint.tensor_file import Column, write


def model():
    layer = sparsekit.Embedding(9, 2, name="ids")
    layer.assign(torch.arange(3), torch.ones(3, 2))
    return torch.nn.ModuleDict({"ids": layer, "top": torch.nn.Linear(1, 1)})


WORKS = {
    "save": lambda path, out: checkpoint.save(model(), out),
    "async_save": lambda path, out: checkpoint.async_save(model(), out).wait(),
    "Checkpoints": lambda path, out: Checkpoints(out).save(0, model()),
    "reshard": lambda path, out: checkpoint.reshard(path / "saved", out, 2),
    "npz": lambda path, out: checkpoint.export(path / "saved", out, "npz"),
    "safetensors": lambda path, out: checkpoint.export(path / "saved", out, "safetensors"),
    "parquet": lambda path, out: checkpoint.export(path / "saved", out, "parquet"),
    "import": lambda path, out: checkpoint.import_tables(
        checkpoint.sources_of("npz", path / "t.npz"), out
    ),
}


@pytest.fixture
def there(tmp_path):
    """Write the input files of each kind of work."""
    checkpoint.save(model(), tmp_path / "saved")
    np.savez(tmp_path / "t.npz", vectors=np.ones((3, 2), "f4"))
    return tmp_path


@pytest.mark.parametrize("work", WORKS)
def test_each_sync_may_fail(there, monkeypatch, work):
    if work == "parquet" and not importlib.util.find_spec("pyarrow"):
        pytest.skip("needs pyarrow")
    fsync, synced, fails = os.fsync, [], 10**6

    def may_fail(file):
        number = file if isinstance(file, int) else file.fileno()
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        if len(synced) == fails:
            raise OSError(5, "Input/output error")
        return fsync(file)

    monkeypatch.setattr(os, "fsync", may_fail)
    WORKS[work](there, there / "whole")
    count, files = len(synced), sorted(os.listdir("/proc/self/fd"))
    assert count >= 3
    for fails in range(1, count + 1):
        out = there / f"out{fails}"
        synced.clear()
        with pytest.raises(CheckpointError, match="Input/output error") as caught:
            WORKS[work](there, out)
        said = str(caught.value)
        del caught  # its traceback keeps the object with the folder's lock alive
        assert str(out) in said or str(there / f".out{fails}.part-") in said, said
        # At the last sync, the checkpoint has already appeared.
        found = out / "step-000000000000" if work == "Checkpoints" else out
        assert found.exists() == (fails == count), fails
        assert not list(there.rglob(".*part-*"))
        assert sorted(os.listdir("/proc/self/fd")) == files


def test_a_column_that_yields_too_little(tmp_path):
    """A save or a reshard raises if a column yields too little or too much data."""
    for rows in (1, 3):
        column = Column("x", torch.int64, (2,), lambda rows=rows: [np.zeros(rows, "<u8")])
        said = {1: "-8 bytes", 3: r"\+8 bytes"}[rows]
        with pytest.raises(CheckpointError, match=f"x has changed while it was written: {said}"):
            write(tmp_path / str(rows), [column])
    saved = checkpoint.manifest_file.read_manifest(checkpoint.save(model(), tmp_path / "a"))
    table = saved.tables["ids"]
    for rows in (1, 2, 3):
        writer = ColumnWriter(tmp_path / f"new{rows}", columns_of(table, 2))
        writer.append({"vectors": torch.ones(rows, 2), "keys": torch.arange(min(rows, 2))})
        if rows == 2:
            assert writer.finish().bytes == (tmp_path / "new2").stat().st_size
        else:
            with pytest.raises(CheckpointError, match=r"new\d: has \d+ bytes instead of"):
                writer.finish()


WRITERS = {
    "write": lambda path: write(path, []),
    "write_small": lambda path: write_small(path, b"x"),
    "ColumnWriter": lambda path: ColumnWriter(path, []),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_no_file_is_overwritten(tmp_path, writer):
    (tmp_path / "file").write_text("of another")
    with pytest.raises(CheckpointError, match="file: cannot be written: File exists"):
        WRITERS[writer](tmp_path / "file")
    assert (tmp_path / "file").read_text() == "of another"


def test_tensors_begin_at_multiples_of_8(tmp_path):
    for number in range(1, 9):
        file = tmp_path / str(number)
        write(file, [Column("x" * number, torch.int8, (0,), list)])
        length = int.from_bytes(file.read_bytes()[:8], "little")
        assert length % 8 == 0


def test_a_note_that_is_gone_before_the_manifest_is_made(tmp_path):
    writing = checkpoint.save.__globals__["CheckpointWriter"](
        model(), tmp_path / "a", None, None, None, None
    )
    writing.begin()
    writing.write_own()
    note = writing.draft.folder / "rank-0000.part"
    for change in (lambda: note.write_text("{"), note.unlink):
        change()
        with pytest.raises(CheckpointError, match="a folder that all ranks share"):
            writing.publish()
    writing.end()
    assert not list(tmp_path.iterdir())


COMES = {
    "a file": lambda path: path.write_text("x"),
    "a folder": lambda path: (path / "x").mkdir(parents=True),
    "a link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("what", COMES)
def test_what_comes_to_the_place_meanwhile_stays(tmp_path, monkeypatch, what):
    def come(folder, manifest):
        COMES[what](tmp_path / "a")
        original(folder, manifest)

    original = checkpoint.save.__globals__["write_manifest"]
    monkeypatch.setitem(checkpoint.save.__globals__, "write_manifest", come)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/a: there is something already"):
        checkpoint.save(model(), tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


DRAFT = ".a.part-" + "0123456789abcdef" * 2
OTHERS = [
    DRAFT + "0", DRAFT[:-1], DRAFT + ".bak", DRAFT + "\n", DRAFT.replace("a.part", ".part"),
    DRAFT[1:], "a" + DRAFT, DRAFT.replace("f", "F"), ".a.gone-" + "0" * 15, ".a.gone-" + "0" * 17,
    ".a.old-" + "0" * 17, ".a.gone-" + "0" * 16 + "\n", "a.gone-" + "0" * 16,
]  # fmt: skip
REMAINS = [DRAFT, ".a\nb.part-" + "0" * 32, ".a.gone-" + "0" * 16, ".b\n.gone-" + "f" * 16]


def test_only_what_has_the_name_of_a_draft_is_removed(tmp_path):
    for name in [*OTHERS, *REMAINS]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    (tmp_path / DRAFT / "folder").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("")
    (tmp_path / f".b.part-{'0' * 32}").symlink_to("elsewhere")
    (tmp_path / f".b.gone-{'0' * 16}").symlink_to("elsewhere")
    draft.remove_abandoned(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"elsewhere", *OTHERS}
    assert not left & set(REMAINS)
    assert os.listdir(tmp_path / "elsewhere") == ["file"]


def test_a_draft_that_is_removed_again_and_again(tmp_path, monkeypatch):
    def taken(*_, **__):
        raise BlockingIOError

    monkeypatch.setattr(draft, "Lock", taken)
    monkeypatch.setattr(draft.time, "sleep", lambda _: None)
    said = r"\.a\.part-.*: cannot be made: another job removes it again and again"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.save(model(), tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_disappears_before_its_files_do(tmp_path, monkeypatch):
    saved, seen = checkpoint.save(model(), tmp_path / "a"), []
    files = sorted(os.listdir(saved))
    monkeypatch.setattr(draft, "discard", lambda path: seen.append(sorted(os.listdir(path))))
    draft.remove(saved)
    assert seen == [files]
    assert not saved.exists()


def test_a_set_aside_one_goes_back_unless_another_has_come(tmp_path):
    for name in (".a.old-" + "0" * 16, ".b.old-" + "0" * 16, "b", ".c\nd.old-" + "0" * 16):
        (tmp_path / name).mkdir()
        (tmp_path / name / name[:2].strip(".")).write_text("")
    draft.recover(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"a", "b", "c\nd", ".b.old-" + "0" * 16}
    assert os.listdir(tmp_path / "b") == ["b"]
    draft.remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c\nd"}


def test_a_set_aside_one_that_cannot_go_back_stays(tmp_path, monkeypatch):
    for name in (".a.old-" + "0" * 16, ".b.old-" + "0" * 16, "b"):
        (tmp_path / name).mkdir()

    def fail(*_):
        raise PermissionError(13, "Permission denied")

    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(draft.os, "rename", fail)
    draft.recover(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    monkeypatch.undo()
    draft.recover(tmp_path)  # an empty folder at the old path stays, too
    assert sorted(os.listdir(tmp_path)) == [".b.old-" + "0" * 16, "a", "b"]


def test_a_replaced_checkpoint_is_swapped_in_one_step(tmp_path, monkeypatch):
    exchange, swapped = draft.exchange, []

    def recorded(one, other):
        swapped.append((one, other))
        return exchange(one, other)

    monkeypatch.setattr(draft, "exchange", recorded)
    keep = Checkpoints(tmp_path)
    for _ in range(2):
        path = keep.save(0, model())
    ((one, other),) = swapped
    assert (one.name[:24], other) == (f".{path.name}.part-", path)


def test_a_checkpoint_that_has_others_in_it(tmp_path):
    path = checkpoint.save(model(), tmp_path / "a")
    Checkpoints(path).save(3, torch.nn.Linear(1, 1))
    assert checkpoint.verify(path) == [path]


def test_only_folders_named_by_a_step_are_checkpoints(tmp_path, monkeypatch):
    keep = Checkpoints(tmp_path, keep=9)
    for step in (10, 100, 10**18):
        keep.save(step, torch.nn.Linear(1, 1))
    (tmp_path / "step-000000000999").write_text("a file")
    for name in (
        "step-999",
        "step-" + "9" * 11,
        "step-" + "9" * 20,
        "step-000000000998\n",
        "xstep-000000000997",
    ):
        (tmp_path / name).mkdir()
    paths = [tmp_path / f"step-{digits}" for digits in ("0" * 10 + "10", "0" * 9 + "100")]
    found = {10: paths[0], 100: paths[1], 10**18: tmp_path / f"step-1{'0' * 18}"}
    steps_in = checkpoint.folder.steps_in
    listed = sorted(tmp_path.iterdir())
    for order in (listed, listed[::-1]):  # a folder lists its entries in any order
        monkeypatch.setattr("sparsekit.checkpoint.folder.entries", lambda _, order=order: order)
        assert list(steps_in(tmp_path).items()) == list(found.items())
    assert keep.latest() == found[10**18]


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    for look in (checkpoint.latest, checkpoint.verify):
        with pytest.raises(CheckpointError, match=f"{tmp_path}/file: cannot be read: Not a direc"):
            look(tmp_path / "file")


def test_a_folder_whose_lock_cannot_be_taken(tmp_path, monkeypatch):
    lock = checkpoint.lock
    (tmp_path / "a" / ".lock").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"\.lock: cannot be written: Is a directory$"):
        lock.lock_folder(tmp_path / "a")
    other = lock.Lock(tmp_path / ".lock")  # a lock of another job, which has written no note yet
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"writes checkpoints there \(unknown\); give"):
            lock.lock_folder(tmp_path)
        # listdir raises an OSError, since the file is not a folder.
        monkeypatch.setattr(lock.Path, "read_bytes", lambda path: os.listdir(path))
    monkeypatch.undo()
    other.note("process 5")
    with pytest.raises(CheckpointError, match=r"writes checkpoints there \(process 5\); give"):
        lock.lock_folder(tmp_path)
    other.close()


def test_warnings_name_the_line_that_saved(tmp_path):
    keep = Checkpoints(tmp_path)
    keep.save(5, model())
    for save in (keep.save, lambda *arguments: keep.async_save(*arguments) and keep.wait()):
        with pytest.warns(UserWarning, match="stays the latest") as said:
            save(4, model())
        assert [each.filename for each in said] == [__file__]


def test_only_a_save_of_a_step_replaces_what_is_there(tmp_path):
    (tmp_path / "a").mkdir()
    with (
        pytest.raises(CheckpointError, match=f"^{tmp_path}/a: there is something already"),
        draft.published(tmp_path / "a"),
    ):
        pytest.fail("nothing is written")
    assert os.listdir(tmp_path) == ["a"]
