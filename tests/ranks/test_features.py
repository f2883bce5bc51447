"""Features of a KeyedJaggedTensor give the same results on several ranks as on one."""

import pytest
import torch

from sparsekit import DistributedEmbedding, EmbeddingGroup, Feature, optim
from tests.nn.keyed import Keyed, random_keyed

KEYS = ("b", "unused", "a", "c")
FEATURES = {"a": "shared", "c": "rows", "b": Feature("shared", combiner="mean", max_nnz=9)}
STEPS = 3


def group_of(strategy, output, features):
    settings = {"dtype": torch.float64, "strategy": strategy, "gradient_reduction": "sum"}
    layers = {
        "rows": DistributedEmbedding(
            "sqrtn", 50, 3, 1, 5, use_hashtable=False, name="rows", padding_key=7, **settings
        ),
        "shared": DistributedEmbedding("sum", 60, 4, 1, 5, name="shared", **settings),
    }
    return EmbeddingGroup(layers, features, output)


def batch_of(rank, step):
    return random_keyed(KEYS, (2, 0, 3)[(rank + step) % 3], 10 * step + rank, weighted=step > 0)


def of_all_ranks(world_size, step):
    """Concatenate the samples of all ranks for each feature."""
    parts = [batch_of(rank, step) for rank in range(world_size)]
    calls = [part.of(key) for key in KEYS for part in parts]
    values = torch.cat([values for (values, _), _ in calls])
    lengths = torch.cat([offsets.diff() for (_, offsets), _ in calls])
    weights = None if step == 0 else torch.cat([weights for _, weights in calls])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Keyed(list(KEYS), values, offsets, weights)


def train(rank, strategy, output, unpooled=False, world_size=None):
    """Train for some steps; return the outputs for this rank's samples, or for all samples."""
    features = {**FEATURES, "unused": Feature("shared", None)} if unpooled else FEATURES
    group = group_of(strategy, output, features)
    optimizer = optim.SGD(group.parameters(), lr=0.1)
    outputs = []
    for step in range(STEPS):
        keyed = batch_of(rank, step) if world_size is None else of_all_ranks(world_size, step)
        out = group(keyed)
        if output == "concatenated":
            out = {"all": out}
        rows = [out[name].values() if out[name].is_nested else out[name] for name in sorted(out)]
        sum(each.sin().sum() for each in rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append([each.detach().tolist() for each in rows])
    return outputs


CASES = [
    ("all_to_all", "dict", True),
    ("all_to_all", "concatenated", False),
    ("reduce_scatter", "concatenated", False),
    ("reduce_scatter", "dict", False),
]


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_one_rank(case, ranks):
    found = ranks(train, *case)
    expected = train(0, *case, ranks.world_size)
    for step in range(STEPS):
        for i, whole in enumerate(expected[step]):
            together = [row for rank in found for row in rank[step][i]]
            assert len(together) == len(whole)
            torch.testing.assert_close(
                torch.tensor(together), torch.tensor(whole), rtol=1e-5, atol=1e-7
            )


def refused(rank):
    """Check that input that is invalid on one rank raises on all ranks and changes nothing."""
    group = group_of("auto", "concatenated", FEATURES)
    keyed = batch_of(0, 2)
    if rank == 1:
        lengths = torch.ones(12, dtype=torch.int64)
        lengths[8] = 6  # too many for feature a
        keyed = Keyed(list(KEYS), torch.arange(17), torch.tensor([0, *lengths]).cumsum(0))
    with pytest.raises(ValueError, match="shared: feature 'a': bag 2 has 6 keys, more than max_n"):
        group(keyed)
    assert len(group.layers["shared"].table) == 0


def test_a_bad_input_is_an_error_on_all_ranks(two_ranks):
    two_ranks(refused)


def prefetched(rank):
    plain, ahead = (group_of("auto", "concatenated", FEATURES) for _ in range(2))
    for step in range(STEPS):
        keyed = batch_of(rank, step)
        ahead.prefetch(keyed)
        assert torch.equal(plain(keyed), ahead(keyed))


def test_prefetch(two_ranks):
    two_ranks(prefetched)
    prefetched(0)
