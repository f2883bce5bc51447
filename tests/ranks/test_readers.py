"""Readers of sparsekit.data get their rank from torch.distributed."""

import pickle
from unittest import mock

import torch.distributed as dist

from sparsekit.data import CsvReader


def _rows(rank, path):
    reader = CsvReader(path, 10, label="row", shuffle=True, block_bytes=100)
    copied = pickle.loads(pickle.dumps(reader))
    # The copy reads as in a worker process, in which torch.distributed is not in use.
    with mock.patch.object(dist, "is_initialized", return_value=False):
        theirs = [batch.label.int().tolist() for batch in copied]
    mine = [batch.label.int().tolist() for batch in reader]
    assert theirs == mine
    return mine, reader.steps_per_epoch()


def test_ranks_read_every_row_once_in_equally_many_steps(ranks, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("row\n" + "".join(f"{row}\n" for row in range(101)))
    results = ranks(_rows, str(path))
    assert sorted(row for batches, _ in results for batch in batches for row in batch) == [
        *range(101)
    ]
    assert len({len(batches) for batches, _ in results}) == 1
    assert {steps for _, steps in results} == {len(results[0][0])}
