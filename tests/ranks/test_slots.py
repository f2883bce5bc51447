"""Combiners and limits by slot on several ranks are those of one rank."""

import pytest
import torch

from tests.nn.bags import BAGS, FORMS, make_layer

MOST = [2, None, 3]


def looked_up(rank, combiners, strategy):
    layer = make_layer(combiners, max_nnz=MOST, truncate=True, strategy=strategy)
    weights = None if "max" in combiners else torch.arange(1.0, 11.0, dtype=torch.float64)
    layer(*FORMS["values_offsets"](BAGS, weights))
    bags = BAGS if rank == 0 else BAGS[::-1]
    layer.eval()
    return [
        layer(*FORMS[form](bags, weights)).tolist() for form in ("values_offsets", "keyed_jagged")
    ]


@pytest.mark.parametrize(
    ("combiners", "strategy"),
    [
        (["mean", "max", "sum"], "auto"),
        (["mean", "sqrtn", "sum"], "all_to_all"),
        (["mean", "sqrtn", "sum"], "reduce_scatter"),
    ],
)
def test_ranks_are_one_rank(two_ranks, combiners, strategy):
    for rank, found in enumerate(two_ranks(looked_up, combiners, strategy)):
        expected = looked_up(rank, combiners, strategy)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
