"""Combiners and key limits per slot have the same effect on several ranks as on one."""

import pytest
import torch

from sparsekit import DistributedEmbedding, EmbeddingGroup
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


def maximum_beside_sums(rank):
    layers = {
        "sums": DistributedEmbedding("sum", 20, 4, 1, name="sums", strategy="reduce_scatter"),
        "largest": DistributedEmbedding("max", 20, 4, 1, name="largest"),
    }
    bags = torch.arange(3), torch.tensor([0, 3])
    with pytest.raises(ValueError, match="layers that do not add up"):
        EmbeddingGroup(layers)({"sums": bags, "largest": bags})


def test_a_maximum_is_no_sum_of_other_ranks(two_ranks):
    two_ranks(maximum_beside_sums)


def no_gradient_yet(rank):
    layers = {name: DistributedEmbedding(name, 20, 4, 1, name=name) for name in ("sum", "max")}
    group = EmbeddingGroup(layers)
    weights = {"sum": torch.ones(3, requires_grad=True)}
    inputs = dict.fromkeys(layers, (torch.tensor([1, 5, 2 + rank]), torch.tensor([0, 2, 3])))
    with torch.no_grad():
        group.prefetch(inputs, weights)
    out, expected = group(inputs), group(inputs, weights)
    assert all(torch.equal(out[name], expected[name]) for name in layers)


def test_what_prefetch_has_begun_goes_on_as_it_began(two_ranks):
    two_ranks(no_gradient_yet)
