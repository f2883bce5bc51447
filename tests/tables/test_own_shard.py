"""A saved shard counts, is refused by torch's checkpoints, and is missed where it is not saved."""

import copy
import gc
import io
import pickle
import warnings

import pytest
import torch

from sparsekit.tables.own_shard import OwnShard, exchange_ref, nothing, warn_of_parts_not_saved


def test_a_saved_shard_counts_and_is_plain_in_the_file():
    exchange_type = type("Exchange", (), {"parts_saved": 0})
    exchange = exchange_type()
    shard = OwnShard.of(torch.tensor([1, 2]), "n", exchange_ref(exchange))
    copied = copy.deepcopy({"a": shard, "b": shard})
    assert copied["a"] is copied["b"]
    assert type(copied["a"]) is OwnShard
    assert (copied["a"].layer, copied["a"].tolist()) == ("n", [1, 2])
    for count, one in enumerate((shard, copied["a"]), 1):
        file = io.BytesIO()
        torch.save({"shard": one}, file)
        assert exchange.parts_saved == count
        file.seek(0)
        assert type(torch.load(file)["shard"]) is torch.Tensor
    empty = shard.new_empty((3, 1), dtype=torch.int32)
    assert (type(empty), empty.shape, empty.dtype) == (OwnShard, (3, 1), torch.int32)
    assert copied["a"].data_ptr() != shard.data_ptr()
    with pytest.raises(RuntimeError, match=r"^n: torch.distributed.checkpoint .* rank 1 of 2;"):
        shard.__create_write_items__("shard", None)
    reference = exchange_ref(exchange)
    del exchange
    gc.collect()
    assert reference() is None
    assert type(pickle.loads(pickle.dumps(shard))) is torch.Tensor
    assert exchange_ref(None) is nothing
    alone = OwnShard.of(torch.tensor([0, 2]), "n", nothing)
    assert torch.equal(pickle.loads(pickle.dumps(alone)), torch.tensor([0, 2]))


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ([0, 1], r"on ranks \[1\] and not on ranks \[0\]"),
        ([1, 0], r"on ranks \[0\] and not on ranks \[1\]"),
        ([2, 3, 3], r"on ranks \[1, 2\] and not on ranks \[0\]"),
        ([0, 1, 2], r"on ranks \[2\] and not on ranks \[0, 1\]"),
    ],
)
def test_a_part_that_was_not_saved_is_warned_of(saved, said):
    message = (
        f"^sparsekit: a state with tables has been saved {said}, whose rows are then in no file"
    )
    with pytest.warns(UserWarning, match=message) as found:
        warn_of_parts_not_saved(saved)
    assert found[0].filename == __file__  # the caller's line


@pytest.mark.parametrize("saved", [[0, 0], [3, 3, 3], [1]])
def test_parts_that_all_ranks_saved_are_not_warned_of(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_parts_not_saved(saved)
