"""Cases of the ops on many tables: random groups, checked by functions of tests/ops."""

import torch

from ..ops import group_bags as bags
from ..ops import test_group_bucketize as routes
from ..ops import test_group_find as find
from ..ops import test_group_touch as touches
from ..ops import test_group_update as updates
from ..ops.groups import Group, random_group
from ..ops.optimizer_rules import CASES, PER_ROW
from .case import Case


def _group(case: Case) -> Group:
    seed, most_keys = case.random.getrandbits(40), case.any_of(10, 300, case.most(5000, 1000))
    dtype = case.row_dtype()
    case.note(seed=seed, dtype=dtype, most_keys=most_keys)
    return random_group(seed, dtype, torch.device("cpu"), most_keys)


def group_find(case: Case) -> None:
    """Check the rows found for keys before and after the keys are inserted."""
    group = _group(case)
    with case._threads():
        find.check(group)


def group_bucketize(case: Case) -> None:
    """Check the keys sorted by owner, and the rows at which their vectors are received."""
    group, world_size = _group(case), case.any_of(1, 2, 3, 8, 100, 2048)
    distinct = case.maybe(0.7)
    seed = case.random.getrandbits(40)
    case.note(world_size=world_size, distinct=distinct, come=seed)
    with case._threads():
        routes.check_all(group, world_size, distinct, seed)


def group_embedding_bag(case: Case) -> None:
    """Check pooling before and after insertion, and the two forms of the gradient."""
    group = _group(case)
    with case._threads():
        bags.check_all(group)


def group_update(case: Case) -> None:
    """Check the fused step against the two ops that it combines, for any rule."""
    group, name = _group(case), case.any_of(*CASES)
    keywords = {"count_steps": case.maybe(0.5), "own_steps": case.maybe(0.5)}
    if keywords["own_steps"] and CASES[name][0] in PER_ROW:
        keywords["per_row"] = case.maybe(0.5)
    if case.maybe(0.3):
        keywords["rounding_seed"] = case.random.getrandbits(64)
    divisor = case.any_of(1, 1, 2, 3, 1000)
    case.note(case=name, divisor=divisor, **keywords)
    with case._threads():
        updates.check(group, name, divisor, **keywords)


def group_touch(case: Case) -> None:
    """Check the scores of all tables, under any policies."""
    group, seed, occurrences = _group(case), case.random.getrandbits(40), case.maybe(0.5)
    case.note(touches=seed, occurrences=occurrences)
    with case._threads():
        touches.check_random(group, seed, occurrences)


OPS = {
    "group_bucketize": group_bucketize,
    "group_find": group_find,
    "group_embedding_bag": group_embedding_bag,
    "group_touch": group_touch,
    "group_update": group_update,
}
