"""Invalid settings raise an error that names the model, the argument and its value."""

import pytest
import torch

from sparsekit.datasets import Ratings
from sparsekit.models import (
    DLRM,
    Autoencoder,
    DeepCoNN,
    DeepFM,
    QuantileBuckets,
    RatedItems,
    recommend,
)

ONE = torch.tensor([1])
HISTORY = RatedItems(Ratings(ONE, ONE, torch.ones(1), torch.zeros(1).double()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DLRM(["a"], 2, bottom=[0]), r"widths of linear layers must be >= 1, got .*0"),
        (lambda: DLRM(["a"], 2, top=[4, -1]), r"widths of linear layers must be >= 1, got .*-1"),
        (lambda: DLRM(["a"], 2, cross_layers=-1), r"DLRM: cross_layers must be in .*-1"),
        (lambda: DLRM(["a"], 2, cross_rank=0), r"DLRM: cross_rank must be in .*0"),
        (lambda: DeepFM(["a"], 2, deep=[0]), r"widths of linear layers must be >= 1"),
        (lambda: DeepCoNN(9, placement="both"), r"DeepCoNN: placement must be one of .*'both'"),
        (lambda: DeepCoNN(1), r"DeepCoNN: words must be in .*1"),
        (lambda: DeepCoNN(9, length=1), r"DeepCoNN: length must be in .*1"),
        (lambda: Autoencoder(HISTORY, dim=0), r"Autoencoder: dim must be in .*0"),
        (lambda: Autoencoder(HISTORY, layers=-1), r"Autoencoder: layers must be in .*-1"),
        (lambda: Autoencoder(HISTORY, negatives=0), r"Autoencoder: negatives must be in .*0"),
        (lambda: Autoencoder(HISTORY, dropout=1.0), r"Autoencoder: dropout must be in .* 1\.0"),
        (lambda: QuantileBuckets({"a": [2, 1]}), r"QuantileBuckets: edges\['a'\] must be finite"),
        (lambda: QuantileBuckets({"a": [1, 1]}), r"QuantileBuckets: edges\['a'\] .* rise"),
        (lambda: QuantileBuckets.fit({"a": [1]}, ["a"], 0), r"QuantileBuckets: count must be >= 1"),
        (lambda: recommend(Autoencoder(HISTORY, dim=2), 0), r"recommend: k must be in .*0"),
    ],
)
def test_settings_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()
