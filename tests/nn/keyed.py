"""A stand-in for torchrec's KeyedJaggedTensor, random batches of it, and layers for them."""

import random

import torch

from sparsekit import DistributedEmbedding, Feature

# The keys are in a different order than the features, and some keys belong to no feature.
KEYS = ("unused", "own", "shared_b", "middle", "rows", "shared_a", "last")
FEATURES = {
    "shared_a": "shared",
    "own": "own",
    "rows": "rows",
    "shared_b": Feature("shared", combiner="mean", max_nnz=9),
}


class Keyed:
    """Stand-in for a KeyedJaggedTensor: bags of several features, feature by feature."""

    def __init__(self, keys, values, offsets, weights=None):
        self._keys, self._values, self._offsets, self._weights = keys, values, offsets, weights

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def offsets(self):
        return self._offsets

    def weights_or_none(self):
        return self._weights

    def of(self, feature):
        """Return ((values, offsets), weights) of one feature."""
        first = self._keys.index(feature) * self.batch
        offsets = self._offsets[first : first + self.batch + 1]
        begin, end = offsets[0], offsets[-1]
        weights = None if self._weights is None else self._weights[begin:end]
        return (self._values[begin:end], offsets - begin), weights

    @property
    def batch(self):
        return (len(self._offsets) - 1) // len(self._keys)


def random_keyed(keys, batch, seed, device="cpu", weighted=False, most=4, dtype=torch.int64):
    """Return a batch of random bags with 0 to `most` keys; keys are below 40."""
    draw = random.Random(seed)
    lengths = [draw.randrange(most + 1) for _ in range(len(keys) * batch)]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    n = sum(lengths)
    values = torch.tensor([draw.randrange(40) for _ in range(n)], dtype=dtype)
    weights = torch.tensor([draw.random() + 0.5 for _ in range(n)]) if weighted else None
    return Keyed(
        list(keys),
        values.to(device),
        offsets.to(device),
        None if weights is None else weights.to(device),
    )


def layers(device, **changes):
    made = {
        "rows": DistributedEmbedding(
            "mean", 50, 3, 1, 5, use_hashtable=False, name="rows", **changes
        ),
        "shared": DistributedEmbedding("sum", 90, 8, 1, 5, name="shared", **changes),
        "own": DistributedEmbedding("sqrtn", 90, 16, 2, 5, name="own", **changes),
    }
    return torch.nn.ModuleDict(made).to(device)
