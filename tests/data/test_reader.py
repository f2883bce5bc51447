"""Readers put each row into the right batch, on ranks, in workers and after a resume."""

import itertools
import json
import pickle
import re

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from sparsekit.data import CriteoReader, CsvReader, Keys, ParquetReader, Prefetcher
from sparsekit.errors import DataFormatError

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

ROWS = 1000
FORMATS = ["text", "gzip", "parquet"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a dict of format name to two files in that format, with rows 0 to ROWS - 1."""
    import gzip

    folder = tmp_path_factory.mktemp("rows")
    made = {name: [folder / f"{i}.{name}" for i in range(2)] for name in FORMATS}
    for i, rows in enumerate((range(700), range(700, ROWS))):
        text = "key,row\n" + "".join(f"{row % 50},{row}\n" for row in rows)
        made["text"][i].write_text(text)
        made["gzip"][i].write_bytes(gzip.compress(text.encode()))
        table = pa.table({"row": list(rows), "key": [row % 50 for row in rows]})
        parquet.write_table(table, made["parquet"][i], row_group_size=90)
    return made


def reader(files, format, batch_size=64, **settings):
    settings = {"label": "row", "sparse": {"key": "int"}, **settings}
    if format == "parquet":
        return ParquetReader(files[format], batch_size, **settings)
    return CsvReader(files[format], batch_size, block_bytes=500, **settings)


def numbers(batches):
    """Return the row numbers of all batches, after checking that the keys match."""
    rows = []
    for batch in batches:
        assert batch.sparse.values().tolist() == [row % 50 for row in batch.label.tolist()]
        assert batch.sparse.stride() == batch.rows
        rows += batch.label.int().tolist()
    return rows


@pytest.mark.parametrize("format", FORMATS)
def test_shuffling_is_another_seeded_permutation_each_epoch(files, format):
    shuffled = reader(files, format, shuffle=True, seed=3)
    first, second = numbers(shuffled), numbers(shuffled)
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(first)) < 60
    again = reader(files, format, shuffle=True, seed=3)
    assert numbers(again) == first
    again.set_epoch(0)
    assert numbers(again) == first
    assert numbers(again) == second
    assert numbers(reader(files, format, shuffle=True, seed=4)) != first
    plain = reader(files, format)
    assert numbers(plain) == numbers(plain) == list(range(ROWS))
    # Files are read in the given order.
    turned = {format: files[format][::-1]}
    assert numbers(reader(turned, format)) == [*range(700, ROWS), *range(700)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 64, 999, 5000])
def test_ranks_read_every_row_once_in_equally_many_steps(
    files, format, shuffle, world_size, batch_size
):
    of_rank = []
    for rank in range(world_size):
        mine = reader(files, format, batch_size, shuffle=shuffle, rank=rank, world_size=world_size)
        of_rank.append(list(mine))
        assert len(of_rank[-1]) == mine.steps_per_epoch()
    assert len({len(batches) for batches in of_rank}) == 1
    rows = [numbers(batches) for batches in of_rank]
    assert sorted(itertools.chain(*rows)) == list(range(ROWS))
    assert mine.counts_fast == (format != "gzip")
    assert max(map(len, rows)) - min(map(len, rows)) <= 1
    # All batches but the last have their full size.
    assert all(batch.rows == batch_size for batches in of_rank for batch in batches[:-2])
    if not shuffle:
        assert list(itertools.chain(*rows)) == list(range(ROWS))


def test_more_ranks_than_rows(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("row,key\n0,0\n1,1\n")
    batches = [list(reader({"text": [path]}, "text", rank=r, world_size=3)) for r in range(3)]
    assert [[batch.rows for batch in part] for part in batches] == [[0], [1], [1]]
    empty = batches[0][0]
    assert empty.label.shape == (0,)
    assert empty.dense.shape == (0, 0)
    assert empty.sparse.keys() == ["key"]
    assert empty.sparse.to_dict()["key"][1].tolist() == [0]
    # An empty batch is a step like any other and has a state.
    begun = reader({"text": [path]}, "text", rank=0, world_size=3)
    next(iter(begun))
    state = begun.state_dict()
    assert (state["epoch"], state["step"], state["shards"]) == (0, 1, 3)
    begun.load_state_dict(state)
    assert list(begun) == []
    assert begun.state_dict() == {**state, "epoch": 1, "step": 0}


@pytest.mark.parametrize("format", FORMATS)
def test_batches_without_rows_have_the_features_of_others(files, format):
    """The order of features does not depend on the order in which they were given."""
    for names in (["key", "row"], ["row", "key"]):
        settings = {"label": None, "sparse": dict.fromkeys(names, "int"), "world_size": 2 * ROWS}
        assert next(iter(reader(files, format, rank=0, **settings))).label is None
        of_ranks = [reader(files, format, rank=rank, **settings) for rank in range(2)]
        empty, one = (next(iter(of_rank)) for of_rank in of_ranks)
        assert (empty.rows, one.rows) == (0, 1)
        assert empty.sparse.keys() == one.sparse.keys()
        assert sorted(one.sparse.keys()) == ["key", "row"]
    for rank in range(2):
        settings = {"dense": ["key"], "sparse": [], "rank": rank, "world_size": 2 * ROWS}
        batch = next(iter(reader(files, format, **settings)))
        assert batch.dense.shape == (rank, 1)
        assert batch.label.shape == (rank,)
        assert batch.dense.dtype == batch.label.dtype == torch.float32


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_resuming_gives_the_batches_that_were_left(files, format, shuffle, world_size):
    for rank in range(world_size):

        def make(rank=rank):
            return reader(files, format, shuffle=shuffle, rank=rank, world_size=world_size)

        whole = make()
        first_epoch, second_epoch = [[b.label.tolist() for b in whole] for _ in range(2)]
        for stop in range(len(first_epoch)):
            begun = make()
            for _, _batch in zip(range(stop), begun, strict=False):
                pass
            state = json.loads(json.dumps(begun.state_dict()))
            assert state["step"] == stop
            resumed = make()
            resumed.load_state_dict(state)
            assert [batch.label.tolist() for batch in resumed] == first_epoch[stop:]
            assert [batch.label.tolist() for batch in resumed] == second_epoch
        assert whole.state_dict()["epoch"] == 2


def test_an_iteration_that_was_left_begins_anew(files):
    left = reader(files, "text", shuffle=True)
    first = next(iter(left))
    assert torch.equal(next(iter(left)).label, first.label)
    assert left.state_dict()["step"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 32}, "batch_size=64, and this reader has 32"),
        ({"shuffle": True}, "shuffle=False, and this reader has True"),
        ({"seed": 1}, "seed=0, and this reader has 1"),
        (
            {"rank": 0, "world_size": 2},
            "in mid-epoch with 1 ranks and workers, and now there are 2",
        ),
        ({"label": None}, "label='row', and this reader has None"),
        ({"sparse": {"key": Keys("int", seed=1)}}, r"sparse=.* 0\]}, and this reader has .* 1\]}"),
        ({"quote": None}, "quote='\"', and this reader has None"),
    ],
)
def test_the_state_of_another_reader_is_refused(files, settings, message):
    begun = reader(files, "text")
    next(iter(begun))
    state = begun.state_dict()
    with pytest.raises(ValueError, match=f"CsvReader: the state was saved .*{message}"):
        reader(files, "text", **settings).load_state_dict(state)
    with pytest.raises(ValueError, match="files="):
        reader({"text": files["text"][:1]}, "text").load_state_dict(state)
    with pytest.raises(ValueError, match="not the state of a reader"):
        reader(files, "text").load_state_dict({"epoch": 1})
    with pytest.raises(ValueError, match=r"dense=\['a'\], and this reader has \[\]"):
        reader(files, "text").load_state_dict({**state, "dense": ["a"]})
    # Only the batch size and the ranks may differ, and only at the beginning of an epoch.
    if not {"batch_size", "rank"} & settings.keys():
        with pytest.raises(ValueError, match=message):
            reader(files, "text", **settings).load_state_dict({**state, "step": 0})


def test_a_state_belongs_to_blocks_if_they_are_shuffled(files):
    for shuffle in (False, True):
        begun = CsvReader(files["text"], 64, label="row", shuffle=shuffle, block_bytes=500)
        first = next(iter(begun)).label
        other = CsvReader(files["text"], 64, label="row", shuffle=shuffle, block_bytes=600)
        if shuffle:
            with pytest.raises(ValueError, match="block_bytes=500, and this reader has 600"):
                other.load_state_dict(begun.state_dict())
        else:
            other.load_state_dict(begun.state_dict())
            assert next(iter(other)).label[0] == first[-1] + 1


@pytest.mark.parametrize("format", FORMATS)
def test_a_state_belongs_to_files_as_they_were(files, format, tmp_path):
    begun = reader(files, format)
    next(iter(begun))
    changed = [tmp_path / path.name for path in files[format]]
    for path, copy in zip(files[format], changed, strict=True):
        copy.write_bytes(path.read_bytes())
    same = reader({format: changed}, format)
    same.load_state_dict(begun.state_dict())
    assert numbers(same)[0] == 64
    if format == "parquet":
        parquet.write_table(pa.table({"row": [1], "key": [1]}), changed[1])
    else:
        changed[1].write_bytes(changed[1].read_bytes() * 2)
    with pytest.raises(ValueError, match="the state was saved with files="):
        reader({format: changed}, format).load_state_dict(begun.state_dict())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("batch_size", [64, 50])  # the last batch is smaller, or full
def test_a_state_beyond_the_end_is_refused(files, format, world_size, batch_size):
    def make():
        settings = {"rank": 0, "world_size": world_size, "shuffle": True}
        return reader(files, format, batch_size, **settings)

    whole = make()
    batches = [batch.label.tolist() for batch in whole]
    second = [batch.label.tolist() for batch in whole]
    steps = len(batches)
    state = {**make().state_dict(), "step": steps}
    resumed = make()
    resumed.load_state_dict(state)  # the state after the last batch
    assert list(resumed) == []
    assert [batch.label.tolist() for batch in resumed] == second
    for step in (steps + 1, 10**9):
        with pytest.raises(ValueError, match=f"of step {step}, but an epoch has only {steps}"):
            make().load_state_dict({**state, "step": step})
    for key in ("step", "epoch", "skipped", "shards"):
        for wrong in (-1, 1.0, "1", None):
            with pytest.raises(ValueError, match="not the state of a reader"):
                make().load_state_dict({**state, key: wrong})


def test_a_state_that_was_loaded_is_kept_until_the_next_batch(files):
    begun = reader(files, "text", shuffle=True)
    for _, _batch in zip(range(3), begun, strict=False):
        pass
    state = begun.state_dict()
    for make in (lambda inner: inner, Prefetcher):
        resumed = make(reader(files, "text", shuffle=True))
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        iterator = iter(resumed)
        assert resumed.state_dict() == state
        next(iterator)
        assert resumed.state_dict() == {**state, "step": 4}


def test_an_epoch_that_is_set_begins_at_its_beginning(files):
    begun = reader(files, "text", shuffle=True)
    first, second = ([batch.label.tolist() for batch in begun] for _ in range(2))
    begun.set_epoch(0)
    next(iter(begun))
    resumed = reader(files, "text", shuffle=True)
    resumed.load_state_dict(begun.state_dict())
    resumed.set_epoch(1)
    assert resumed.state_dict()["step"] == 0
    assert [batch.label.tolist() for batch in resumed] == second != first
    for epoch in (-1, 2**31):
        with pytest.raises(ValueError, match=r"CsvReader: epoch must be in \[0, 2147483647\]"):
            resumed.set_epoch(epoch)


def test_the_beginning_of_an_epoch_is_the_same_for_any_batch_size(files):
    begun = reader(files, "text", shuffle=True)
    first, second = (numbers(list(begun)) for _ in range(2))
    other = reader(files, "text", shuffle=True, batch_size=32)
    state = {**begun.state_dict(), "epoch": 1}
    other.load_state_dict(state)
    assert numbers(list(other)) == second != first
    # The state can be loaded on any number of ranks; the ranks then share the rows.
    shares = [reader(files, "text", shuffle=True, rank=rank, world_size=2) for rank in range(2)]
    for share in shares:
        share.load_state_dict(state)
    assert numbers(itertools.chain(*shares)) == second


@pytest.mark.parametrize("format", FORMATS)
def test_workers_of_a_dataloader_share_the_rows(files, format):
    shared = reader(files, format, shuffle=True)
    loader = DataLoader(shared, batch_size=None, num_workers=2)
    batches = list(loader)
    assert sorted(numbers(batches)) == list(range(ROWS))
    assert len(batches) == shared.steps_per_epoch(num_workers=2)
    # Without workers, the loader yields the reader's batches.
    alone = DataLoader(reader(files, format), batch_size=None)
    assert numbers(alone) == list(range(ROWS))


class States(IterableDataset):
    """Dataset of (batch, reader's state after it), for use in a loader's workers."""

    def __init__(self, reader):
        self.reader = reader

    def __iter__(self):
        for batch in self.reader:
            yield batch.label.tolist(), self.reader.state_dict()


def test_the_state_of_a_worker_is_that_of_its_share(files):
    loader = DataLoader(States(reader(files, "text")), batch_size=None, num_workers=2)
    batches = list(loader)
    for worker in range(2):
        (_, state), (following, _) = batches[worker : worker + 3 : 2]
        assert (state["step"], state["shards"]) == (1, 2)
        share = reader(files, "text", rank=worker, world_size=2)
        share.load_state_dict(state)
        assert next(iter(share)).label.tolist() == following
        with pytest.raises(ValueError, match="with 2 ranks and workers, and now there are 1"):
            reader(files, "text").load_state_dict(state)


def test_workers_of_ranks_share_the_rows_of_each(files):
    loaders = [
        DataLoader(reader(files, "text", rank=rank, world_size=2), batch_size=None, num_workers=2)
        for rank in range(2)
    ]
    first, second = (list(loader) for loader in loaders)
    steps = reader(files, "text", rank=0, world_size=2).steps_per_epoch(num_workers=2)
    assert len(first) == len(second) == steps
    assert sorted(numbers(first)) == list(range(ROWS // 2))
    assert sorted(numbers(second)) == list(range(ROWS // 2, ROWS))


def test_a_pickled_reader_reads_the_same(files):
    original = reader(files, "text", shuffle=True)
    copied = pickle.loads(pickle.dumps(original))
    assert numbers(copied) == numbers(original)


def test_skipped_rows_are_counted_over_states_and_epochs(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(
        "row,key\n" + "".join(f"{i},{'x' if i % 10 == 3 else i % 50}\n" for i in range(100))
    )
    skipping = reader({"text": [path]}, "text", 16, on_error="skip")
    batches = list(skipping)
    assert numbers(batches) == [i for i in range(100) if i % 10 != 3]
    assert [batch.rows for batch in batches] == [14, 15, 14, 14, 15, 14, 4]
    assert skipping.skipped == 10
    resumed = reader({"text": [path]}, "text", 16, on_error="skip")
    resumed.load_state_dict(skipping.state_dict())
    list(resumed)
    assert resumed.skipped == 20
    with pytest.raises(DataFormatError, match=r"line 5, column 2 \('key'\)"):
        list(reader({"text": [path]}, "text", 16))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_malformed_line_is_found_in_any_order(tmp_path, world_size):
    path = tmp_path / "x.csv"
    path.write_text("row,key\n" + "".join(f"{i},{'x' if i == 777 else i}\n" for i in range(ROWS)))
    messages = []
    for rank in range(world_size):
        settings = {"rank": rank, "world_size": world_size, "shuffle": True}
        try:
            list(reader({"text": [path]}, "text", **settings))
        except DataFormatError as error:
            messages.append(str(error))
    assert messages == [f"{path}, line 779, column 2 ('key'): not a 64-bit integer: '777,x'"]


def test_the_prefetcher_has_the_state_of_what_was_handed_out(files):
    ahead = Prefetcher(reader(files, "text", shuffle=True), depth=5)
    whole = [batch.label.tolist() for batch in reader(files, "text", shuffle=True)]
    assert ahead.state_dict()["step"] == 0
    iterator = iter(ahead)
    for step in range(1, 4):
        assert next(iterator).label.tolist() == whole[step - 1]
        assert ahead.state_dict()["step"] == step
    state = ahead.state_dict()
    iterator.close()
    resumed = Prefetcher(reader(files, "text", shuffle=True))
    resumed.load_state_dict(state)
    assert [batch.label.tolist() for batch in resumed] == whole[3:]
    assert resumed.state_dict()["epoch"] == 1


def test_criteo_reader_is_a_reader_of_the_same_kind(tmp_path):
    path = tmp_path / "day"
    path.write_text("1" + "\t5" * 13 + "\tdeadbeef" * 26 + "\n")
    (batch,) = CriteoReader(path, 5)
    assert batch.sparse.values().tolist() == [0xDEADBEEF] * 26


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_labels_outside_a_range_are_malformed(files, format, shuffle):
    """For row r, the error names line r + 2 of a text file, or row r + 1 of a Parquet file."""
    limited = reader(files, format, batch_size=1, shuffle=shuffle)
    limited.limit_labels(0, ROWS - 1)
    assert sorted(numbers(limited)) == list(range(ROWS))
    limited.limit_labels(0, 0, between=False)
    rows = iter(limited)
    with pytest.raises(DataFormatError, match="the label must be 0 or 0") as caught:
        list(rows)
    place = re.search(
        rf"(0|1)\.{format}, (line|row) (\d+), column (2 \('row'\)|'row'): ", str(caught.value)
    )
    file, kind, number, _ = place.groups()
    label = int(number) - {"line": 2, "row": 1}[kind] + 700 * int(file)
    assert 0 < label < ROWS
    assert shuffle or label == 1
    skipping = reader(files, format, shuffle=shuffle, on_error="skip")
    skipping.limit_labels(100, 899)
    assert sorted(numbers(skipping)) == list(range(100, 900))
    assert skipping.skipped == 200
    skipping.limit_labels(100, 899, between=False)
    assert sorted(numbers(skipping)) == [100, 899]


@pytest.mark.parametrize("format", FORMATS)
def test_a_rank_reads_nothing_behind_its_share(files, format, tmp_path):
    copies = [tmp_path / path.name for path in files[format]]
    for path, copy in zip(files[format], copies, strict=True):
        copy.write_bytes(path.read_bytes())
    first = reader({format: copies}, format, rank=0, world_size=2)
    assert first.count_rows() == ROWS
    copies[1].unlink()
    assert numbers(first) == list(range(ROWS // 2))


@pytest.mark.parametrize("step", [1, 2])
def test_a_state_is_checked_without_reading_what_comes_behind_it(tmp_path, step):
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_text("y\n" + "1\n" * 8)
    state = {**CsvReader(paths, 4, dense=["y"]).state_dict(), "step": step}
    resumed = CsvReader(paths, 4, dense=["y"])
    paths[1].unlink()
    resumed.load_state_dict(state)
    with pytest.raises(FileNotFoundError):
        resumed.load_state_dict({**state, "step": 3})


def test_a_copy_for_a_worker_knows_its_rank(tmp_path, monkeypatch):
    """A copy in a worker keeps the reader's rank, although it does not use torch.distributed."""
    path = tmp_path / "x.csv"
    path.write_text("y\n" + "".join(f"{row}\n" for row in range(9)))
    reader = CsvReader(path, 2, dense=["y"])
    with monkeypatch.context() as context:
        for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
            context.setattr(torch.distributed, name, lambda value=value: value)
        copied = pickle.loads(pickle.dumps(reader))
        rows = [batch.dense.tolist() for batch in reader]
    assert [batch.dense.tolist() for batch in copied] == rows == [[[4], [5]], [[6], [7]], [[8]]]


def test_limits_of_labels_without_labels(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("y\n5\n")
    reader = CsvReader(path, 2, dense=["y"])
    reader.limit_labels(0, 1)
    assert [batch.label for batch in reader] == [None]
