"""The ops: plain functions on tensors, with fake kernels and gradients."""

from ._group_gradients import (
    group_embedding_bag_backward,
    group_embedding_bag_backward_at_,
    group_embedding_bag_update_,
)
from .bucketize import bucketize
from .catch_up_rows import catch_up_rows_
from .compact_rows import compact_rows
from .embedding_bag import embedding_bag
from .gather_rows import gather_rows
from .group_bucketize import group_bucketize, group_exchange_rows
from .group_drop_lowest import group_drop_lowest_
from .group_embedding_bag import group_embedding_bag_
from .group_find import group_find, group_find_or_insert_
from .group_touch import group_touch_
from .hash_integers import hash_integers
from .hash_table import (
    hash_table_clear_,
    hash_table_copy_,
    hash_table_find,
    hash_table_find_or_insert_,
    hash_table_keys,
    hash_table_renumber_,
)
from .init_rows import init_rows_
from .lowest_rows import lowest_rows
from .move_rows import move_rows_
from .segment_sum import unsorted_segment_sum
from .unique import unique
from .update_rows import update_rows_

__all__ = [
    "bucketize",
    "catch_up_rows_",
    "compact_rows",
    "embedding_bag",
    "gather_rows",
    "group_bucketize",
    "group_drop_lowest_",
    "group_embedding_bag_",
    "group_embedding_bag_backward",
    "group_embedding_bag_backward_at_",
    "group_embedding_bag_update_",
    "group_exchange_rows",
    "group_find",
    "group_find_or_insert_",
    "group_touch_",
    "hash_integers",
    "hash_table_clear_",
    "hash_table_copy_",
    "hash_table_find",
    "hash_table_find_or_insert_",
    "hash_table_keys",
    "hash_table_renumber_",
    "init_rows_",
    "lowest_rows",
    "move_rows_",
    "unique",
    "unsorted_segment_sum",
    "update_rows_",
]
