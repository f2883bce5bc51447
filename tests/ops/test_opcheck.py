"""Runs torch.library.opcheck on every op in the namespace; an op without a case fails the suite.

opcheck compares an op with its schema (what it changes, what aliases what), its fake kernel (shapes
and dtypes without data) and its gradient under AOT autograd, as torch.compile uses it.
"""

import functools

import pytest
import simt
import torch
from conftest import KEY_DTYPES, ROW_DTYPES, randn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

from sparsekit import HashTable, ops
from sparsekit.ops._checks import accumulate_dtype
from sparsekit.ops._group import TENSORS

from .groups import Group, Source
from .optimizer_rules import CASES as RULES
from .optimizer_rules import table_of

NAMESPACE = "sparsekit::"


def int64(*values):
    return torch.tensor(values, dtype=torch.int64)


def table(*keys):
    table = HashTable(20)
    table.find_or_insert(int64(*keys))
    return table


def buckets_of(*keys):
    made = table(*keys)
    return made.buckets, made.hash_seed


def bags(dtype, combiner, weights, grad):
    """Return arguments of embedding_bag; `grad` names the arguments that require a gradient."""
    weight = randn(4, 3, dtype=dtype).requires_grad_("weight" in grad)
    sample_weights = None
    if weights:
        accumulate = torch.float64 if dtype == torch.float64 else torch.float32
        sample_weights = (randn(5, dtype=accumulate).abs() + 1).requires_grad_("samples" in grad)
    return weight, int64(0, 3, -1, 3, 1), int64(0, 2, 2, 5), combiner, sample_weights


def bags_backward(dtype, combiner, weights):
    _, rows, offsets, _, sample_weights = bags(dtype, combiner, weights, "")
    return randn(3, 3, dtype=dtype), rows, offsets, combiner, sample_weights, 4


def bags_backward_sample_weights(dtype, combiner):
    weight, rows, offsets, _, sample_weights = bags(dtype, combiner, True, "")
    return randn(3, 3, dtype=dtype), weight, rows, offsets, combiner, sample_weights


def update(case, dtype, *rows, own_steps=False, count_steps=False):
    """Return arguments of update_rows_: a table for each tensor of rows, or one without rows."""
    rule, settings, _ = RULES[case]
    weights, states = [], []
    for _ in rows or range(1):
        weight, own = table_of(case, 4, 3, dtype, together=False)
        weights, states = [*weights, weight], states + own
    row_steps = [torch.zeros(4, dtype=torch.int32) for _ in weights] if own_steps else []
    grads = [randn(len(own), 3, dtype=dtype) for own in rows or weights]
    steps = [int64(2) for _ in weights]
    arguments = weights, states, row_steps, list(rows), grads, steps, rule, settings
    return *arguments, own_steps, None, count_steps


def catch_up(case, dtype, rows):
    rule, settings, _ = RULES[case]
    numbers = torch.full((3, 2), 0.1, dtype=torch.float64)
    table, steps = table_of(case, 4, 3, dtype, together=False), torch.ones(4, dtype=torch.int32)
    return *table, steps, rows, numbers, 2, rule, settings


def group(dtype=torch.float32, weighted=False):
    """Return a group with two tables (one without a hash table), two sources and three features."""
    made = Group(dtype, [3, 4], [9, 9], [True, False], [1, 1])
    made.hash_tables[0].find_or_insert(int64(5, 6))
    weights = torch.rand(3 if weighted else 0, dtype=accumulate_dtype(dtype))
    made.sources = [
        Source(int64(6, 5, 6), int64(0, 2, 3), weights),
        Source(int64(3, 1).int(), int64(), weights[:0]),
    ]
    made.ask(0, 0, 0, 1, "mean")
    made.ask(0, 0, 1, 1, "mean")
    made.ask(1, 1, 0, 2, "none")
    return made


def group_find(made, insert):
    """Return arguments with distinct keys: otherwise the end of the results is unspecified."""
    made.sources[0].keys, made.sources[0].offsets = int64(6, 5), int64(0, 1, 2)
    (table,) = made.hash_tables
    if not insert:
        return [table.buckets], [table.hash_seed], made.tables, *made.asked
    state = [table.buckets], [table.hash_seed], [table.size], made.weights, made.seeds
    return *state, made.tables, made.initializers, *made.asked, []


def group_touch(made, occurrences=None):
    """Return arguments of group_touch_ with a table under LFU and one under LRU."""
    rows, inverse, counts, bags, _ = made.find_or_insert()
    policies = torch.tensor([[2, 3], [1, 0]])
    scores, clocks = [int64(*range(9)), int64(*range(9))], [int64(7), int64(8)]
    return scores, inverse, rows, counts, bags, made.asked[2], policies, clocks, occurrences


def group_routes(made, owners=(), distinct=True, world_size=3, max_keys=()):
    """Return arguments of group_bucketize with distinct keys, as in `group_find`."""
    made.sources[0].keys, made.sources[0].offsets = int64(6, 5), int64(0, 1, 2)
    maps = [len(owners) - 1] * len(made.dims)
    return list(owners), maps, [-1, 9], *made.asked, world_size, distinct, list(max_keys)


def group_rows(made):
    """Return arguments of group_exchange_rows, with a vector received for each table."""
    places, bags = torch.ops.sparsekit.group_bucketize(*group_routes(made))[4:6]
    come = torch.tensor([[[0, 1], [0, 1], [9, 2]], [[7, 1], [8, 2], [0, 2]]])
    return places, bags, made.asked[2], come, [2, 3]


def group_bags(made, kind):
    """Return arguments of group_embedding_bag_, of its backward, or of related ops."""
    rows, inverse, counts, bags, key_starts = made.find_or_insert()
    keys, _, features = made.asked
    asked = bags, features, made.sample_weights, key_starts
    if kind == "backward":
        return made.outs(), made.dims, inverse, rows, counts, *asked
    if kind == "backward at":
        out = torch.zeros(40, dtype=made.weights[0].dtype)
        rows[:] = torch.tensor([2, 1, 0, 9, 8])
        return out, [5, 3], made.outs(), made.dims, inverse, rows, counts, *asked
    if kind == "unseen":
        initial = made.seeds, made.initializers
        return made.outs(), made.weights, made.find()[0], None, None, *asked, keys, *initial
    return made.outs(), made.weights, inverse, rows, counts, *asked, [], [], None


def group_step(made, case, own_steps=False, **keywords):
    rows, inverse, counts, bags, key_starts = made.find_or_insert()
    asked = bags, made.asked[2], made.sample_weights, key_starts
    rule, settings, _ = RULES[case]
    states = [
        state
        for weight in made.weights
        for state in table_of(case, *weight.shape, weight.dtype, together=False)[1]
    ]
    row_steps = [torch.zeros(9, dtype=torch.int32) for _ in made.weights] if own_steps else []
    steps = [int64(2), int64(3)]
    tables = made.weights, states, row_steps, steps, rule, settings
    return made.outs(), inverse, rows, counts, *asked, *tables, 2, own_steps, None, own_steps


# A case of each rule with each number of states that it may have.
RULES_AND_STATES = {(rule, states): case for case, (rule, _, states) in RULES.items()}


def drop_lowest(policy):
    """Return arguments of group_drop_lowest_ with two tables, of which one drops two rows."""
    tables = table(5, 6, 7, 8), table(9)
    scores = int64(3, 1, 2, 9), int64(4)
    return (
        *([getattr(x, name) for x in tables] for name in ("buckets", "hash_seed", "size")),
        [scores[0], randn(4, 3), scores[1]],
        [int64(0)[0], torch.ones(()), int64(0)[0]],
        [int64(1, 3).int(), int64(0, 2, -1).int()],
        torch.tensor([[policy, 7, 9, 2, 2, 2, 1], [policy, 7, 9, 0, 1, 0, 0]]),
    )


# Calls of each op. They are made on demand, since some ops change their arguments.
CASES = {
    "hash_table_clear_": lambda: [(table(1, 2).buckets,)],
    "hash_table_find": lambda: [
        *((*buckets_of(1, 2), int64(2, 0, 1).to(dtype)) for dtype in KEY_DTYPES),
        (*buckets_of(), int64()),
        (*buckets_of(4), int64(4, 0, 5, 0)[::2]),
    ],
    "hash_table_find_or_insert_": lambda: [
        *(
            (t.buckets, t.hash_seed, t.size, keys, 20)
            for t, keys in ((table(1), int64(2, 1)), (table(), int64()))
        ),
        *((t.buckets, t.hash_seed, t.size, int64(1, 2, 3).int(), 2) for t in (table(9),)),
    ],
    "hash_table_keys": lambda: [
        (t.buckets, t.hash_seed, t.size) for t in (table(), table(5, -6, 7))
    ],
    "hash_table_copy_": lambda: [
        (HashTable(9).buckets, *buckets_of(5, 6, 7), rows) for rows in (0, 2, 3)
    ],
    "hash_table_renumber_": lambda: [
        (*buckets_of(5, 6, 7), int64(1, -1, 0).int()),
        (*buckets_of(), int64().int()),
    ],
    "compact_rows": lambda: [(int64(1, 3), 5), (int64(), 2), (int64(), 0)],
    "lowest_rows": lambda: [
        (int64(3, 1, 2), buckets_of(5, 6, 7)[0], 3, kind, 7, 9, int64(1), count)
        for kind in (1, 2)
        for count in (0, 1, 9)
    ],
    "move_rows_": lambda: [
        ([randn(3, 4), int64(1, 2, 3)], int64(-9, 0, -1).int(), 1, [torch.ones(()), int64(7)[0]]),
        ([randn(3, 2, 4)[:, 1]], int64(-9, 0, -1).int(), 1, [torch.ones(())]),
    ],
    "unique": lambda: [
        *((int64(3, 0, 3, 2).to(dtype),) for dtype in KEY_DTYPES),
        (int64(),),
        (int64(7, 7, 7, 7, 7, 7),),
    ],
    "unique_padded": lambda: [
        # All keys are distinct: otherwise the end of the results is unspecified and would differ.
        *((int64(7, 8, 9).to(dtype), count) for dtype in KEY_DTYPES for count in (None, int64(3))),
        (int64(), None),
    ],
    "bucketize": lambda: [
        *((int64(3, -1, 3, 2).to(dtype), 3) for dtype in KEY_DTYPES),
        (int64(), 2),
        (int64(3, -1, 3, 2), 3, torch.arange(65536).remainder(3).to(torch.int16)),
    ],
    "unsorted_segment_sum": lambda: [
        *((randn(4, 3, dtype=dtype), int64(1, -1, 1, 0), 3) for dtype in ROW_DTYPES),
        (randn(4, 3).requires_grad_(), int64(1, -1, 1, 0), 3),
        (randn(0, 3), int64(), 2),
    ],
    "gather_rows": lambda: [
        *((randn(4, 3, dtype=dtype), int64(1, -1, 3, 1)) for dtype in ROW_DTYPES),
        (randn(4, 3).requires_grad_(), int64(1, -1, 3, 1)),
        (randn(4, 3), int64()),
    ],
    "hash_integers": lambda: [
        (int64(3, -1, -(2**63)), False, 5),
        (int64(3, -1, -(2**63)), True, -5),
        (int64(), False, 0),
    ],
    "embedding_bag": lambda: [
        *(bags(dtype, 0, False, "weight") for dtype in ROW_DTYPES),
        *(bags(torch.float64, combiner, False, "weight") for combiner in (1, 2)),
        *(bags(torch.float64, combiner, True, "weight samples") for combiner in (0, 1, 2)),
        bags(torch.float32, 1, True, "samples"),
        bags(torch.bfloat16, 1, True, "weight samples"),
        bags(torch.float32, 2, True, ""),
    ],
    "embedding_bag_backward": lambda: [
        *(bags_backward(dtype, 0, False) for dtype in ROW_DTYPES),
        *(bags_backward(torch.float32, combiner, True) for combiner in (0, 1, 2)),
    ],
    "embedding_bag_backward_sample_weights": lambda: [
        *(bags_backward_sample_weights(dtype, 1) for dtype in ROW_DTYPES),
        *(bags_backward_sample_weights(torch.float32, combiner) for combiner in (0, 2)),
    ],
    "group_bucketize": lambda: [
        group_routes(group()),
        group_routes(group(), distinct=False),
        group_routes(group(), world_size=1, max_keys=[2, 2]),  # places that are not used differ
        group_routes(group(), [torch.zeros(65536, dtype=torch.int16)]),
    ],
    "group_exchange_rows": lambda: [
        group_rows(group()),
        (*group_rows(group()), torch.tensor([2, 2])),
    ],
    "group_find": lambda: [group_find(group(), False)],
    "group_find_or_insert_": lambda: [group_find(group(dtype), True) for dtype in ROW_DTYPES],
    "group_embedding_bag_": lambda: [
        *(group_bags(group(dtype), "pool") for dtype in ROW_DTYPES),
        group_bags(group(weighted=True), "pool"),
        group_bags(group(), "unseen"),
    ],
    "group_embedding_bag_backward": lambda: [
        *(group_bags(group(dtype), "backward") for dtype in ROW_DTYPES),
        group_bags(group(weighted=True), "backward"),
    ],
    "group_embedding_bag_backward_at_": lambda: [
        *(group_bags(group(dtype), "backward at") for dtype in ROW_DTYPES),
        group_bags(group(weighted=True), "backward at"),
    ],
    # Request no elements: without pooling, their values would be unspecified.
    "group_embedding_bag_out": lambda: [(torch.ones(2, dtype=dtype), 0) for dtype in ROW_DTYPES],
    "group_embedding_bag_update_": lambda: [
        *(group_step(group(dtype), "lazy adam", True) for dtype in ROW_DTYPES),
        group_step(group(weighted=True), "momentum"),
        group_step(group(), "row-wise adagrad"),
        (*group_step(group(), "lazy adam"), True, torch.tensor(0.1)),
    ],
    "group_drop_lowest_": lambda: [drop_lowest(policy) for policy in (1, 2)],
    "group_touch_": lambda: [group_touch(group()), group_touch(group(), int64(1, 2, 0, 4, 5))],
    "init_rows_": lambda: [
        *(
            (randn(2, 5, dtype=dtype), int64(8, 9), None, None, 3, 1, 0.0, 1.0)
            for dtype in ROW_DTYPES
        ),
        (randn(4, 5), int64(8, 9), int64(3, -1), int64(1, 0), 3, 2, 0.0, 1.0),
    ],
    "update_rows_": lambda: [
        *(update(case, torch.float32, int64(3, 0)) for case in RULES_AND_STATES.values()),
        *(update("lazy adam", dtype, int64(3, 0), own_steps=True) for dtype in ROW_DTYPES),
        update("lazy adam", torch.float32),
        update("lazy adam", torch.float32, int64()),
        update("lazy adam", torch.float32, int64(3, 0), int64(1), own_steps=True, count_steps=True),
        (*update("lazy adam", torch.float32, int64(3, 0)), None, torch.tensor(0.1)),
    ],
    "catch_up_rows_": lambda: [
        *(catch_up("exact adam", dtype, int64(3, 0)) for dtype in ROW_DTYPES),
        catch_up("momentum", torch.float32, None),
    ],
}


def registered_ops():
    """Return the names that torch has for all ops in the namespace, overloads included."""
    names = set()
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith(NAMESPACE):
            overload = f".{schema.overload_name}" if schema.overload_name else ""
            names.add(schema.name.removeprefix(NAMESPACE) + overload)
    return names


# Layers call them below autograd, with real tensors; a compiler cannot know what a stand-in is for.
UNTRACED = {"kept_list", "words_of"}


def test_every_op_has_a_case():
    assert registered_ops() == {*CASES, *UNTRACED}


@pytest.mark.parametrize("name", CASES)
def test_a_meta_tensor_among_those_of_the_cpu_is_refused(name):
    """For mixed devices torch would call the fake kernel, which silently does nothing."""
    op = getattr(torch.ops.sparsekit, name).default

    def moved(arguments):
        """Yield copies of the arguments; in each copy, a different tensor is on the meta device."""
        for i, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                yield [*arguments[:i], argument.to("meta"), *arguments[i + 1 :]]
            elif isinstance(argument, list):
                for k, part in enumerate(argument):
                    if isinstance(part, torch.Tensor):
                        parts = [*argument[:k], part.to("meta"), *argument[k + 1 :]]
                        yield [*arguments[:i], parts, *arguments[i + 1 :]]

    for arguments in CASES[name]():
        tensors = sum(isinstance(a, torch.Tensor) or a == [] for a in arguments if a is not None)
        arguments = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
        if tensors == 1:
            continue
        mixes = list(moved(arguments))
        assert mixes
        for mix in mixes:
            with pytest.raises(
                ValueError, match=rf"^{name}: (table \d: )?all tensors must be on one"
            ):
                op(*mix)


ON_CPU = {name for name, of in TENSORS.items() if of.on_cpu} | {"initial"}


@pytest.mark.parametrize("name", CASES)
def test_results_are_where_the_keys_and_rows_are(name):
    """Check with fake kernels, without a GPU, that results are on the device of keys and rows."""
    op = getattr(torch.ops.sparsekit, name).default
    names = [argument.name for argument in op._schema.arguments]
    arguments = next(iter(CASES[name]()))
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode:

        def moved(on_cpu, tensor):
            fake = mode.from_tensor(tensor)
            return fake if on_cpu else torch.empty_like(fake, device="cuda:0")

        moves = [functools.partial(moved, name in ON_CPU) for name in names]
        each = zip(moves, arguments, strict=False)
        results = op(*(tree_map_only(torch.Tensor, move, argument) for move, argument in each))
    for i, result in enumerate(tree_leaves(results)):
        expected = "cpu" if i in simt.RESULTS_ON_HOST.get(name, ()) else "cuda"
        assert result is None or result.device.type == expected


WRITES = {
    "catch_up_rows_": ops.catch_up_rows_,
    "group_embedding_bag_": ops.group_embedding_bag_,
    "group_embedding_bag_backward_at_": ops.group_embedding_bag_backward_at_,
    "hash_table_clear_": ops.hash_table_clear_,
    "hash_table_find_or_insert_": ops.hash_table_find_or_insert_,
    "init_rows_": lambda out, keys, *_: ops.init_rows_(out, keys),
    "update_rows_": lambda *arguments: ops.update_rows_(*arguments[:8]),
}


@pytest.mark.parametrize("name", WRITES)
def test_torch_counts_what_is_written(name):
    """Ops increase the version counters of written tensors, so backward notices lost values."""
    arguments = next(iter(CASES[name]()))
    written = [arguments[0]] if isinstance(arguments[0], torch.Tensor) else arguments[0]
    before = [tensor._version for tensor in written]
    WRITES[name](*arguments)
    assert all(t._version > version for t, version in zip(written, before, strict=True))


# opcheck itself reads .grad of non-leaf tensors, and newer torches warn of that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    for arguments in CASES[name]():
        torch.library.opcheck(getattr(torch.ops.sparsekit, name).default, arguments)
