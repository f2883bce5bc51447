"""A full table drops the keys with the lowest scores, and goes on."""

import random

import pytest
import torch

import sparsekit
from tests.lifecycle.model import Table


def batches(seed, steps, size, keys):
    rng = random.Random(seed)
    return [
        [int(keys * rng.random() ** 3) + step // 4 for _ in range(rng.randint(1, size))]
        for step in range(steps)
    ]


SCORES = {
    "lru": ("lru", {"score": "lru"}),
    "lfu": (sparsekit.LFU(0), {"score": "lfu"}),
    "aged": (sparsekit.LFU(5), {"score": "lfu", "halve_every": 5}),
    "function": (lambda keys: keys % 7, {"score": "user", "score_of": lambda key: key % 7}),
}


@pytest.mark.pairs
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("ttl", "low"), [(None, 0.95), (20, 0.6)])
@pytest.mark.parametrize("min_count", [None, 2, 4])
def test_the_keys_of_a_full_table_are_those_of_the_model(score, ttl, low, min_count):
    given, of_model = SCORES[score]
    layer = sparsekit.EmbeddingBag(
        80, 4, mode="sum", on_full="evict", max_rows=60, score=given, ttl=ttl, name="a",
        admission=min_count and sparsekit.MinCount(min_count), low_watermark=low,
    )  # fmt: skip
    optimizer = sparsekit.optim.LazyAdam([layer.weight], lr=0.1)
    model = Table(60, low, ttl=ttl, min_count=min_count, **of_model)
    dropped = 0
    for keys in batches(1, 200, 20, 100):
        values = torch.tensor(keys)
        dropped += model.train(keys)
        layer(values.view(1, -1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        own = layer.table.keys().tolist()
        assert sorted(own) == sorted(model.rows)
        assert layer.scores[: len(own)].tolist() == [model.word(k) for k in own]
        if min_count:
            state = layer.life.counts.state().tolist()
            assert {key: (count, then) for key, count, then in state} == model.waiting
    assert dropped == layer.life.evicted + layer.life.expired > 50
