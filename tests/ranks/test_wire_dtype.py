"""With bfloat16 as the wire dtype, rounding errors stay within the documented bounds."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import sparsekit

from .test_faults import raised

BFLOAT16 = torch.bfloat16
# Largest relative error when an element is rounded to bfloat16.
ROUNDING = 2.0**-8
# Tolerance for sums whose terms are added in a different order.
EPSILON = {torch.float32: 1e-6, torch.float64: 1e-14}


@contextlib.contextmanager
def by_default(wire_dtype):
    sparsekit.init(wire_dtype=wire_dtype)
    try:
        yield
    finally:
        sparsekit.init(wire_dtype=None)


def bags(rank):
    """Return bags of three keys, mostly shared with other ranks; one bag is all padding."""
    generator = torch.Generator().manual_seed(rank)
    keys = torch.randint(0, 40, (30, 2, 3), generator=generator)
    keys[rank] = -1
    return keys


def pooling(name, combiner="sum", wire_dtype=None, **keywords):
    return sparsekit.DistributedEmbedding(
        combiner, 200, 8, 2, 3, name=name, padding_key=-1, wire_dtype=wire_dtype,
        gradient_reduction="sum", **keywords,
    )  # fmt: skip


def upstream(rank, dtype):
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(30, 2, 8, generator=generator, dtype=torch.float64).to(dtype)


def on_ranks(own):
    """Sum a tensor over all ranks."""
    own = own.clone()
    dist.all_reduce(own)
    return own


def scale(rank, combiner, keys):
    counts = (keys >= 0).sum(2, keepdim=True).clamp(min=1).double()
    return {"sum": 1 / torch.ones(()), "mean": 1 / counts, "sqrtn": counts.rsqrt()}[combiner]


def check_bounds(rank, strategy, combiner, dtype):
    """Check that outputs and gradients are within the documented bound of a plain layer's."""
    keys, grad = bags(rank), upstream(rank, dtype)
    layers = [
        pooling("same", combiner, wire, strategy=strategy, dtype=dtype) for wire in (BFLOAT16, None)
    ]
    outputs = [layer(keys) for layer in layers]
    for out in outputs:
        out.backward(grad)
    vectors = sparsekit.All2AllDenseEmbedding(
        200, 8, 2, 3, name="same", padding_key=-1, dtype=dtype
    )
    summands = vectors(keys).detach().double().abs().sum(2) * scale(rank, combiner, keys)
    wired, plain = (out.detach().double() for out in outputs)
    slack = 1 + 1e-3
    within = ROUNDING * slack * summands + EPSILON[dtype]
    assert ((wired - plain).abs() <= within).all()
    # No rank owns all keys, so some values must have been rounded.
    assert (wired - plain).abs().max() > EPSILON[dtype]

    # On the route by key, each rank sends the sum of its gradients of a row.
    weighted = (grad.double() * scale(rank, combiner, keys)).unsqueeze(2).expand(-1, -1, 3, -1)
    if strategy == "reduce_scatter":  # on the route by bag, ranks send the gradients of bags
        weighted = weighted.abs()
    sent = torch.zeros(41, 8, dtype=torch.float64)
    sent.index_add_(0, keys.flatten() % 41, weighted.reshape(-1, 8))
    bound = on_ranks(sent.abs()) * ROUNDING * slack + EPSILON[dtype] * 40
    gradients = []
    for layer in layers:
        own = layer.table.keys()
        dense = layer.weight.grad.to_dense()[: len(own)].double()
        gradients.append(dense[own.argsort()])
    wired, plain = gradients
    own = layers[0].table.keys().sort().values
    assert ((wired - plain).abs() <= bound[own]).all()
    assert (wired - plain).abs().max() > EPSILON[dtype] * 40


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("strategy", ["all_to_all", "reduce_scatter"])
def test_results_are_within_the_documented_bound(ranks, strategy, combiner, dtype):
    ranks(check_bounds, strategy, combiner, dtype)


def vectors_of_rows(rank):
    """Check that vectors of other ranks are rounded once, and the rank's own vectors are not."""
    keys = torch.arange(64)
    wired, plain = (
        sparsekit.All2AllDenseEmbedding(
            64, 8, 1, 1, dynamic_input=True, name="rows", wire_dtype=wire
        )
        for wire in (BFLOAT16, None)
    )
    got, exact = wired(keys), plain(keys)
    own = torch.zeros(64, dtype=torch.bool)
    own[wired.owned(keys)] = True
    assert torch.equal(got[own], exact[own])
    assert torch.equal(got[~own], exact[~own].to(BFLOAT16).float())
    assert not torch.equal(got[~own], exact[~own])
    assert 0 < own.sum() < 64
    got.sum().backward()  # bfloat16 holds ones exactly
    exact.sum().backward()
    assert torch.equal(wired.weight.grad.to_dense(), plain.weight.grad.to_dense())


def test_a_vector_is_rounded_once_and_those_of_own_rows_are_not(ranks):
    ranks(vectors_of_rows)


def sums_in_float32(rank):
    """Check that a rank's small gradients are not lost when added to another's large gradient."""
    layer = sparsekit.All2AllDenseEmbedding(
        8, 4, 1, 1, dynamic_input=True, name="sums", wire_dtype=BFLOAT16, gradient_reduction="sum"
    )
    layer(torch.tensor([1, 2, 3, 4])).backward(torch.full((4, 4), 1024.0 if rank == 0 else 0.5))
    gradient = layer.weight.grad.to_dense()[: len(layer.table)]
    assert (gradient == 1024 + 0.5 * (dist.get_world_size() - 1)).all()
    return len(layer.table)


def test_gradients_are_added_in_float32(ranks):
    assert sum(ranks(sums_in_float32)) == 4


def rows_of_bfloat16(rank, strategy):
    """Check that bfloat16 rows are sent as they are, but sums of bags as float32 by default."""
    keys = bags(rank)
    wired, plain = (
        pooling("narrow", wire_dtype=wire, strategy=strategy, dtype=BFLOAT16)
        for wire in (BFLOAT16, None)
    )
    outputs = [layer(keys) for layer in (wired, plain)]
    for out in outputs:
        out.float().sum().backward()
    same = [
        torch.equal(*outputs),
        torch.equal(wired.weight.grad.to_dense(), plain.weight.grad.to_dense()),
    ]
    assert all(same) == (strategy == "all_to_all")


@pytest.mark.parametrize("strategy", ["all_to_all", "reduce_scatter"])
def test_rows_that_are_bfloat16(ranks, strategy):
    ranks(rows_of_bfloat16, strategy)


MIXED = [
    (torch.float32, BFLOAT16), (torch.float32, None), (torch.float64, BFLOAT16),
    (BFLOAT16, BFLOAT16), (torch.float32, BFLOAT16), (torch.float64, None),
]  # fmt: skip


def mixed_group(rank):
    """Check that a group of mixed dtypes equals separate layers and needs four collectives."""

    def layers():
        return {
            f"t{i}": pooling(f"t{i}", wire_dtype=wire, dtype=dtype, strategy="all_to_all")
            for i, (dtype, wire) in enumerate(MIXED)
        }

    group, alone = sparsekit.EmbeddingGroup(layers()), layers()
    keys = {name: bags(rank + i) for i, name in enumerate(alone)}
    exchange = alone["t0"].exchange
    for _ in range(2):
        before = exchange.collectives
        outputs = group(keys)
        torch.autograd.backward(
            list(outputs.values()), [upstream(rank, out.dtype) for out in outputs.values()]
        )
        assert exchange.collectives - before == 4
        for name, layer in alone.items():
            out = layer(keys[name])
            out.backward(upstream(rank, out.dtype))
            assert torch.equal(out, outputs[name]), name
    for name, layer in alone.items():
        # Rows may be in a different order.
        one, other = (
            x.weight.grad.to_dense()[x.table.keys().argsort()] for x in (layer, group.layers[name])
        )
        assert torch.equal(one, other), name


def test_a_group_of_several_dtypes(ranks):
    ranks(mixed_group)


def way_of_auto(rank, wire_dtype, keys_of_a_bag):
    """Return the route that auto selects, as the first collective after the handshake shows."""
    layer = sparsekit.DistributedEmbedding(
        "sum", 4000, 64, 1, keys_of_a_bag, name="auto", wire_dtype=wire_dtype
    )
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        send = layer.exchange.send

        def note(what, *rest, **options):
            sent.append(what)
            return send(what, *rest, **options)

        patch.setattr(layer.exchange, "send", note)
        # The keys are distinct, and the other rank owns half of them.
        layer(torch.arange(20 * keys_of_a_bag).view(20, 1, keys_of_a_bag))
    return sent[0].split(":")[0]


def test_auto_counts_the_bytes_of_both_ways_on_the_wire(two_ranks):
    # The route by key sends 8 + 4 * 64 bytes for half of the keys; the route by bag sends 8 bytes
    # for every key and 4 * 64 for each bag. With bfloat16, 4 * 64 becomes 2 * 64. The two dtypes
    # switch routes at almost the same size of bags.
    for wire_dtype in (None, BFLOAT16):
        assert two_ranks(way_of_auto, wire_dtype, 1) == ["keys"] * 2
        assert two_ranks(way_of_auto, wire_dtype, 8) == ["bags"] * 2
    assert two_ranks(way_of_auto, None, 3) == ["bags"] * 2
    assert two_ranks(way_of_auto, BFLOAT16, 3) == ["bags"] * 2


def bytes_of_a_step(rank):
    def step_of(wire_dtype):
        layer = sparsekit.DistributedEmbedding(
            "sum", 2000, 64, 1, 1, name="bytes", wire_dtype=wire_dtype, strategy="all_to_all"
        )
        before = layer.exchange.bytes_sent
        layer(torch.arange(2000).view(-1, 1, 1)).sum().backward()
        return layer.exchange.bytes_sent - before

    return step_of(None), step_of(BFLOAT16)


def test_it_halves_the_bytes(two_ranks):
    for plain, wired in two_ranks(bytes_of_a_step):
        keys = 8 * 1000
        assert wired - keys == pytest.approx((plain - keys) / 2, rel=0.1)


def defaults(rank):
    with by_default(BFLOAT16):
        assert pooling("a").dtype_on_wire == BFLOAT16
        assert pooling("b", wire_dtype=torch.float32).dtype_on_wire == torch.float32
        sparsekit.init(timeout=60)  # init without wire_dtype keeps the dtype
        assert pooling("c").wire_dtype == BFLOAT16
        # A layer keeps the settings that it was made with.
        made = pooling("d")
    assert pooling("e").dtype_on_wire == torch.float32
    assert made.dtype_on_wire == BFLOAT16


def test_the_default_is_that_of_init(two_ranks):
    two_ranks(defaults)


def other_dtype_on_one(rank):
    pooling("one", wire_dtype=BFLOAT16 if rank else None)(bags(rank))


def test_ranks_that_disagree(two_ranks):
    outcomes = two_ranks.outcomes(other_dtype_on_one)
    raised(outcomes, "RuntimeError", "ranks are about to do different things")
    raised(outcomes, "RuntimeError", "torch.bfloat16 between ranks")


def test_dtypes_that_there_are_not():
    known = r"users: wire_dtype must be one of torch.bfloat16, torch.float32; got torch.float16"
    with pytest.raises(ValueError, match=known):
        pooling("users", wire_dtype=torch.float16)
    for bad in (torch.float32, "bfloat16"):
        known = f"sparsekit.init: wire_dtype must be one of None, torch.bfloat16; got {bad!r}"
        with pytest.raises(ValueError, match=known):
            sparsekit.init(wire_dtype=bad)


def test_one_rank_knows_no_wire():
    plain, wired = pooling("one"), pooling("one", wire_dtype=BFLOAT16)
    assert torch.equal(plain(bags(0)), wired(bags(0)))
