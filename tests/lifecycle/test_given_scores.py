"""Scores that calls have beside their keys."""

import copy
import re

import pytest
import torch

import sparsekit
from sparsekit import Feature
from tests.lifecycle.model import Table
from tests.lifecycle.test_eviction import batches
from tests.lifecycle.test_user_scores import scores_of
from tests.nn.keyed import Keyed

T = torch.tensor
KEYS, OFFSETS, SCORES = T([4, 5, 4, 6, 7]), T([0, 2, 5, 5]), T([3, 9, 8, 2**32 - 1, 0])
EXPECTED = {4: 8, 5: 9, 6: 2**32 - 1, 7: 0}


class KeyedWithItems(Keyed):
    """A KeyedJaggedTensor of which the bags of a name can be taken."""

    batch = 3

    def __getitem__(self, name):
        (values, offsets), weights = self.of(name)
        return Keyed([name], values, offsets, weights)


def bags(**options):
    options = {"name": "ids", "score": "given", "seed": 1} | options
    return sparsekit.DistributedEmbedding("sum", 20, 2, 1, **options)


COO = torch.sparse_coo_tensor(T([[1, 0, 0, 1, 1], [0, 0, 1, 1, 2]]), T([4, 4, 5, 6, 7]), (3, 3))
DENSE, OF_DENSE = T([[[4, 5]], [[4, 6]], [[7, 7]]]), T([[[3, 9]], [[8, 2**32 - 1]], [[0, 0]]])


def csr(columns, values):
    return torch.sparse_csr_tensor(OFFSETS, columns, values, (3, 8))


FORMS = {
    "values, offsets": (bags, ((KEYS, OFFSETS),), SCORES),
    "int32": (bags, ((KEYS.int(), OFFSETS),), SCORES),
    "dense": (bags, (DENSE,), OF_DENSE),
    "flat": (bags, (DENSE,), OF_DENSE.view(-1)),
    "COO": (bags, (COO,), T([8, 3, 9, 2**32 - 1, 0])),
    "CSR": (bags, lambda: (csr(T([0, 1, 0, 1, 2]), KEYS),), SCORES),
    "a feature matrix": (bags, lambda: (csr(KEYS, torch.ones(5)),), SCORES),
    "jagged": (bags, (torch.nested.nested_tensor_from_jagged(KEYS, OFFSETS),), SCORES),
    "keyed": (bags, (Keyed(["a"], KEYS, OFFSETS),), SCORES),
    "maximum": (
        lambda: sparsekit.DistributedEmbedding("max", 20, 2, 1, score="given"),
        ((KEYS, OFFSETS),),
        SCORES,
    ),
    "slots": (
        lambda: sparsekit.DistributedEmbedding(("max", "mean", "sum"), 20, 2, 3, score="given"),
        ((KEYS, OFFSETS),),
        SCORES,
    ),
    "All2AllDenseEmbedding": (
        lambda: sparsekit.All2AllDenseEmbedding(20, 2, 1, 5, score="given"),
        (KEYS.view(1, 1, 5),),
        SCORES.view(1, 1, 5),
    ),
    "Embedding": (
        lambda: sparsekit.Embedding(20, 2, score="given"),
        (KEYS.view(5, 1),),
        SCORES.view(5, 1),
    ),
    "EmbeddingBag": (
        lambda: sparsekit.EmbeddingBag(20, 2, score="given", mode="sum"),
        (KEYS, OFFSETS[:3]),
        SCORES,
    ),
    "EmbeddingBag, 2-D": (
        lambda: sparsekit.EmbeddingBag(20, 2, score="given"),
        (KEYS.view(1, 5),),
        SCORES.view(1, 5),
    ),
}


@pytest.mark.parametrize("engine", ["cpu", "simt"], scope="session", indirect=True)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_the_highest_score_of_a_key_counts_in_all_forms(form, engine):
    make, inputs, scores = FORMS[form]
    inputs = inputs() if callable(inputs) else inputs
    layer = make()
    layer(*inputs, scores=scores)
    assert scores_of(layer) == EXPECTED
    assert (layer.scores[:4] & 0xFFFFFFFF).tolist() == [1] * 4
    layer(*inputs, scores=torch.full_like(scores, 5))
    assert scores_of(layer) == dict.fromkeys(EXPECTED, 5)  # of the last lookup
    layer.eval()
    layer(*inputs)
    layer(*inputs, scores=scores)
    assert scores_of(layer) == dict.fromkeys(EXPECTED, 5)


def test_scores_of_a_scipy_matrix():
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.csr_matrix(([1.0] * 5, KEYS.numpy(), OFFSETS.numpy()), (3, 8))
    layer = bags()
    layer(matrix, scores=SCORES)
    assert scores_of(layer) == EXPECTED


@pytest.mark.parametrize("output", ["dict", "concatenated"])
def test_scores_of_a_keyed_jagged_tensor_are_by_name(output):
    keys, offsets = T([1, 2, 2, 3, 3, 3, 9]), T([0, 1, 2, 3, 4, 6, 6, 6, 7, 7])
    inputs = KeyedWithItems(["x", "other", "y"], keys, offsets)
    layer = bags(on_full="evict")
    group = sparsekit.EmbeddingGroup({"a": layer}, {"y": "a", "x": "a"}, output)
    group(inputs, scores={"x": T([5, 6, 4]), "y": T([7])})
    assert scores_of(layer) == {1: 5, 2: 6, 9: 7}


def test_keys_that_are_left_out_have_no_score():
    layer = bags(padding_key=0, max_nnz=2, truncate=True)
    layer((T([0, 5, 6, 7, 0]), T([0, 4, 5])), scores=T([9, 8, 7, 6, 5]))
    assert scores_of(layer) == {5: 8, 6: 7}
    layer((T([7, 8]), T([0, 1, 2])), scores=T([3, 4]))
    before = layer.scores.clone()
    layer((T([5, 6, 7]), T([0, 3, 3])), scores=T([8, 7, 6]))  # 7 has a row, and is cut off
    assert scores_of(layer) == {5: 8, 6: 7, 7: 3, 8: 4}
    assert torch.equal(layer.scores[2:], before[2:])


def test_features_that_share_a_table_and_one_that_only_reads():
    layer = bags()
    features = {"x": "ids", "y": "ids", "z": Feature("ids", insert=False)}
    group = sparsekit.EmbeddingGroup({"ids": layer}, features)
    keys = {"x": [1, 2], "y": [2, 3], "z": [3, 4]}
    inputs = {name: T(own).view(-1, 1, 1) for name, own in keys.items()}
    group.prefetch(inputs, scores={"x": T([5, 6]), "y": T([4, 7])})
    assert len(layer.table) == 0
    group(inputs)
    assert scores_of(layer) == {1: 5, 2: 6, 3: 7}
    inputs["y"] = T([[[7]]])
    group(inputs, scores={"x": T([1, 1]), "y": T([1]), "z": T([9, 9])})
    assert scores_of(layer) == {1: 1, 2: 1, 3: 7, 7: 1}


def test_what_is_assigned_keeps_its_score():
    layer = bags()
    layer((KEYS, OFFSETS), scores=SCORES)
    layer.assign(T([4, 8]), torch.ones(2, 2))
    assert scores_of(layer) == EXPECTED | {8: 0}


MESSAGES = {
    "none": (None, ValueError,
             "with score='given' a lookup in training needs scores, one for each key"),
    "a list": ([1] * 5, TypeError, "scores must be a tensor, got list"),
    "floats": (torch.ones(5), TypeError, "scores must be int64, got torch.float32"),
    "too few": (SCORES[1:], ValueError,
                "scores must be of shape (5,) on cpu, one for each key, got shape (4,) on cpu"),
    "below": (T([1, 1, -1, 1, 1]), ValueError, "scores must be in [0, 2^32), got -1 for key 4"),
    "above": (T([1, 1, 1, 2**32, 1]), ValueError,
              "scores must be in [0, 2^32), got 4294967296 for key 6"),
}  # fmt: skip


@pytest.mark.parametrize("case", MESSAGES)
@pytest.mark.parametrize("grouped", [False, True])
def test_scores_that_are_refused(case, grouped):
    scores, error, message = MESSAGES[case]
    layer, other = bags(), bags(name="other", score="lru", dtype=torch.float64)
    group = sparsekit.EmbeddingGroup({"other": other, "ids": layer})
    both = dict.fromkeys(("other", "ids"), (KEYS, OFFSETS))
    group(both, scores={"ids": SCORES})
    before = copy.deepcopy(group.state_dict())
    given = {"scores": {} if scores is None else {"ids": scores}}

    def look_up():
        return group(both, **given) if grouped else layer((KEYS, OFFSETS), scores=scores)

    with pytest.raises(error, match=rf"^ids: {re.escape(message)}$"):
        look_up()
    for name, value in group.state_dict().items():
        assert torch.equal(before[name], value), name


@pytest.mark.parametrize("score", [None, "lru", lambda keys: keys])
def test_only_tables_with_given_scores_take_them(score):
    layer = bags(score=score)
    with pytest.raises(ValueError, match=r"^ids: scores needs a layer with score='given'$"):
        layer((KEYS, OFFSETS), scores=SCORES)
    assert len(layer.table) == 0


def test_scores_of_a_group_have_the_names_of_its_inputs():
    group = sparsekit.EmbeddingGroup({"ids": bags()})
    with pytest.raises(ValueError, match=r"scores must be of the layers \['ids'\], got \['x'\]$"):
        group({"ids": (KEYS, OFFSETS)}, scores={"x": SCORES})
    with pytest.raises(
        TypeError, match="scores must be a mapping with the names of layers, got Te"
    ):
        group({"ids": (KEYS, OFFSETS)}, scores=SCORES)


@pytest.mark.parametrize("ttl", [None, 20])
@pytest.mark.parametrize("min_count", [None, 2])
def test_the_keys_of_a_full_table_are_those_of_the_model(ttl, min_count):
    admission = min_count and sparsekit.MinCount(min_count)
    layer = bags(on_full="evict", max_rows=12, ttl=ttl, admission=admission)
    model = Table(12, score="user", ttl=ttl, min_count=min_count or 1)
    dropped = 0
    for step, keys in enumerate(batches(3, 150, 8, 60)):
        scores = [(key * 31 + step * place) % 40 for place, key in enumerate(keys)]
        highest = {}
        for key, score in zip(keys, scores, strict=True):
            highest[key] = max(score, highest.get(key, 0))
        model.score_of = highest.get
        dropped += model.train(keys)
        layer(T(keys).view(-1, 1, 1), scores=T(scores))
        own = layer.table.keys().tolist()
        assert sorted(own) == sorted(model.rows)
        assert layer.scores[: len(own)].tolist() == [model.word(k) for k in own]
    assert dropped > 50
