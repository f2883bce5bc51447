"""Options of tables are declared once, and every layer shows and checks them."""

import copy
import dataclasses
import inspect
import pickle
import pydoc
import typing

import pytest
import torch

import sparsekit
from sparsekit import All2AllDenseEmbedding, DistributedEmbedding, Embedding, EmbeddingBag
from sparsekit.distributed.world import settings
from sparsekit.tables.options import TableKeywords, TableOptions

BY_POSITION = {
    DistributedEmbedding: (
        "combiner max_vocabulary_size_per_gpu embedding_vec_size slot_num max_nnz max_feature_num "
        "use_hashtable"
    ),
    All2AllDenseEmbedding: (
        "max_vocabulary_size_per_gpu embedding_vec_size slot_num nnz_per_slot dynamic_input "
        "use_hashtable"
    ),
    Embedding: (
        "num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq sparse "
        "_weight _freeze device dtype"
    ),
    EmbeddingBag: (
        "num_embeddings embedding_dim max_norm norm_type scale_grad_by_freq mode sparse _weight "
        "include_last_offset padding_idx device dtype"
    ),
}
LAYERS = list(BY_POSITION)
TYPES = typing.get_type_hints(TableKeywords)


def make(kind, **options):
    needed = {DistributedEmbedding: ("sum", 9, 4, 2), All2AllDenseEmbedding: (9, 4, 2, 1)}
    return kind(*needed.get(kind, (9, 4)), **options)


def test_types_of_keywords_are_those_of_the_options():
    types = typing.get_type_hints(TableOptions)
    with_default = {
        field.name: types[field.name]
        for field in dataclasses.fields(TableOptions)
        if field.default is not dataclasses.MISSING
    }
    assert with_default == TYPES


@pytest.mark.parametrize("kind", LAYERS)
def test_signatures_show_each_option_with_its_default(kind):
    parameters = inspect.signature(kind).parameters
    by_position = [name for name, each in parameters.items() if each.kind != each.KEYWORD_ONLY]
    assert by_position == BY_POSITION[kind].split()
    assert {"use_hashtable", "dtype", "device", *TYPES} <= parameters.keys()
    for name, annotation in TYPES.items():
        assert parameters[name].kind == inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == getattr(TableOptions, name)
        assert parameters[name].annotation == annotation
    assert parameters["on_full"].default == "error"
    assert parameters["key_dtype"].default == torch.int64
    assert "on_full: str = 'error'" in pydoc.render_doc(kind)
    assert TYPES.items() <= typing.get_type_hints(kind.__init__).items()


# The defaults of all options whose default is not None.
DEFAULTS = {
    "use_hashtable": True, "key_dtype": torch.int64, "on_full": "error", "insert": True,
    "storage": "memory", "before_admission": "initial", "low_watermark": 0.99,
    "gradient_reduction": "mean", "strategy": "auto", "truncate": False, "dynamic_input": False,
    "mode": "mean", "norm_type": 2.0, "include_last_offset": False, "sparse": True,
    "scale_grad_by_freq": False, "_freeze": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
def test_defaults(kind):
    found = {name: each.default for name, each in inspect.signature(kind).parameters.items()}
    given = {name: value for name, value in found.items() if value is not inspect.Parameter.empty}
    assert given == {name: DEFAULTS.get(name) for name in given}


# Arguments that both layers refuse; arguments that from_pretrained refuses; arguments that only
# EmbeddingBag refuses. Errors name the last argument of each.
WRONG = [
    *({word: True} for word in ("scale_grad_by_freq", "_weight")),
    *({"num_embeddings": rows} for rows in (0, 2**31, 9.0)), {"embedding_dim": 0},
    {"max_norm": -1.0}, {"max_norm": 0.0}, {"max_norm": "1"}, {"max_norm": 1.0, "norm_type": 0.0},
    {"padding_idx": 9}, {"padding_idx": -10}, {"padding_idx": 1, "padding_key": 1},
    {"padding_idx": 1, "padding_key": 0}, {"dtype": torch.int64}, {"device": "mps"},
    {"placement": "rank"}, {"embedding_initializer": 3}, {"num_embedding": 9},
    {"max_keys_per_rank": 0}, {"insert": 1}, {"wire_dtype": torch.float16},
    {"on_full": "evict", "low_watermark": 0.0}, {"low_watermark": 0.5},
]  # fmt: skip
WRONG_BESIDE_VECTORS = [
    {"num_embeddings": 2}, {"padding_idx": 3}, {"scale_grad_by_freq": True}, {"max_norm": -1.0},
    {"max_norm": 1.0, "norm_type": 0.0},
]  # fmt: skip
OF_BAGS = [{"mode": "min"}, {"strategy": "rank"}, {"mode": "max", "strategy": "reduce_scatter"}]
OF_VECTORS = [{"_freeze": True}]


@pytest.mark.parametrize("name", ["movies", None])
@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_errors_name_the_layer_or_else_the_class_and_the_argument(kind, name):
    errors = (TypeError, ValueError, NotImplementedError)
    begin = f"^{name}: " if name else rf"^{kind.__name__}(_\d+ \(.*\))?: "
    for wrong in WRONG + (OF_BAGS if kind is EmbeddingBag else OF_VECTORS):
        with pytest.raises(errors, match=rf"{begin}.*\b{[*wrong][-1]}\b"):
            kind(**{"num_embeddings": 9, "embedding_dim": 4, "name": name, **wrong})
    for wrong in WRONG_BESIDE_VECTORS:
        with pytest.raises(errors, match=rf"{begin}.*\b{[*wrong][-1]}\b"):
            kind.from_pretrained(torch.ones(3, 4), name=name, **wrong)
    with pytest.raises(errors, match=rf"{begin}embeddings must be \[n, dim\]"):
        kind.from_pretrained(torch.ones(3), name=name)


def test_arguments_by_position():
    layer = DistributedEmbedding("mean", 7, 4, 2, 3, 5, False)
    assert (layer.combiner, layer.capacity, layer.embedding_vec_size) == ("mean", 7, 4)
    assert (layer.slot_num, layer.max_nnz, layer.max_feature_num, layer.table) == (2, 3, 5, None)
    dense = All2AllDenseEmbedding(7, 4, 2, 3, True, False)
    assert (dense.slot_num, dense.nnz_per_slot, dense.dynamic_input, dense.table) == (
        2, 3, True, None,
    )  # fmt: skip
    single = Embedding(7, 4, -1, 2.0, 1.0, False, True, None, False, "cpu", torch.float64)
    assert (single.padding_key, single.max_norm, single.norm_type) == (6, 2.0, 1.0)
    assert single.weight.dtype == torch.float64
    bags = EmbeddingBag(7, 4, 2.0, 1.0, False, "sum", True, None, True, 1, "cpu", torch.float64)
    assert (bags.mode, bags.include_last_offset, bags.padding_key) == ("sum", True, 1)
    assert (bags.max_norm, bags.norm_type, bags.weight.dtype) == (2.0, 1.0, torch.float64)


@pytest.mark.parametrize("kind", LAYERS)
def test_options_reach_the_table(kind):
    given = {
        "key_dtype": torch.int32, "padding_key": 3, "gradient_reduction": "sum", "seed": 5,
        "name": "users", "placement": "modulo", "max_keys_per_rank": 7, "insert": False,
    }  # fmt: skip
    made = make(kind, **given)
    for layer in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        attributes = {name: getattr(layer, name) for name in given if name != "seed"}
        assert {**attributes, "seed": int(layer.seed)} == given


@pytest.mark.parametrize("kind", LAYERS)
def test_unknown_options_are_refused(kind):
    with pytest.raises(TypeError, match=rf"^{kind.__name__}: .* on_ful; did you mean on_full\?$"):
        make(kind, on_ful="error")
    with pytest.raises(TypeError, match=r"^users: .* devise; did you mean device\?$"):
        make(kind, name="users", devise="cpu")
    with pytest.raises(TypeError, match=r"^users: there is no xyzzy$"):
        make(kind, name="users", xyzzy=1)


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_unknown_options_beside_given_vectors_are_refused(kind):
    with pytest.raises(TypeError, match=rf"^{kind.__name__}: .* did you mean placement\?$"):
        kind.from_pretrained(torch.ones(3, 4), plaement="hash")


def test_layers_derived_from_ours_have_signatures_of_their_own():
    class Mine(Embedding):
        def __init__(self, rows: int) -> None:
            super().__init__(rows, 4, onfull="error")

    assert list(inspect.signature(Mine).parameters) == ["rows"]
    with pytest.raises(TypeError, match=r"^Mine: there is no onfull; did you mean on_full\?"):
        Mine(3)


def test_the_seed_of_init_is_for_layers_without_a_seed_of_their_own(monkeypatch):
    given = {"name": "n"}, {"name": "n", "seed": 5}
    before = [int(Embedding(9, 4, **options).seed) for options in given]
    monkeypatch.setattr(settings, "seed", settings.seed)  # so that the test's end restores the seed
    sparsekit.init(seed=7)
    after = [int(Embedding(9, 4, **options).seed) for options in given]
    assert before[0] != after[0]
    assert before[1] == after[1] == 5


def test_a_layer_keeps_the_process_group_of_init(monkeypatch):
    group = object()  # without ranks nothing communicates
    monkeypatch.setattr(settings, "process_group", group)
    layer = Embedding(9, 4)
    monkeypatch.undo()
    assert layer.process_group is group
    assert Embedding(9, 4).process_group is None
