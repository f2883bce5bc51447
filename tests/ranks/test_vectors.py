"""On several ranks, each rank may request or assign vectors of keys that any rank owns."""

import pytest
import torch
import torch.distributed as dist

import sparsekit

from .pool import Ranks
from .test_faults import raised

DIM = 3
LAYERS = {
    "hash": {},
    "modulo": {"placement": "modulo"},
    "rows": {"use_hashtable": False},
    "rounded on the wire": {"wire_dtype": torch.bfloat16, "padding_key": 2},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.fixture(scope="module")
def three_ranks():
    pool = Ranks(3)
    yield pool
    pool.close()


def make(capacity=60, name="n", **settings):
    return sparsekit.Embedding(capacity, DIM, name=name, **settings)


def of_keys(keys):
    """Return a distinct vector for each key, with values that bfloat16 would round."""
    return keys.unsqueeze(1) + torch.tensor([0, 1 / 512, 1 / 3])


def gather(value):
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, value)
    return everything


def check(rank, settings):
    ranks = dist.get_world_size()
    layer = make(**settings)
    dtype, padding = layer.weight.dtype, layer.padding_key
    keys = torch.arange(30)
    lookups = layer.exchange.lookups
    start = layer.vectors(keys).clone()
    assert layer.exchange.lookups == lookups + 1
    # Ranks assign different numbers of keys, each in its own order; the last rank assigns none.
    mine = keys[keys % (ranks - 1) == rank].flip(0) if rank < ranks - 1 else keys[:0]
    layer.assign(mine, of_keys(mine).to(torch.float32 if rank else torch.float64))
    expected = of_keys(keys).to(dtype)
    if padding is not None:
        expected[padding] = 0
    # Each rank then requests keys that any rank may own.
    asked = torch.stack([keys.roll(rank), keys.flip(0)])
    found = layer.vectors(asked if rank else asked[:, :7])
    assert torch.equal(found, expected[asked if rank else asked[:, :7]])
    absent = layer.vectors(keys + 30)
    layer.eval()
    if layer.wire_dtype is None:
        assert torch.equal(layer(keys), expected)
        assert torch.equal(layer(keys + 30), absent)
    assert not torch.equal(start, expected)

    items = list(layer.items(chunk=4))
    own = torch.cat([piece.keys for piece in items])
    vectors = torch.cat([piece.vectors for piece in items])
    assert len(layer.owned(own)) == len(own)
    assert torch.equal(vectors, layer.weight[: len(own)].detach())
    assert max(len(piece.keys) for piece in items) == 4
    count = 60 * ranks if layer.table is None else 30
    assert sorted(key for of_rank in gather(own.tolist()) for key in of_rank) == [*range(count)]
    return start


@pytest.mark.parametrize("settings", LAYERS.values(), ids=LAYERS.keys())
def test_written_and_read_anywhere(three_ranks, settings):
    start, *others = three_ranks(check, settings)
    alone = sparsekit.Embedding(60 * (len(others) + 1), DIM, name="n", **settings)
    for other in (*others, alone.vectors(torch.arange(30))):
        assert torch.equal(start, other)


def equal_keys(rank):
    layer = make()
    keys = torch.tensor([rank, 5, 9, 5])
    layer.assign(keys, of_keys(keys) + torch.tensor([[100.0 * rank], [0], [50.0 * rank], [0.5]]))
    asked = torch.tensor([0, 1, 2, 5, 9])
    expected = of_keys(asked) + torch.tensor([[0], [100.0], [200.0], [0.5], [100.0]])
    assert torch.equal(layer.vectors(asked), expected)


def test_the_last_rank_counts_for_equal_keys(three_ranks):
    three_ranks(equal_keys)


def faults(rank, case):
    layer = make(4, placement="modulo") if case == "full" else make(60, use_hashtable=False)
    keys = torch.arange(2) + 2 * rank  # keys 0 to 5, two per rank
    vectors, odd = of_keys(keys), rank == 1
    layer.assign(keys, vectors)
    try:
        if case == "key out of range":
            layer.vectors(torch.tensor([3, 180]) if odd else keys)
        elif case == "shape":
            layer.assign(keys, vectors[:, :2] if odd else vectors)
        elif case == "full":  # rank 1 lacks the capacity for its three new keys
            many = torch.tensor([31 + 3 * rank, 9])
            layer.assign(many, of_keys(many))
        elif case == "different calls":
            layer.vectors(keys) if odd else layer.assign(keys, vectors)
        elif case == "another rank":
            layer.rank = 7 if odd else rank
            layer.vectors(keys)
    finally:
        layer.rank = rank
        # The layer still works; only ranks with free capacity have new rows.
        everything = torch.arange(6)
        assert torch.equal(layer.vectors(everything), of_keys(everything))
        held = torch.cat([piece.keys for piece in layer.items()])
        if case == "full":
            assert held.tolist() == [[0, 3, 9], [1, 4], [2, 5]][rank]


@pytest.mark.parametrize(
    ("case", "type", "message"),
    [
        ("key out of range", "IndexError", "key 180 at position 1"),
        ("shape", "ValueError", "vectors must have shape (2, 3), got (2, 2)"),
        ("full", "TableFullError", "the table on rank 1 is full: 2 of 4"),
        ("different calls", "RuntimeError", "rank 0: assign vectors of n "),
        ("another rank", "RuntimeError", "n: made on rank 7 of 3, whose part of the table"),
    ],
)
def test_faults_are_those_of_all_ranks(three_ranks, case, type, message):
    raised(three_ranks.outcomes(faults, case), type, message)


def drawn(rank, seed):
    torch.manual_seed(seed)
    layer = sparsekit.Embedding(20, DIM)
    return layer(torch.arange(9)).detach()


def drawn_on_each(rank):
    return drawn(rank, rank)


def test_unnamed_layers_take_what_torch_draws_alike_on_all_ranks(three_ranks):
    for of_rank in three_ranks(drawn, 5):
        assert torch.equal(of_rank, drawn(0, 5))
    outcomes = three_ranks.outcomes(drawn_on_each)
    raised(outcomes, "RuntimeError", "ranks are about to do", "drawn by torch", "name the layer")


def on_meta(rank):
    """Check that a layer made on meta, without an exchange, can be given memory later."""
    with torch.device("meta"):
        layer = make()
        rows = make(use_hashtable=False)
    kept = make()
    keys = torch.arange(30)
    for one in (layer, rows):
        one.to_empty(device="cpu")
        one.reset_parameters()
        twin = make(use_hashtable=one.table is not None)
        assert torch.equal(one(keys), twin(keys))
    assert layer.owners is kept.owners
    # A move to meta also drops a layer's own map.
    kept.owners = kept.owners.flip(0)
    assert kept.to("meta").to_empty(device="cpu").owners is layer.owners


def test_layers_begun_on_meta(three_ranks):
    three_ranks(on_meta)


def on_cpu_by_name(rank):
    """Check that layers work on their own device even if the default device differs."""
    keys = torch.arange(8)
    with torch.device("meta"):
        for strategy in ("all_to_all", "reduce_scatter"):
            layer = sparsekit.EmbeddingBag(9, DIM, device="cpu", name="n", strategy=strategy)
            layer(keys.view(4, 2)).sum().backward()
            assert torch.equal(layer.vectors(keys), layer.eval()(keys.view(8, 1)))
        layer.assign(keys[: rank + 1], torch.ones(rank + 1, DIM, device="cpu"))
        assert sorted(key for piece in layer.items() for key in piece.keys.tolist()) == sorted(
            keys[layer.owned(keys)].tolist()
        )
        layer.vectors(keys.double() if rank else keys)


def test_another_default_device(three_ranks):
    raised(three_ranks.outcomes(on_cpu_by_name), "TypeError", "n: keys must be int64 or int32")


def xavier(rank):
    """Check that torch's initializer functions act as if one table had the rows of all ranks."""
    init = torch.nn.init
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    vectors = []
    for function, rows in ((init.xavier_uniform_, False), (init.orthogonal_, True)):
        layer = make(60 // ranks, embedding_initializer=function, use_hashtable=not rows)
        vectors.append(layer.vectors(torch.arange(60)))
    return vectors


def test_functions_as_initializers(three_ranks):
    for of_rank in three_ranks(xavier):
        for found, alone in zip(of_rank, xavier(0), strict=True):
            assert torch.equal(found, alone)
