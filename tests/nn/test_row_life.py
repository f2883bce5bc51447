"""The life of rows as users see it: who has left, how many came and went, who is worth most."""

import copy

import pytest
import torch

import sparsekit

WITHOUT = r"ids: rows have no scores, so .*; make the layer with score='lru' or 'lfu'"


def layer_of(**options):
    return sparsekit.Embedding(40, 2, name="ids", **options)


def keys_of(layer, **how):
    return torch.cat([part.keys for part in layer.items(**how)]).tolist()


def test_a_function_is_told_of_all_keys_that_leave():
    layer = layer_of(on_full="evict", max_rows=4, score="lfu")
    layer(torch.tensor([1, 2, 2, 3, 4, 4, 4]))
    vectors = layer.vectors(torch.tensor([1, 3]))
    told = []
    layer.on_evict(told.append)
    layer(torch.tensor([8, 9]))
    gone = torch.cat([one.keys for one in told])
    assert sorted(gone.tolist()) == [1, 3]
    torch.testing.assert_close(torch.cat([one.vectors for one in told])[gone.argsort()], vectors)
    assert torch.cat([one.scores for one in told]).tolist() == [1, 1]
    assert all(isinstance(one, sparsekit.Evicted) and not one.expired for one in told)
    layer.evict(keep=1)
    assert len(torch.cat([one.keys for one in told])) == 5
    told.clear()
    layer.erase(torch.tensor([4]))
    layer.clear()
    assert told == []


def test_none_ends_the_calls_and_a_copy_makes_none():
    layer = layer_of(score="lru")
    told = []
    layer.on_evict(told.append)
    layer(torch.arange(8))
    copy.deepcopy(layer).evict(keep=2)
    assert told == []
    layer.on_evict(None)
    assert layer.evict(keep=2) == 6
    assert told == []


def test_an_error_of_the_function_comes_out_of_the_lookup():
    layer = layer_of(on_full="evict", max_rows=4)
    layer(torch.arange(4))

    def fail(gone):
        raise OSError("no space left")

    layer.on_evict(fail)
    with pytest.raises(OSError, match="no space left"):
        layer(torch.tensor([9]))
    assert layer.row_counts().evicted == 4 - layer.row_counts().rows > 0


def test_only_what_can_be_called_is_taken():
    with pytest.raises(TypeError, match=r"^ids: callback must be callable or None, got 3$"):
        layer_of(score="lru").on_evict(3)
    with pytest.raises(ValueError, match=WITHOUT):
        layer_of().on_evict(print)


def test_rows_are_counted_as_they_come_and_go():
    layer = layer_of(on_full="evict", max_rows=6, admission=sparsekit.MinCount(2), ttl=50)
    layer(torch.tensor([1, 1, 2, 2, 3]))
    assert layer.row_counts() == sparsekit.RowCounts(
        rows=2, inserted=2, admitted=2, refused=1, evicted=0, expired=0, erased=0, asked=3, found=0
    )
    layer(torch.tensor([1, 3, 4]))
    counts = layer.row_counts()
    assert (counts.rows, counts.admitted, counts.refused) == (3, 3, 2)
    assert (counts.asked, counts.found) == (6, 1)
    layer.erase(torch.tensor([1, 99]))
    layer.assign(torch.tensor([7, 8]), torch.ones(2, 2))
    counts = layer.row_counts()
    assert (counts.rows, counts.inserted, counts.erased) == (4, 5, 1)
    assert (counts.asked, counts.found) == (6, 1)  # by lookups alone
    layer.eval()
    layer(torch.tensor([2, 1000]))
    assert layer.row_counts() == counts
    layer.train()
    sparsekit.set_clock(layer, 10_000)
    layer(torch.tensor([2]))
    assert layer.row_counts().expired == 3
    layer.clear()
    assert layer.row_counts() == counts._replace(
        rows=0, inserted=5, expired=3, erased=2, asked=7, found=2
    )


def test_found_are_the_distinct_keys_that_had_a_row_before_their_lookup():
    generator = torch.Generator().manual_seed(0)
    layer = layer_of(on_full="evict", max_rows=30)
    gone = set()
    layer.on_evict(lambda one: gone.update(one.keys.tolist()))
    asked = found = 0
    for _ in range(50):
        keys = (torch.rand(20, generator=generator) ** 3 * 100).long()
        before = set(keys_of(layer)) if layer.row_counts().rows else set()
        gone.clear()
        layer(keys)
        distinct = set(keys.tolist())
        asked, found = asked + len(distinct), found + len(distinct & (before - gone))
    counts = layer.row_counts()
    assert (counts.asked, counts.found) == (asked, found)
    assert counts.evicted > 0
    assert counts.inserted == counts.rows + counts.evicted


def test_counts_need_scores():
    with pytest.raises(ValueError, match=WITHOUT):
        layer_of().row_counts()


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_items_with_a_score_of_at_least(chunk):
    layer = layer_of(score=sparsekit.LFU(halve_every=10))
    layer(torch.tensor([5] * 8 + [6] * 4 + [7] * 2 + [8]))
    assert keys_of(layer, chunk=chunk, min_score=3) == [5, 6]
    found = torch.cat([part.vectors for part in layer.items(chunk, min_score=2)])
    torch.testing.assert_close(found, layer.vectors(torch.tensor([5, 6, 7])))
    sparsekit.set_clock(layer, 10)  # counts are halved
    assert keys_of(layer, chunk=chunk, min_score=2) == [5, 6]
    assert keys_of(layer, chunk=chunk, min_score=0) == keys_of(layer) == [5, 6, 7, 8]
    assert list(layer.items(chunk, min_score=100)) == []


def test_items_by_the_clock_of_the_last_lookup():
    layer = layer_of(score="lru")
    for keys in ([1, 2], [3], [1, 4]):
        layer(torch.tensor(keys))
    assert keys_of(layer, min_score=2) == [1, 3, 4]
    assert keys_of(layer, min_score=3) == [1, 4]


def test_a_least_score_is_a_count_and_needs_scores():
    with pytest.raises(ValueError, match="ids: rows have no scores, so there is no min_score"):
        layer_of().items(min_score=1)
    with pytest.raises(ValueError, match=r"ids: min_score must be .*got -1"):
        layer_of(score="lru").items(min_score=-1)
    with pytest.raises(TypeError, match=r"ids: min_score must be .*got 1\.5"):
        layer_of(score="lru").items(min_score=1.5)
