"""Scores that a function of the user returns for the keys of a lookup."""

import copy
import pickle
import re

import pytest
import torch
from interruptions import OPS, PACKAGE, interrupt

import sparsekit
from sparsekit import checkpoint
from tests.lifecycle.model import Table
from tests.lifecycle.test_eviction import batches


def remainder(keys):
    return keys % 7


def layer_of(score, **options):
    options = {"on_full": "evict", "max_rows": 6, "name": "ids"} | options
    return sparsekit.Embedding(10, 2, score=score, **options)


def scores_of(layer):
    keys = layer.table.keys()
    words = layer.scores[: len(keys)].tolist()
    return {key: word >> 32 & 0xFFFFFFFF for key, word in zip(keys.tolist(), words, strict=True)}


class Noting:
    """A function of keys that notes with which keys it has been called."""

    def __init__(self):
        self.worth, self.calls = {}, []

    def __call__(self, keys):
        assert keys.dtype == torch.int64
        self.calls.append(sorted(keys.tolist()))
        return torch.tensor([self.worth.get(key, 1) for key in keys.tolist()], dtype=torch.int64)


def test_a_row_is_worth_what_the_function_returned_last():
    score = Noting()
    layer = layer_of(score)
    layer(torch.tensor([1, 2, 2, 3, 1]))
    assert score.calls == [[1, 2, 3]]  # once, with distinct keys
    score.worth = {1: 9, 2: 2**32 - 1, 3: 0}
    layer(torch.tensor([1, 3]))
    assert scores_of(layer) == {1: 9, 2: 1, 3: 0}
    layer(torch.tensor([2]))
    assert scores_of(layer) == {1: 9, 2: 2**32 - 1, 3: 0}
    told = []
    layer.on_evict(lambda gone: told.append((gone.keys.tolist(), gone.scores.tolist())))
    layer(torch.tensor([4, 5, 6, 7, 8]))
    assert told == [([1, 3], [9, 0])]
    assert torch.cat([part.keys for part in layer.items(min_score=2)]).tolist() == [2]
    assert layer.evict(keep=1) == 5
    assert layer.table.keys().tolist() == [2]


def test_only_lookups_in_training_call_the_function():
    score = Noting()
    layer = layer_of(score)
    layer(torch.tensor([1, 2]))
    before = layer.scores.clone()
    score.calls.clear()
    score.worth = {1: 5, 2: 5}
    layer.vectors(torch.tensor([1]))
    layer(torch.tensor([], dtype=torch.int64))
    layer.eval()
    layer(torch.tensor([1, 2, 3]))
    assert score.calls == []
    assert torch.equal(layer.scores, before)
    reading = layer_of(score, insert=False)
    reading(torch.tensor([1]))
    assert score.calls == []
    layer.train()
    with torch.no_grad():
        layer(torch.tensor([1]))
    assert score.calls == [[1]]
    assert scores_of(layer) == {1: 5, 2: 1}


def test_keys_that_a_feature_only_reads_are_not_scored():
    score = Noting()
    layer = layer_of(score)
    features = {"x": "ids", "y": sparsekit.Feature("ids", "sum", insert=False)}
    group = sparsekit.EmbeddingGroup({"ids": layer}, features)
    group({"x": torch.tensor([[[1]], [[2]]]), "y": torch.tensor([[[3]]])})
    score.worth = {1: 5, 2: 5, 3: 5}
    group({"x": torch.tensor([[[2]], [[3]]]), "y": torch.tensor([[[1]]])})
    assert score.calls == [[1, 2], [2, 3]]
    assert scores_of(layer) == {1: 1, 2: 5, 3: 5}


def test_padding_is_not_scored():
    score = Noting()
    layer = layer_of(score, padding_key=0)
    layer(torch.tensor([[0, 4], [3, 0]]))
    assert score.calls == [[3, 4]]
    bags = sparsekit.DistributedEmbedding(
        "sum", 9, 2, 1, 1, score=score, padding_key=0, truncate=True
    )
    bags((torch.tensor([0, 5, 6, 0, 7]), torch.tensor([0, 3, 5])))
    assert score.calls[1:] == [[5, 7]]
    assert scores_of(bags) == {5: 1, 7: 1}


def test_a_key_that_comes_again_after_it_was_erased_has_a_new_score():
    score = Noting()
    score.worth = {1: 9}
    layer = layer_of(score)
    layer(torch.tensor([1, 2]))
    layer.erase(torch.tensor([1]))
    assert not layer.scores[1:].any()
    score.worth = {}
    layer(torch.tensor([1]))
    assert scores_of(layer) == {1: 1, 2: 1}


def test_what_is_assigned_is_scored_and_moves_no_clock():
    layer = layer_of(remainder)
    layer.assign(torch.tensor([9, 10, 9]), torch.ones(3, 2))
    assert scores_of(layer) == {9: 2, 10: 3}
    assert int(layer.clock) == 0


def test_admitted_keys_have_the_function_s_score():
    layer = layer_of(remainder, admission=sparsekit.MinCount(2))
    layer(torch.tensor([3, 4, 4]))
    assert scores_of(layer) == {4: 4}
    layer(torch.tensor([3, 12]))
    assert scores_of(layer) == {4: 4, 3: 3}


def bad(keys):
    return keys - 5


# Functions that are called with the keys 2 and 3, and the end of the error.
RETURNED = {
    "below": (bad, ValueError, "must be in [0, 2^32), got -3 for key 2"),
    "above": (lambda keys: keys << 40, ValueError,
              "must be in [0, 2^32), got 2199023255552 for key 2"),
    "a list": (lambda keys: keys.tolist(), TypeError, "must be a tensor, got list"),
    "nothing": (lambda keys: None, TypeError, "must be a tensor, got NoneType"),
    "floats": (lambda keys: keys.float(), TypeError, "must be int64, got torch.float32"),
    "too few": (lambda keys: keys[1:], ValueError,
                "must be of shape (2,) on cpu, one for each key, got shape (1,) on cpu"),
    "a column": (lambda keys: keys[:, None], ValueError,
                 "must be of shape (2,) on cpu, one for each key, got shape (2, 1) on cpu"),
    "elsewhere": (lambda keys: keys.to("meta"), ValueError,
                  "must be of shape (2,) on cpu, one for each key, got shape (2,) on meta"),
    "an error": (lambda keys: {}[5], RuntimeError, "raised KeyError: 5"),
}  # fmt: skip
WAYS = {
    "layer": lambda group, keys: group.layers["ids"](keys),
    "group": lambda group, keys: group(dict.fromkeys(group.layers, keys)),
    "assign": lambda group, keys: group.layers["ids"].assign(keys, torch.ones(2, 2)),
}


@pytest.mark.parametrize("case", RETURNED)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_function_must_not_return(case, way):
    """The error names it, and no table has changed."""
    function, error, message = RETURNED[case]
    use = [remainder]

    def score(keys):
        return use[-1](keys)

    layers = {"other": layer_of("lru", name="other", dtype=torch.float64)}
    layers |= {"good": layer_of(remainder, name="good"), "ids": layer_of(score, ttl=1)}
    group = sparsekit.EmbeddingGroup(layers)
    for _ in range(4):
        group(dict.fromkeys(layers, torch.arange(10, 16)))
    before = copy.deepcopy(group.state_dict())
    use.append(function)
    named = f"score function {score.__qualname__} {message}"
    if error is not RuntimeError:
        named = f"the result of {named}"
    with pytest.raises(error, match=rf"^ids: {re.escape(named)}$"):
        WAYS[way](group, torch.tensor([2, 3]))
    after = group.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    use.pop()
    WAYS[way](group, torch.tensor([2, 3]))
    assert scores_of(layers["ids"])[3] == 3


def test_a_function_may_write_to_its_keys_and_return_them():
    layer = layer_of(lambda keys: keys.zero_().add_(3))
    layer(torch.tensor([1, 2]))
    assert scores_of(layer) == {1: 3, 2: 3}


def test_a_class_is_no_function():
    with pytest.raises(
        ValueError, match=r"^ids: score must be 'lru', .* or a function of keys, got"
    ):
        layer_of(sparsekit.LFU)


def test_no_row_is_left_without_its_score_by_an_interrupt():
    def interrupted(moment, files):
        layer = layer_of(lambda keys: keys + 1)
        layer(torch.tensor([1, 2, 3, 4]))
        count = interrupt(lambda: layer(torch.tensor([2, 5])), moment, files)
        found = scores_of(layer)
        assert found.pop(5, 6) in (6, 0)  # inserted, and not yet touched
        assert found == {1: 2, 2: 3, 3: 4, 4: 5}
        clocks = (layer.scores[:4] & 0xFFFFFFFF).tolist()
        assert clocks in ([1, 1, 1, 1], [1, 2, 1, 1])
        return count

    for files in (PACKAGE, OPS):
        moments = interrupted(-1, files)
        for moment in range(0, moments, 7):
            interrupted(moment, files)


@pytest.mark.parametrize("engine", ["cpu", "simt"], scope="session", indirect=True)
def test_many_tables_some_with_a_function(engine):
    """In groups, with prefetched batches, accumulated gradients and looks in evaluation."""
    policies = ({"score": "lru"}, {"score": remainder}, {"score": "lfu"})
    layers, models = {}, {}
    for t in range(26):
        policy = policies[t % 3]
        # Two dtypes, so two calls of each op.
        dtype = torch.float32 if t % 2 else torch.float64
        layers[str(t)] = sparsekit.DistributedEmbedding(
            *("sum", 40, 2, 1), name=str(t), on_full="evict", max_rows=25, dtype=dtype, **policy
        )
        of_model = {"score": "user", "score_of": remainder} if t % 3 == 1 else policy
        models[str(t)] = Table(25, halve_every=1000, **of_model)
    group = sparsekit.EmbeddingGroup(layers)
    optimizer = sparsekit.optim.LazyAdam(group.parameters(), lr=0.1)
    asked = [batches(seed, 12, 12, 60) for seed in range(26)]
    inputs = [
        {str(t): torch.tensor(of[step]).view(-1, 1, 1) for t, of in enumerate(asked)}
        for step in range(12)
    ]
    for step in range(12):
        out = group(inputs[step])
        if step % 3 == 1:
            group.prefetch(inputs[step + 1])
        held = {}
        for t, model in models.items():
            model.train(asked[int(t)][step])
            held[t] = set(asked[int(t)][step])
        sum(one.double().sum() for one in out.values()).backward()
        for t, model in models.items():
            model.grad = {**(model.grad or {}), **dict.fromkeys(held[t])}
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            for model in models.values():
                model.grad = None
        if step % 3 == 0:
            group.eval()
            group(inputs[(step + 5) % 12])
            group.train()
        for t, model in models.items():
            keys = layers[t].table.keys().tolist()
            assert sorted(keys) == sorted(model.rows), (step, t)
            assert layers[t].scores[: len(keys)].tolist() == [model.word(k) for k in keys]
    assert all(model.evicted > 0 for model in models.values())


def test_copies_pickles_and_checkpoints_have_the_scores(tmp_path):
    layer = layer_of(remainder)
    layer(torch.tensor([5, 6, 20]))
    layer(torch.tensor([5]))
    words = layer.scores.clone()
    loaded = layer_of(bad)  # what is loaded is not scored again
    checkpoint.load(loaded, checkpoint.save(layer, tmp_path / "a"))
    for one in (loaded, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(one.scores, words)
        assert scores_of(one) == {5: 5, 6: 6, 20: 6}
    # Of another kind of score the time of the last lookup is known, and a key counts as one time.
    lru, lfu = layer_of("lru"), layer_of("lfu")
    for one in (lru, lfu):
        checkpoint.load(one, tmp_path / "a")
    assert lru.scores[:3].tolist() == [2, 1, 1]
    assert lfu.scores[:3].tolist() == [1 << 32 | 2, 1 << 32 | 1, 1 << 32 | 1]
    for number, one in enumerate((lru, lfu)):
        checkpoint.load(loaded, checkpoint.save(one, tmp_path / str(number)))
        assert loaded.scores[:3].tolist() == lfu.scores[:3].tolist()


def test_scores_without_a_budget():
    layer = sparsekit.Embedding(10, 2, score=remainder)
    layer(torch.tensor([8, 3, 5]))
    assert layer.evict(keep=1) == 2
    assert layer.table.keys().tolist() == [5]
