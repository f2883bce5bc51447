"""A group of many tables equals separate layers and needs a fixed number of collectives."""

import pytest
import torch
import torch.distributed as dist

import sparsekit

from . import on_device

# An error after the handshake ends the exchange of a device, which waits for no answer to its
# messages; see tests/nccl for what the ranks then raise.
goes_on_after_errors = pytest.mark.skipif(
    on_device.NAME == "cuda", reason="on a device such an error ends the exchange"
)

COMBINERS = ("sum", "mean", "sqrtn")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def layers(count, prefix):
    """Return layers of mixed dims and dtypes; some do not pool, and some have no hash table."""
    made = {}
    for i in range(count):
        dim, dtype, hashed = 1 + i * 3 % 17, DTYPES[i % 3], i % 4 != 3
        settings = {"use_hashtable": hashed, "dtype": dtype, "name": f"{prefix}{i}", "seed": i}
        if hashed and i % 3 == 1:
            settings["placement"] = "modulo"
        if i % 5 == 4:
            made[f"t{i}"] = sparsekit.All2AllDenseEmbedding(200, dim, 2, 3, **settings)
        else:
            made[f"t{i}"] = sparsekit.DistributedEmbedding(
                COMBINERS[i % 3], 200, dim, 1 + i % 2, 3, strategy="all_to_all", **settings
            )
    return made


def inputs(made, rank, seed):
    """Return bags for each layer; ranks have different numbers of bags."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    keys = {}
    for name, layer in made.items():
        keys[name] = torch.randint(0, 50, (2 + 3 * rank, layer.slot_num, 3), generator=generator)
    return keys


def compare(rank, count):
    """Compare a group with separate layers for some steps; return the collectives per step."""
    together, apart = layers(count, "g"), layers(count, "s")
    group = sparsekit.EmbeddingGroup(together)
    exchange = next(iter(together.values())).exchange
    optimizers = [
        sparsekit.optim.LazyAdam(group.parameters(), lr=0.1),
        sparsekit.optim.LazyAdam([layer.weight for layer in apart.values()], lr=0.1),
    ]
    for seed in range(3):
        keys = inputs(together, rank, seed)
        before = exchange.collectives if exchange else 0
        outputs = group(keys)
        sum((out.float() ** 2).sum() for out in outputs.values()).backward()
        collectives = exchange.collectives - before if exchange else 0
        for name, layer in apart.items():
            out = layer(keys[name])
            assert torch.equal(out, outputs[name]), name
            (out.float() ** 2).sum().backward()
            assert torch.equal(layer.weight.grad.to_dense(), together[name].weight.grad.to_dense())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, layer in apart.items():
        assert torch.equal(layer.weight, together[name].weight), name
    return collectives


@pytest.mark.parametrize("count", [1, 5])
def test_a_group_is_its_layers_on_one_process(count):
    assert compare(0, count) == 0


def test_a_group_is_its_layers_and_has_a_fixed_number_of_collectives(ranks):
    collectives = {count: ranks(compare, count) for count in (1, 5, 26)}
    assert collectives[1] == collectives[5] == collectives[26]
    assert collectives[26] == [4] * ranks.world_size


def collectives_of_steps(rank, in_backward):
    """Return, for each number of tables, the number of collectives of one training step."""
    counts = {}
    for count in (1, 26, 100):
        tables = {
            f"t{i}": sparsekit.DistributedEmbedding("sum", 200, 4, 1, 3, name=f"{count}_{i}")
            for i in range(count)
        }
        group = sparsekit.EmbeddingGroup(tables)
        optimizer = sparsekit.optim.LazyAdam(group.parameters())
        if in_backward:
            sparsekit.optim.fuse_in_backward(optimizer, group)
        exchange = tables["t0"].exchange
        for seed in range(2):  # the first step's handshake may be longer
            before = exchange.collectives
            outputs = group(inputs(tables, rank, seed))
            torch.stack(list(outputs.values())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts[count] = exchange.collectives - before
    return counts


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_has_the_collectives_of_one_table_whatever_their_number(two_ranks, in_backward):
    for counts in two_ranks(collectives_of_steps, in_backward):
        assert counts[1] > 0
        assert counts[26] == counts[100] == counts[1]


def many_tables(count):
    layers = {
        f"t{i}": sparsekit.DistributedEmbedding("sum", 20, 2, 1, 2, name=f"many {i}")
        for i in range(count)
    }
    keys = {f"t{i}": torch.tensor([[[i % 7, 7 + i % 3]]]) for i in range(count)}
    return sparsekit.EmbeddingGroup(layers), keys


def more_counts_than_a_block_has_room_for(rank, count):
    group, keys = many_tables(count)
    exchange = group.layers["t0"].exchange
    before = exchange.collectives
    outputs = group(keys)
    sum(out.sum() for out in outputs.values()).backward()
    assert exchange.collectives - before == 5
    for i in (0, 506, 507, count - 1):
        alone = sparsekit.DistributedEmbedding("sum", 20, 2, 1, 2, name=f"many {i}")
        assert torch.equal(alone(keys[f"t{i}"]), outputs[f"t{i}"])
    return sum(len(layer.table) for layer in group.layers.values())


@pytest.mark.parametrize("count", [508, 511])
def test_more_tables_than_a_handshake_has_room_for(ranks, count):
    assert sum(ranks(more_counts_than_a_block_has_room_for, count)) == 2 * count


def interrupted_at_the_rest(rank):
    """Interrupt rank 1 before it sends its remaining counts; then start a new lookup on it."""
    group, keys = many_tables(508)
    exchange = group.layers["t0"].exchange
    if rank == 1:

        def interrupt(*arguments):
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "_rest", interrupt)
            with pytest.raises(KeyboardInterrupt):
                group(keys)
    with pytest.raises(RuntimeError, match="A step was interrupted on one of them"):
        group(keys)
    return len(group(keys))


@goes_on_after_errors
def test_the_rest_of_a_handshake_does_not_come(two_ranks_over):
    assert two_ranks_over(interrupted_at_the_rest) == [508, 508]


def one_of_many_differs(rank):
    group, keys = many_tables(300)
    group.layers["t200"].gradient_reduction = "mean" if rank else "sum"
    with pytest.raises(RuntimeError, match="ranks are about to do different things") as caught:
        group(keys)
    return str(caught.value)


def test_an_error_shows_where_many_tables_differ(two_ranks):
    for text in two_ranks(one_of_many_differs):
        assert len(text) < 2500
        rank_0, rank_1 = text.split("; rank 1: ")
        assert "many 200 (" in rank_0
        assert "many 200 (" in rank_1
        assert ", auto, sum, " in rank_0
        assert ", auto, sum, " not in rank_1


def gradients_of_two_reductions(rank):
    """Return, for each layer, the gradient of a key that all ranks request; 0 without a row."""
    made = {
        name: sparsekit.Embedding(9, 1, name=name, gradient_reduction=name)
        for name in ("mean", "sum")
    }
    outputs = sparsekit.EmbeddingGroup(made)({name: torch.tensor([5]) for name in made})
    sum(outputs.values()).sum().backward()
    return [float(layer.weight.grad.to_dense().sum()) for layer in made.values()]


def test_each_layer_of_a_group_has_its_own_gradient_reduction(ranks):
    n = ranks.world_size
    of_ranks = ranks(gradients_of_two_reductions)
    assert [sum(of_layer) for of_layer in zip(*of_ranks, strict=True)] == [1, n]


def left_out_of_the_loss(rank, left_out, strategy):
    """Train with tables of two dtypes, one of which the loss leaves out on these ranks."""
    made = {
        str(dtype): sparsekit.DistributedEmbedding(
            "sum", 50, 4, 1, dtype=dtype, strategy=strategy, name=f"of_{dtype}"
        )
        for dtype in (torch.float32, torch.float64)
    }
    group = sparsekit.EmbeddingGroup(made)
    optimizer = sparsekit.optim.SGD(group.parameters(), lr=1.0)
    keys = torch.arange(8).reshape(4, 1, 2)
    before = {name: layer.vectors(torch.arange(8)) for name, layer in made.items()}
    outputs = group(dict.fromkeys(made, keys))
    kept = list(outputs.values())[: 1 if rank in left_out else 2]
    sum(out.double().sum() for out in kept).backward()
    optimizer.step()
    changed = [
        before[name] - layer.vectors(torch.arange(8)).detach() for name, layer in made.items()
    ]
    return [change.double() for change in changed]


@pytest.mark.parametrize("left_out", [(0,), (0, 1)], ids=["one rank", "both ranks"])
@pytest.mark.parametrize("strategy", ["all_to_all", "reduce_scatter"])
def test_a_loss_may_leave_out_all_tables_of_a_dtype(two_ranks, left_out, strategy):
    for single, double in two_ranks(left_out_of_the_loss, left_out, strategy):
        torch.testing.assert_close(single, torch.ones_like(single))
        expected = torch.full_like(double, (2 - len(left_out)) / 2)
        torch.testing.assert_close(double, expected)


def prefetched(rank):
    """Compare steps with and without prefetch."""
    plain, ahead = (sparsekit.EmbeddingGroup(layers(5, "p")) for _ in range(2))
    optimizers = [sparsekit.optim.LazyAdam(g.parameters(), lr=0.1) for g in (plain, ahead)]
    batches = [inputs(plain.layers, rank, seed) for seed in range(5)]
    ahead.prefetch(batches[0])
    for i, batch in enumerate(batches):
        for group, optimizer in zip((plain, ahead), optimizers, strict=True):
            sum((out.float() ** 2).sum() for out in group(batch).values()).backward()
            if group is ahead and i + 1 < len(batches):
                group.prefetch(batches[i + 1])
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(plain.parameters(), ahead.parameters(), strict=True):
        assert torch.equal(one, other)
    ahead.prefetch(batches[0])
    with pytest.raises(RuntimeError, match="twice"):
        ahead.prefetch(batches[1])
    ahead(batches[0])


def another_batch_than_the_one_prefetched(rank):
    group = sparsekit.EmbeddingGroup(layers(5, "p"))
    batches = [inputs(group.layers, rank, seed) for seed in range(3)]
    group.prefetch(batches[0])
    with pytest.raises(ValueError, match="inputs is not what prefetch was called with"):
        group(batches[1] if rank == 0 else batches[0])
    group(batches[2])


def modes_after_prefetch(rank, alone):
    layers = {
        name: sparsekit.DistributedEmbedding("sum", 99, 4, 1, name=name, seed=1, **options)
        for name, options in (("a", {}), ("b", {"admission": sparsekit.MinCount(1)}), ("c", {}))
    }
    group = sparsekit.EmbeddingGroup(layers)
    keys = torch.tensor([rank, 50, 50])
    inputs = {name: (keys + i, torch.tensor([0, 3])) for i, name in enumerate(layers)}
    group(inputs)
    expected = group.eval()(inputs)
    group.train().prefetch(inputs)
    (layers["a"] if alone else group).eval()
    for name, output in group(inputs).items():
        assert torch.equal(output, expected[name])


def test_the_modes_of_all_layers_may_change_after_prefetch(ranks):
    ranks(modes_after_prefetch, False)
    for outcome in ranks.outcomes(modes_after_prefetch, True):
        assert outcome.type == "RuntimeError"
        assert "a, b, c: some of these layers have changed their mode" in outcome.message


def test_prefetch_changes_nothing_but_time(ranks):
    ranks(prefetched)
    prefetched(0)


@goes_on_after_errors
def test_another_batch_than_the_one_prefetched(ranks):
    ranks(another_batch_than_the_one_prefetched)
    another_batch_than_the_one_prefetched(0)


def prefetched_whole_bags(rank):
    layer = sparsekit.DistributedEmbedding(
        "sum", 40, 4, 1, 2, name="whole", strategy="reduce_scatter"
    )
    group = sparsekit.EmbeddingGroup({"whole": layer})
    batches = [{"whole": torch.arange(4).view(2, 1, 2) + 10 * i} for i in range(2)]
    group.prefetch(batches[0])
    with pytest.raises(ValueError, match="inputs is not what prefetch was called with"):
        group(batches[1] if rank == 0 else batches[0])
    if rank == 0:
        assert len(layer.table) == 0
    assert group(batches[1])["whole"].shape == (2, 1, 4)


@goes_on_after_errors
def test_another_batch_than_the_one_prefetched_by_bags(two_ranks):
    two_ranks(prefetched_whole_bags)


def layers_of_two_groups(rank):
    group = dist.new_group([0, 1])
    made = {
        n: sparsekit.Embedding(9, 4, name=n, process_group=g)
        for n, g in (("a", None), ("b", group))
    }
    with pytest.raises(ValueError, match="EmbeddingGroup: b and a have two process groups"):
        sparsekit.EmbeddingGroup(made)


def test_layers_have_one_process_group(two_ranks):
    two_ranks(layers_of_two_groups)


def pool(rank):
    tables = list(layers(3, "p").values())
    offsets = torch.tensor([0, 2, 2, 5])
    ids = [torch.tensor([1, 2, 3, 3, 40]) + rank, torch.tensor([7, 7, 8, 9, 1]), torch.arange(5)]
    weights = [None, torch.tensor([0.5, 2.0, 1.0, 1.0, 3.0], dtype=torch.float64), None]
    outputs = sparsekit.group_embedding_lookup_sparse(
        tables, [(keys, offsets) for keys in ids], ["mean", "sum", "sqrtn"], weights
    )
    for table, keys, combiner, weight, out in zip(
        tables, ids, ["mean", "sum", "sqrtn"], weights, outputs, strict=True
    ):
        same = {"dtype": table.weight.dtype, "seed": int(table.seed)}
        twin = sparsekit.DistributedEmbedding(combiner, 200, table.embedding_vec_size, 1, 3, **same)
        assert torch.equal(out, twin((keys, offsets), weight).squeeze(1))
        assert out.shape == (3, table.embedding_vec_size)
        assert (out[1] == 0).all()


def test_group_embedding_lookup_sparse(two_ranks):
    pool(0)
    two_ranks(pool)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g, t: sparsekit.EmbeddingGroup({}), ValueError, "must not be empty"),
        (lambda g, t: sparsekit.EmbeddingGroup({"a": 3}), TypeError, r"layers\['a'\] .* got int"),
        (lambda g, t: g({"t0": 1}), ValueError, r"\['t0', 't1'\], got \['t0'\]"),
        (lambda g, t: g({"t0": 1, "t1": 1}, {"x": 1}), ValueError, r"got \['x'\]"),
        (
            lambda g, t: sparsekit.group_embedding_lookup_sparse(t, [1], ["sum"]),
            ValueError,
            r"got \[2, 1, 1, 2\]",
        ),
        (
            lambda g, t: sparsekit.group_embedding_lookup_sparse(t, [1, 1], ["sum", "min"]),
            ValueError,
            "got 'min'",
        ),
    ],
)
def test_what_is_refused(call, error, message):
    made = layers(2, "r")
    with pytest.raises(error, match=message):
        call(sparsekit.EmbeddingGroup(made), list(made.values()))
