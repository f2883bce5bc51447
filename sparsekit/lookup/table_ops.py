"""Calls the multi-table ops, which find the rows of keys and pool their vectors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch

from .._pybind import each_is
from .._reports import DEFERRING_DEVICES, Reports, errors_are_deferred, reports_of
from ..tables.embedding_table import EmbeddingTable
from ..tables.in_flight import InFlight
from ..tables.reports import Report, entries_by_table
from ..tables.weight import key_changes, update_of_all
from ..tables.written_rows import count_new_rows
from .descriptors import Descriptors, describe
from .drop_rows import drop_rows
from .explain import explain_refusal
from .grow import grow_ahead, grow_for, grow_on, larger_of
from .late_rows import catch_up_free_rows, prepare_rows
from .make_room import make_room_here, may_exceed, rows_at_most, rows_now
from .plan import LookupPlan, TableBatch
from .reading import asked_of, insertions
from .record import CallRecord, LookupRecord, LookupResult
from .request import Request
from .scored import tables_at
from .sweep import Asked, life_of
from .touch import hold_rows, touch
from .user_scores import UserScores, inserting, scores_of_keys

# Ops without the checks in their Python wrappers. `Request.check` makes the same checks, or
# explains why an op refused its arguments.
_find = torch.ops.sparsekit.group_find.default
_find_or_insert = torch.ops.sparsekit.group_find_or_insert_.default
_pool = torch.ops.sparsekit.group_embedding_bag_.default
_words_of = torch.ops.sparsekit.words_of.default
_new_out = torch.ops.sparsekit.group_embedding_bag_out.default

# Shared by lookups without gradients: creating a record would slow a small lookup by 5%.
_NO_RECORD = LookupRecord((), [], [], False, 0)

# CPU blocks of at least this size in bytes are reused; see csrc/torch_ops/large_memory.h.
_LARGE_BYTES = 2 << 20


def run(
    plan: LookupPlan,
    requests: Sequence[Request],
    agreed: bool = False,
    user_scores: UserScores | None = None,
) -> LookupResult:
    """Look up requests in this rank's tables, without autograd; in training, insert new keys.

    Args:
        plan: the plan of the tables.
        requests: one for each table.
        agreed: whether all ranks have agreed on the lookup. If so, other ranks carry on, and a
            later lookup raises deferred errors. On a device that defers errors, the later lookup
            also raises TableFullError for this one.
        user_scores: if all ranks have agreed, the scores that the user gives for keys.

    Raises:
        TypeError, ValueError, IndexError: keys or offsets are not valid for a table; nothing has
            been changed.
        TableFullError: a table is full. Tables that are not full keep their new keys.
        RuntimeError: another thread is inserting into one of the tables.
    """
    batches = plan.batches
    if len(batches) == 1:
        call = TableOps(batches[0], requests, None, agreed, user_scores=user_scores)
        return _result([call], call.run())
    if not errors_are_deferred(batches[0].buffers[0]["seed"].device):
        # Check all requests first, so that no call inserts keys before another call is refused.
        for request in requests:
            request.check()
    outputs: dict[int, torch.Tensor] = {}
    joined: list[torch.Tensor] = []
    calls = []
    for batch in batches:
        own = [requests[i] for i in batch.positions]
        calls.append(TableOps(batch, own, None, agreed, user_scores=user_scores))
    for call in calls:  # before any call inserts keys
        call.score_keys()
    for batch, call in zip(batches, calls, strict=True):
        outs = call.run(joined)
        if call.width is not None:
            joined = outs
        else:
            outputs.update(zip(batch.positions, outs, strict=True))
    return _result(calls, joined or [outputs[i] for i in range(len(outputs))])


def run_into(
    plan: LookupPlan,
    asked: Sequence[tuple[Sequence[Request], Descriptors]],
    outs: Sequence[torch.Tensor],
    user_scores: UserScores,
) -> LookupResult:
    """Look up as `run` does, after all ranks have agreed, and write to `outs`.

    Args:
        plan: the plan of the tables.
        asked: for each of `LookupPlan.batches`, the checked requests and their descriptors.
        outs: for each batch, the tensor to write to; the descriptors give the positions in it.
        user_scores: the scores that the user gives for keys.
    """
    calls = []
    for batch, (requests, descriptors), out in zip(plan.batches, asked, outs, strict=True):
        call = TableOps(batch, requests, descriptors, agreed=True, user_scores=user_scores)
        calls.append(call)
        call.run([out])
    return _result(calls, list(outs))


def _result(calls: Sequence[TableOps], outputs: list[torch.Tensor]) -> LookupResult:
    if not torch.is_grad_enabled():
        return LookupResult(outputs, _NO_RECORD, [])
    weights = calls[0].weights
    if len(calls) > 1:
        weights = [weight for call in calls for weight in call.weights]
    fused = update_of_all(weights) is not None
    inputs = weights
    if fused:
        inputs = [next((weight for weight in weights if weight.requires_grad), weights[0])]
    calls_of = tuple([call.record() for call in calls])
    record = LookupRecord(calls_of, weights, inputs, fused, key_changes.count)
    return LookupResult(outputs, record, [tensor for call in calls for tensor in call.found()])


class TableOps:
    """One lookup in a batch of tables: finds the rows of keys, then pools the vectors of bags.

    If `width` is not None, all requests share one output with that number of columns.
    """

    def __init__(
        self,
        batch: TableBatch,
        requests: Sequence[Request],
        descriptors: Descriptors | None,
        agreed: bool = False,
        ticks: bool = True,
        sweeps: bool = True,
        user_scores: UserScores | None = None,
    ) -> None:
        self._batch = batch
        self._agreed = agreed
        self._ticks = ticks  # true if the lookup advances the clocks of tables with scores
        self._sweeps = sweeps and ticks and not agreed  # true if the lookup makes room
        self._user_scores = user_scores
        self._requests = requests
        self._checked = False  # true if all requests have been checked
        # For each table, its keys' rows before new keys are inserted, if known.
        self._rows_before: dict[EmbeddingTable, torch.Tensor] = {}
        self._new: dict[int, int] = {}  # number of new rows, by table
        self._may_exceed = not batch.reads  # true if `may_exceed` may be used
        # The tables' tensors, and the op arguments for them.
        self._tensors, self._passed = batch.tensors()
        self.weights = self._tensors.weights
        if descriptors is None:
            descriptors = describe(requests, batch, self.weights[0])
        self._descriptors = descriptors
        self.width = descriptors.width

    def run(self, outs: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Look up, and return the outputs, which are written to `outs` if it is not empty."""
        self.find()
        return self._pool(outs)

    def record(self) -> CallRecord:
        """Return everything that backward needs except `found`."""
        given = self._descriptors
        in_flight: tuple[InFlight, ...] = ()
        if self._batch.scored is not None:
            in_flight = hold_rows(self._batch, self.weights, self.found()[:4], given.features)
        return CallRecord(
            *(self._batch, self.weights, given.sample_weights, given.features, self.width),
            in_flight,
        )

    def found(self) -> tuple[torch.Tensor | None, ...]:
        """Return the results of `find`: index, rows, counts, bags and key_starts."""
        return self._index, self.rows, self._counts, self._bags, self._key_starts

    def find(self) -> None:
        """Find the rows of all keys; in training, insert new keys. Errors are as for `run`."""
        over: list[int] = []  # tables that may be over their budgets after the keys are inserted
        tables, sources = self._batch, self._descriptors
        # Weights whose rows may have missed optimizer steps, by table.
        late = _late(self.weights)
        self.rows: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        device = sources.keys[0].device
        scored = tables.scored
        self.score_keys()
        reports = reports_of(device) if device.type in DEFERRING_DEVICES else None
        if scored is not None and scored.swept and self._sweeps:
            if reports is not None:
                reports.poll()  # the reports say how many rows each table has in use
            over = self._make_room(scored.swept)
        if tables.first is not None:
            self._insert_first(tables.first)
        if tables.growing and (over or scored is not None or tables.first is not None):
            self._tensors, self._passed = tables.tensors()  # a table's index may have been replaced
        report = None if reports is None else self._report(reports)
        words = None if report is None else report.words
        weights, seeds, *hash_tables = self._passed
        asked = sources.keys, sources.offsets, sources.features
        # Compare sizes only for tables on the CPU: on a device, the host cannot see new keys.
        counted = tables.hashed if tables.inserts else tables.growing
        before = self._sizes() if counted and reports is None and device.type == "cpu" else []
        larger = larger_of(tables, before) if tables.growing and before else []
        if late and tables.inserts:
            catch_up_free_rows(late, tables.tables, self._requests)
        try:
            with torch._C._AutoDispatchBelowAutograd():
                if tables.inserts:
                    self.rows, self._index, self._counts, self._bags, self._key_starts = (
                        _find_or_insert(
                            *hash_tables, weights, seeds, tables.described,
                            tables.initializers, *asked, larger, words
                        )
                    )  # fmt: skip
                else:
                    self._index, self._bags, self._key_starts = _find(
                        *hash_tables[:2], tables.described, *asked, words
                    )
            if report is not None and reports is not None:
                report.send(reports, waits=not self._agreed)
        except Exception as refusal:
            self._note_new_rows(before)  # tables that are not full have inserted their new keys
            is_full = "is full" in str(refusal)
            grown = is_full and bool(tables.growing) and grow_for(tables, self._requests)
            if not (grown or (over and is_full)):
                explain_refusal(refusal, self._requests, self._batch.tables)
            if grown:
                self._tensors, self._passed = tables.tensors()
            else:
                self._may_exceed = False
                for t in {*over} - {*self._new}:
                    life_of(tables.tables[t]).makes_room_first = True
            return self.find()
        if tables.inserts and not tables.seen:
            tables.have_keys()
        self._note_new_rows(before)
        found = self.found()[:4]
        if over:
            in_use = dict(zip(tables.hashed, self._sizes(), strict=True))
            drop_rows(tables, over, in_use, self._new, found, sources.features)
        if scored is not None and scored.touched and not tables.reads:
            new = self._new if self._ticks else None
            touch(tables, scored, found, sources, new, self._user_scores or {})
        if late or tables.max_norms or tables.files:
            prepare_rows(tables, self.weights, found, sources.features, late)

    def score_keys(self) -> None:
        """Get the user's scores for the keys unless they are already known; change nothing else."""
        scored = self._batch.scored
        if scored is not None and scored.by_user and self._user_scores is None:
            tables = tables_at(self._batch, scored.by_user)
            requests = inserting(self._requests, self._batch.reads)
            self._user_scores = scores_of_keys(tables, self._keys_of, requests)

    def _note_new_rows(self, before: Sequence[int]) -> None:
        """Count the rows added since ``before``, each table's earlier number of rows in use."""
        now = self._sizes() if before else before
        if now == before:
            return
        if self._batch.growing:
            grow_on(self._batch, before, now)
        # Bump versions: a backward that saved a weight would otherwise silently use its new rows.
        each = zip(self._batch.hashed, before, now, strict=True)
        new = {t: size - then for t, then, size in each if size > then}
        changed = [self.weights[t] for t in new]
        count_new_rows(changed)
        self._new.update(new)

    def _make_room(self, swept: Sequence[int]) -> list[int]:
        """Drop rows from tables that the keys might overfill, and drop all expired rows.

        Returns:
            The tables left for `drop_rows`, which costs less because it knows the new rows.
        """
        batch, sources = self._batch, self._descriptors
        waits = sources.keys[0].is_cpu and not errors_are_deferred(sources.keys[0].device)
        over: list[int] = []
        if waits and self._may_exceed:
            over = [t for t, x in zip(swept, tables_at(batch, swept), strict=True) if may_exceed(x)]
            if len(over) == len(swept):
                return over
            swept = sorted({*swept} - {*over})
        entries = entries_by_table(sources.limits, sources.keys, len(batch.names))
        tables, asked = tables_at(batch, swept), [entries[t] for t in swept]
        most = list(map(rows_at_most, tables))
        make_room_here(tables, most, asked, self._keys_of, absent=partial(self._absent, swept))
        return over

    def _absent(self, swept: Sequence[int]) -> list[int]:
        """Return, for each of these tables, how many keys have no row, counting repeats."""
        tables = tables_at(self._batch, swept)
        try:
            rows = rows_now(self._batch, swept, self._passed, self._descriptors)
        except Exception as refusal:
            explain_refusal(refusal, self._requests, self._batch.tables)
        self._checked = True
        # Keep the rows unless there are listeners, which may change tables that are swept later.
        if all(life_of(table).on_evict is None for table in tables):
            self._rows_before = dict(zip(tables, rows, strict=True))
        absent = torch.stack([(of_table < 0).sum() for of_table in rows])
        return cast(list[int], absent.tolist())  # one read, since each read waits for the device

    def _keys_of(self, table: EmbeddingTable) -> Asked:
        """Return the keys that this lookup looks up in a table."""
        if not self._checked:  # an invalid lookup must not cause rows to be dropped
            for request in self._requests:
                request.check()
            self._checked = True
        asked = asked_of(table, self._requests, self._batch.reads)
        inserted = self._new.get(self._batch.tables.index(table), 0)
        return asked._replace(rows=self._rows_before.get(table), inserted=inserted)

    def _insert_first(self, first: TableBatch) -> None:
        """Insert the keys of inserting requests, so that read-only requests then find them."""
        if not errors_are_deferred(self.weights[0].device):
            for request in self._requests:
                request.check()
        occurrences = self._descriptors.occurrences
        made, counts = insertions(first, self._requests, self._batch.reads, occurrences)
        call = TableOps(first, made, None, self._agreed, True, False, self._user_scores)
        call._descriptors.occurrences = counts
        call.find()

    def _sizes(self) -> Sequence[int]:
        """Return each table's number of rows in use, read from CPU memory."""
        sizes = self._tensors.sizes
        # Read memory directly: torch takes longer to read and compare numbers.
        if len(sizes) == 1:
            return [ctypes.c_int64.from_address(sizes[0].data_ptr()).value]
        words = _words_of(self._passed.sizes)
        return memoryview(ctypes.string_at(words.data_ptr(), 8 * len(sizes))).cast("q")

    def _report(self, reports: Reports) -> Report:
        """Read reports that have arrived from earlier lookups; return this lookup's report."""
        if not self._agreed:
            reports.poll()
        batch, sources = self._batch, self._descriptors
        device, names = sources.keys[0].device, batch.names
        if not batch.inserts:
            return Report(device, names)
        entries = entries_by_table(sources.limits, sources.keys, len(names))
        if grow_ahead(batch, entries):
            self._tensors, self._passed = batch.tensors()
        return Report(device, names, batch.inserting, self._tensors.sizes, entries, batch.bounds)

    def _pool(self, outs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        sources = self._descriptors
        outs = outs or new_outs(self._batch, sources.shapes, self.width, self.weights[0])
        found = self._index, self.rows, self._counts, self._bags, sources.features
        given = sources.sample_weights, self._key_starts
        with torch._C._AutoDispatchBelowAutograd():
            if self._batch.inserts:
                _pool(outs, self._passed.weights, *found, *given, [], [], None)
            else:
                # Absent keys get their initial vectors.
                unseen = sources.keys, self._passed.seeds, self._batch.initializers
                _pool(outs, self._passed.weights, *found, *given, *unseen)
        return outs


def new_outs(
    batch: TableBatch, shapes: Sequence[tuple[int, ...]], width: int | None, like: torch.Tensor
) -> list[torch.Tensor]:
    """Return an uninitialized output for each request, or a shared one if width is given."""
    if width is not None:
        return [_output(like, shapes[0][0], width)]
    each = zip(shapes, batch.table_of_request, strict=True)
    return [_output(like, *shape, batch.dims[t]) for shape, t in each]


def _output(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return an uninitialized output.

    On the CPU a large output reuses the memory of an earlier one, since allocating new memory can
    take longer than filling it.
    """
    num_elements = math.prod(shape)
    if num_elements * like.element_size() < _LARGE_BYTES:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return _new_out(like.detach(), num_elements).view(shape)


def _late(weights: list[torch.Tensor]) -> dict[int, Any]:
    """Return the weights whose rows may have missed optimizer steps, by table."""
    if each_is(weights, "before_read", None):
        return {}
    return {t: w for t, w in enumerate(weights) if getattr(w, "before_read", None)}
