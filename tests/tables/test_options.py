"""Tests of a table's options: bounds, defaults that depend on other settings, and messages."""

import math
import re

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsekit import hashing
from sparsekit.distributed.world import settings
from sparsekit.tables import options as module
from sparsekit.tables.admission import MinCount, Probability
from sparsekit.tables.options import TableOptions, check_count, drawn_seed, keyword_parameters
from sparsekit.tables.scores import LFU, LRU

CPU = torch.device("cpu")


def options(**changes):
    needed = {
        "max_vocabulary_size_per_gpu": 9, "embedding_vec_size": 4, "use_hashtable": True,
        "dtype": None, "device": None,
    }  # fmt: skip
    return TableOptions(**{**needed, **changes})


CHECKED = {
    "max_vocabulary_size_per_gpu": 9, "embedding_vec_size": 4, "use_hashtable": True,
    "dtype": torch.float32, "device": CPU, "key_dtype": torch.int64, "embedding_initializer": None,
    "padding_key": None, "on_full": "error", "gradient_reduction": "mean", "seed": None,
    "name": None, "process_group": None, "placement": "hash", "wire_dtype": None,
    "max_keys_per_rank": None, "insert": True, "max_capacity": None, "max_rows": None,
    "score": None, "ttl": None, "admission": None, "before_admission": "initial",
    "low_watermark": 0.99, "storage": "memory", "max_resident_bytes": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, {}),
        ({"max_vocabulary_size_per_gpu": np.int64(1)}, {"max_vocabulary_size_per_gpu": 1}),
        ({"max_vocabulary_size_per_gpu": 2**31 - 1}, None),
        ({"embedding_vec_size": 1}, None),
        ({"embedding_vec_size": 2**63 - 1}, None),
        ({"embedding_vec_size": np.int32(7)}, {"embedding_vec_size": 7}),
        *(({"key_dtype": dtype}, None) for dtype in (torch.int64, torch.int32)),
        *(({"dtype": dtype}, None) for dtype in (torch.float32, torch.float64, torch.bfloat16)),
        ({"gradient_reduction": "sum"}, None),
        ({"storage": "mmap:/"}, {"storage": "/"}),
        ({"storage": "mmap:/", "max_resident_bytes": 1}, {"storage": "/", "max_resident_bytes": 1}),
        ({"use_hashtable": False}, {"use_hashtable": False, "placement": "modulo"}),
        ({"use_hashtable": False, "placement": "modulo"}, None),
        ({"placement": "modulo"}, None),
        ({"placement": "hash"}, None),
        ({"wire_dtype": torch.bfloat16}, None),
        ({"wire_dtype": torch.bfloat16, "dtype": torch.bfloat16}, None),
        ({"wire_dtype": torch.float32}, {}),  # the dtype of the table needs no other
        (
            {"wire_dtype": torch.float64, "dtype": torch.float64},
            {"dtype": torch.float64},
        ),
        ({"max_keys_per_rank": 1}, None),
        ({"insert": False}, None),
        ({"on_full": "evict"}, {"on_full": "evict", "score": LRU()}),
        (
            {"on_full": "evict", "max_rows": 5, "score": "lfu"},
            {"on_full": "evict", "max_rows": 5, "score": LFU()},
        ),
        *(
            ({"on_full": "evict", "low_watermark": low, "score": LRU()}, None)
            for low in (5e-324, 0.99, 1, np.float64(0.5))
        ),
        ({"low_watermark": 0.99}, {}),
        ({"ttl": 3}, {"ttl": 3, "score": LRU()}),
        ({"score": LFU(7)}, None),
        ({"admission": MinCount(2)}, {"admission": MinCount(2), "score": LRU()}),
        ({"admission": Probability(0.5), "before_admission": "zero", "score": LRU()}, None),
        ({"device": "cpu"}, {}),
        ({"device": "meta"}, {"device": torch.device("meta")}),
        *(({"padding_key": key}, None) for key in (-(2**63), 2**63 - 1, 0)),
        ({"padding_key": np.int16(3)}, {"padding_key": 3}),
        ({"embedding_initializer": "unchecked"}, None),
        ({"name": "n", "seed": 0}, None),
        *(({"seed": seed}, None) for seed in (-(2**63), -1, 0, 2**63 - 1)),
        ({"seed": 2**63}, {"seed": -(2**63)}),
        ({"seed": 2**64 - 1}, {"seed": -1}),
        ({"name": "n"}, {"name": "n", "seed": int(hashing.xxh64(["n"], seed=0))}),
    ],
    ids=str,
)
def test_options_that_are_taken(changes, differs):
    checked = vars(options(**changes).checked("layer"))
    assert checked == {**CHECKED, **(changes if differs is None else differs)}
    for name in ("max_vocabulary_size_per_gpu", "embedding_vec_size"):
        assert type(checked[name]) is int
    assert type(checked["low_watermark"]) is float
    assert checked["padding_key"] is None or type(checked["padding_key"]) is int


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        *(
            ({"max_vocabulary_size_per_gpu": size}, ValueError,
             f"max_vocabulary_size_per_gpu must be in [1, 2147483647], got {size}")
            for size in (0, -1, 2**31)
        ),
        *(
            ({"embedding_vec_size": size}, ValueError,
             f"embedding_vec_size must be in [1, 9223372036854775807], got {size}")
            for size in (0, 2**63)
        ),
        ({"embedding_vec_size": 2.0}, TypeError, "embedding_vec_size must be an int, got 2.0"),
        ({"key_dtype": torch.int16}, ValueError,
         "key_dtype must be one of torch.int64, torch.int32; got torch.int16"),
        ({"dtype": torch.float16}, ValueError,
         "dtype must be one of torch.float32, torch.float64, torch.bfloat16; got torch.float16"),
        ({"max_vocabulary_size_per_gpu": None, "on_full": "evict"}, ValueError,
         "on_full='evict' needs a number of rows: max_vocabulary_size_per_gpu (or num_embeddings) "
         "is None, which is for tables that grow"),
        ({"max_vocabulary_size_per_gpu": None, "use_hashtable": False}, ValueError,
         "use_hashtable=False needs a number of rows: max_vocabulary_size_per_gpu (or "
         "num_embeddings) is None, which is for tables that grow"),
        ({"max_vocabulary_size_per_gpu": None, "max_capacity": 0}, ValueError,
         "max_capacity must be in [1, 2147483647], got 0"),
        ({"on_full": "shrink"}, ValueError,
         "on_full must be one of error, evict, grow; got 'shrink'"),
        ({"max_capacity": 20}, ValueError,
         "max_capacity=20 needs on_full='grow', got on_full='error'"),
        ({"max_capacity": 8, "on_full": "grow"}, ValueError,
         "max_capacity must be in [9, 2147483647], got 8"),
        ({"max_rows": 5, "on_full": "grow"}, ValueError, "max_rows=5 needs on_full='evict'"),
        ({"use_hashtable": False, "on_full": "grow"}, ValueError,
         "on_full='grow' needs the hash table: with use_hashtable=False the rows are as many as "
         "there are keys"),
        ({"max_rows": 5}, ValueError, "max_rows=5 needs on_full='evict'"),
        ({"max_rows": 0, "on_full": "evict"}, ValueError,
         "max_rows must be in [1, 9223372036854775807], got 0"),
        *(({"low_watermark": low, "on_full": "evict"}, ValueError,
           f"low_watermark must be in (0, 1], got {float(low)}")
          for low in (0, -0.5, 1.0000001, math.nan, math.inf)),
        *(({"low_watermark": low, "on_full": "evict"}, TypeError,
           f"low_watermark must be a number, got {low!r}") for low in ("0.9", None, True)),
        ({"low_watermark": 0.9}, ValueError, "low_watermark=0.9 needs on_full='evict'"),
        ({"low_watermark": 1, "ttl": 3}, ValueError, "low_watermark=1.0 needs on_full='evict'"),
        ({"ttl": 0}, ValueError, "ttl must be in [1, 4611686018427387904], got 0"),
        ({"score": "old"}, ValueError,
         "score must be 'lru', 'lfu', 'given', sparsekit.LRU(), sparsekit.LFU(...) or a function "
         "of keys, got 'old'"),
        ({"score": len, "max_keys_per_rank": 1}, ValueError,
         "score=len cannot have max_keys_per_rank, whose ranks do not agree on scores before rows "
         "change"),
        ({"score": "lfu", "max_keys_per_rank": 1}, ValueError,
         "score='lfu' cannot have max_keys_per_rank, whose messages have room neither for the rows "
         "in use nor for how often keys come"),
        ({"ttl": 3, "max_keys_per_rank": 1}, ValueError,
         "ttl=3 cannot have max_keys_per_rank, whose lookups drop no rows"),
        ({"on_full": "evict", "max_keys_per_rank": 1}, ValueError,
         "on_full='evict' cannot have max_keys_per_rank, whose messages have room neither for the "
         "rows in use nor for how often keys come"),
        ({"admission": 2}, TypeError,
         "admission must be sparsekit.MinCount(...), sparsekit.Probability(...) or None, got 2"),
        ({"admission": MinCount(2), "max_keys_per_rank": 1}, ValueError,
         "admission cannot have max_keys_per_rank, whose messages have room neither for the rows "
         "in use nor for how often keys come"),
        ({"before_admission": "zero"}, ValueError, "before_admission='zero' needs admission"),
        ({"before_admission": "none"}, ValueError,
         "before_admission must be one of initial, zero; got 'none'"),
        ({"on_full": "evict", "use_hashtable": False}, ValueError,
         "on_full='evict' needs the hash table: with use_hashtable=False every key has a row for "
         "ever"),
        ({"ttl": 3, "use_hashtable": False}, ValueError,
         "ttl=3 needs the hash table: with use_hashtable=False every key has a row for ever"),
        ({"gradient_reduction": "max"}, ValueError,
         "gradient_reduction must be one of mean, sum; got 'max'"),
        ({"wire_dtype": torch.float64}, ValueError,
         "wire_dtype must be one of torch.bfloat16, torch.float32; got torch.float64"),
        ({"placement": "rank"}, ValueError, "placement must be one of hash, modulo; got 'rank'"),
        ({"placement": ""}, ValueError, "placement must be one of hash, modulo; got ''"),
        ({"placement": "hash", "use_hashtable": False}, ValueError,
         "placement='hash' needs the hash table: with use_hashtable=False a key is a row number, "
         "key // world_size on rank key % world_size"),
        ({"max_keys_per_rank": 0}, ValueError,
         "max_keys_per_rank must be in [1, 9223372036854775807], got 0"),
        *(({"insert": value}, TypeError, f"insert must be True or False, got {value!r}")
          for value in (1, None, "no")),
        ({"device": "mps"}, NotImplementedError, "device must be cpu, cuda or meta, got mps"),
        *(
            ({"padding_key": key}, ValueError,
             f"padding_key must be in [-9223372036854775808, 9223372036854775807], got {key}")
            for key in (-(2**63) - 1, 2**63)
        ),
        ({"padding_key": False}, TypeError, "padding_key must be an int, got False"),
        ({"padding_key": 1.0}, TypeError, "padding_key must be an int, got 1.0"),
        *(
            ({"seed": seed}, ValueError,
             f"seed must be in [-9223372036854775808, 18446744073709551615], got {seed}")
            for seed in (-(2**63) - 1, 2**64)
        ),
        ({"seed": "1", "name": "other"}, TypeError, "seed must be an int, got '1'"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_are_refused(changes, error, message):
    with pytest.raises(error, match=f"^layer: {re.escape(message)}$"):
        options(**changes).checked("layer")


@pytest.mark.parametrize("own", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_init", [None, torch.bfloat16])
def test_the_wire_dtype_of_init_is_for_layers_without_one(own, of_init, monkeypatch):
    monkeypatch.setattr(settings, "wire_dtype", of_init, raising=False)
    found = options(wire_dtype=own).checked("n").wire_dtype
    assert found == (None if own == torch.float32 else own or of_init)


def test_the_process_group_of_init_is_for_layers_without_one(monkeypatch):
    own, of_init = (type(name, (), {"__deepcopy__": lambda self, memo: self})() for name in "ab")
    monkeypatch.setattr(settings, "process_group", of_init)
    assert options(process_group=own).checked("n").process_group is own
    assert options().checked("n").process_group is of_init


def test_a_name_and_the_seed_of_init_give_the_seed(monkeypatch):
    monkeypatch.setattr(settings, "seed", 7, raising=False)
    assert options(name="a").checked("n").seed == int(hashing.xxh64(["a"], seed=7))
    assert options(name="a").checked("n").seed != options(name="b").checked("n").seed
    assert options(name="").checked("n").seed == int(hashing.xxh64([""], seed=7))
    assert options(name="a", seed=0).checked("n").seed == 0
    assert options().checked("n").seed is None


def test_defaults_of_torch_are_those_of_the_moment():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with pytest.raises(ValueError, match=r"^n: dtype must be .*; got torch.float16$"):
            options().checked("n")
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            checked = options().checked("n")
            assert options(device="cpu").checked("n").device == CPU
    finally:
        torch.set_default_dtype(before)
    assert (checked.dtype, checked.device) == (torch.float64, torch.device("meta"))


@pytest.mark.parametrize("built", [True, False])
def test_cuda_needs_a_build_with_its_kernels(built, monkeypatch):
    monkeypatch.setattr(module._pybind, "build_info", lambda: {"cuda": built})
    if built:
        assert options(device="cuda:1").checked("n").device == torch.device("cuda", 1)
        return
    with pytest.raises(NotImplementedError, match=r"^n: device is cuda:1, but .* no CUDA kernels;"):
        options(device="cuda:1").checked("n")


def test_counts():
    assert check_count("n", "a", np.int8(1)) == check_count("n", "a", 1, 1) == 1
    for value in (0, 4):
        with pytest.raises(ValueError, match=rf"^n: a must be in \[1, 3\], got {value}$"):
            check_count("n", "a", value, 3)


def test_keywords_as_parameters():
    parameters = keyword_parameters()
    assert [each.name for each in parameters] == [
        "key_dtype", "embedding_initializer", "padding_key", "on_full", "max_capacity",
        "storage", "max_resident_bytes", "max_rows", "low_watermark",
        "score", "ttl", "admission", "before_admission", "gradient_reduction",
        "seed", "name",
        "process_group", "placement", "wire_dtype", "max_keys_per_rank", "insert",
    ]  # fmt: skip
    for each in parameters:
        assert each.kind == each.KEYWORD_ONLY
        assert each.default == CHECKED[each.name] or each.name == "placement"
    assert {each.name: each.annotation for each in parameters}["insert"] is bool


def test_drawn_seeds_come_from_the_generator_of_torch():
    torch.manual_seed(3)
    first, second = drawn_seed(), drawn_seed()
    assert first != second
    torch.manual_seed(3)
    with FakeTensorMode(), torch.device("meta"):
        assert drawn_seed() == first
    assert type(first) is int
    assert 0 <= first < 2**63
    torch.manual_seed(3)
    drawn = [drawn_seed() for _ in range(8)]
    assert max(drawn) > 2**60  # all bits are drawn
