"""Layers with the interface of SOK, HugeCTR's sparse_operation_kit: one pooled, one not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._compiling import uncompiled
from ..errors import check_choice
from ..lookup import Asked, look_up, refused
from ..lookup.request import Request, ask_bags, ask_vectors
from ..lookup.slots import check_combiner, check_max_nnz
from ..lookup.user_scores import beside
from ..tables.options import TableKeywords, TableOptions, check_count
from .keywords import takes_table_options
from .layer import EmbeddingLayer

if TYPE_CHECKING:
    from typing_extensions import Unpack

STRATEGIES = ("auto", "all_to_all", "reduce_scatter")


class DistributedEmbedding(EmbeddingLayer):
    """A layer of embedding bags over an unbounded vocabulary, in several slots.

    `EmbeddingBag` is the corresponding layer with torch's interface.

    Any int64 is a key. In training an unseen key gets the next free row of ``weight``, which starts
    from an initial vector that depends on (seed, key, column) only. In evaluation nothing is
    inserted, and an unseen key gets that same initial vector. Any number of threads may look up in
    evaluation, although with several ranks they take turns; only one thread at a time may train.
    ``weight.grad`` is a coalesced sparse tensor. `sparsekit.optim.LazyAdam` accepts it, as do
    torch's SparseAdam, SGD and Adagrad. `vectors`, `assign` and `items` read, write and list
    vectors by key.

    Args:
        combiner: ``"sum"``, ``"mean"`` (divided by the actual key count, or by the weight sum),
            ``"sqrtn"`` or ``"max"`` (elementwise, without weights; it first gathers the vectors of
            all keys, and on ties the first vector gets the gradient). Or a list of slot_num
            combiners, one for each slot; keys are then sorted by slot, unless they already are, as
            in a KeyedJaggedTensor.
        max_vocabulary_size_per_gpu: rows of this process's table, in [1, 2^31 - 1]. None makes a
            table that grows (``on_full="grow"``) from 1,024 rows.
        embedding_vec_size: length of a vector (dim).
        slot_num: number of bags in each sample.
        max_nnz: largest number of keys in a bag, padding included; None for no limit. Or a list of
            slot_num limits, one for each slot; padding does not count towards these limits.
        max_feature_num: largest number of keys in a sample, before bags are truncated; None for no
            limit.
        use_hashtable: False means that keys are row numbers in [0, max_vocabulary_size_per_gpu).
        key_dtype: torch.int64 (which also accepts int32 keys) or torch.int32.
        embedding_initializer: `sparsekit.nn.Uniform`, ``Normal`` or ``Constant``, or a function
            that fills a tensor in place, such as ``torch.nn.init.xavier_uniform_``. The function is
            called on a tensor without memory that has the shape of the table over all ranks. If it
            makes a single call to uniform_, normal_, fill_ or zero_, vectors start from that
            distribution. Any other function needs ``use_hashtable=False``: it is called on zeros
            for the whole table on the CPU, with torch's generator seeded by seed, and each rank
            keeps its own rows. None means ``Uniform(-0.05, 0.05)``.
        padding_key: entries with this key are left out, neither counted nor inserted.
        on_full: ``"error"`` raises `TableFullError` and leaves the table unchanged. ``"evict"``
            makes room: before a batch whose new keys would put more than max_rows rows in use, the
            keys with the lowest scores lose their rows, until low_watermark * max_rows rows are
            left, or fewer if the batch needs more. Keys in the batch stay, as do those needed by a
            pending backward or a gradient; if there are only such keys, TableFullError is raised.
            An evicted key that occurs again is treated as new. The choice is exact, over all ranks,
            and does not depend on the number of ranks. See docs/lifecycle.md. ``"grow"`` makes room
            for more rows: this process's table begins with max_vocabulary_size_per_gpu rows. It
            reserves address space for max_capacity rows, but takes memory only for those in use (on
            CUDA, for its current capacity, and nothing may read ``weight`` beyond that capacity).
            See docs/capacity.md.
        max_capacity: largest number of rows of this process's table, with on_full="grow". None
            means 1.25 times the number of vectors that fit in the device's memory; on the CPU, in
            the system's memory or, with mmap storage, on the folder's disk.
        storage: where vectors and the states of `sparsekit.optim` optimizers are stored:
            ``"memory"``, or, on the CPU, ``"mmap:FOLDER"``: an unnamed file in a folder, mapped
            into memory, so that the table may be larger than memory. The index and scores stay in
            memory. See docs/capacity.md.
        max_resident_bytes: how many bytes of the file may stay in memory; a batch may temporarily
            take more. None means half of the system's memory.
        max_rows: largest number of rows in use over all ranks, with on_full="evict". None means 0.9
            times the ranks' total capacity.
        low_watermark: fraction of max_rows, in (0, 1], left in use after making room. Lower
            values are faster, since fewer lookups have to make room, but evict keys sooner.
        score: value of a row; rows with the lowest values are evicted first. ``"lru"``: the time of
            its last lookup in training. ``"lfu"`` or `sparsekit.LFU`: how often its key has
            occurred in training, a count that is halved at intervals. A function: the value that it
            returned at the last lookup in training. The rank that owns the keys calls it once per
            lookup, with the distinct keys, int64 ``[n]``; it must return int64 ``[n]`` in [0, 2^32)
            on the same device; equal keys must have equal scores on all ranks. Its errors are
            raised on all ranks, with nothing changed. ``"given"``: the value in ``scores`` at the
            last lookup in training. None means ``"lru"`` where scores are needed.
        admission: `sparsekit.MinCount` or `sparsekit.Probability` decides in training which new
            keys get a row. before_admission gives the vectors of the others, which get no
            gradient unless it is a `Fallback`. None admits all.
        before_admission: vector of a key that has no row, in evaluation too: ``"initial"``, its
            initial vector; ``"zero"``; or `sparsekit.Fallback`, trainable rows shared between keys.
        ttl: a row expires if it is not looked up in training for this many units of the table's
            clock; its key then loses the row within another 1/16 of ttl. None means never. The
            clock counts lookups in training, unless `sparsekit.set_clock` sets it.
        gradient_reduction: ``"mean"`` or ``"sum"`` over ranks; both are the same on a single rank.
        seed: seed of the initial vectors; None derives it from the name. Without a name it is drawn
            from torch's default generator, which `torch.manual_seed` seeds; ranks that draw
            different seeds raise an error at the first lookup.
        name: name of the layer, for error messages; give a name if the order in which layers are
            created may vary.
        dtype: dtype of the rows: float32, float64 or bfloat16 (summed in float32). None means
            torch's default.
        device: device of the rows and the table; None means torch's default. A layer on the meta
            device has no memory; after ``to_empty`` it is as if it had been created on the new
            device.
        process_group: the ranks to shard the table over; None means torch.distributed's default
            group, or a single process if there is none.
        truncate: True leaves out the keys in a bag beyond its first max_nnz, padding not counted.
            These keys get no row, and neither they nor their weights get a gradient. With False,
            more keys than max_nnz are an error.
        placement: which rank owns a key. ``"hash"``: a hash of the key decides, which spreads keys
            evenly, whatever they are. ``"modulo"``: rank ``unsigned(key) % world_size``, as in SOK;
            keys with the same low bits then share a few ranks. None means ``"hash"`` with the hash
            table, and ``"modulo"`` without it, since no other placement is then possible. A saved
            table keeps its placement.
        wire_dtype: ``torch.bfloat16`` rounds vectors and their gradients when they are sent between
            ranks, which halves the bytes. It changes each element by at most 2^-8 of its magnitude,
            and so a bag's output by at most 2^-8 of the sum of its summands' absolute values. Sums
            are still computed in float32 or float64. None means the setting of `sparsekit.init`, by
            default no rounding. The layer's own dtype means no rounding.
        max_keys_per_rank: limit on the distinct keys that a call may request from any one rank.
            With this limit the counts of keys travel with the keys, in messages of ``8 *
            max_keys_per_rank`` bytes. No rank then waits for counts before it sends, not even in
            `EmbeddingGroup.prefetch`, and a step has one collective fewer. More keys than the limit
            are an error on all ranks. With a limit, strategy "auto" means "all_to_all". The limit
            is ignored with strategy "reduce_scatter"; in a group, it applies only if all layers
            have one and none uses "reduce_scatter". None means no limit. On CUDA every message has
            room for the maximum number of keys, vectors or gradients, so the host never waits. In
            return, an error on one rank ends the exchange; restart all ranks from a checkpoint.
        insert: False keeps the vocabulary unchanged in training too. A key without a row then gets
            its vector as in evaluation, but no row and no gradient. Keys with a row are still
            trained. `insert` is also an attribute; set it to the same value on all ranks.
            `assign` always inserts.
        strategy: the data that the owners of a bag's keys send. ``"all_to_all"``: the vector of
            each distinct key, to be pooled on the bag's rank. ``"reduce_scatter"``: sums over the
            keys that each owner has. For these sums every rank sends all its keys to all ranks, so
            this strategy suits large bags of keys that seldom repeat. It does not support
            sample_weights that need a gradient. ``"auto"``: in each call, the strategy that moves
            fewer bytes over all ranks.

    Shape:
        - Input: batch * slot_num bags, as ``(values [n], offsets [bags + 1])``; torch sparse COO
          or CSR ``[bags, max_nnz]`` of integers, which are the keys; CSR of floats, or a scipy CSR
          matrix, ``[bags, columns]``, whose columns are the keys and whose values are the weights;
          torch.nested jagged ``[bags, j]``; a JaggedTensor; a KeyedJaggedTensor with slot_num
          features in the order of the slots, whatever their names are; or dense ``[batch, slot_num,
          max_nnz]``. Keys are int64 or int32.
        - Output: ``[batch, slot_num, dim]``; an empty bag is zeros.

    Raises:
        TypeError, ValueError, IndexError: a bad argument or input; the message names the layer, the
            argument, the value and its position.
        TableFullError: (a call in training) there are more new keys than free rows.

    Example:
        >>> layer = DistributedEmbedding("mean", 1000, 8, slot_num=2, max_nnz=3)
        >>> keys = torch.tensor([[[7, -1, 7], [10**12, 0, 3]]])  # [batch=1, slots=2, nnz=3]
        >>> layer(keys).shape
        torch.Size([1, 2, 8])
    """

    @takes_table_options("EmbeddingBag")
    def __init__(
        self,
        combiner: str | Sequence[str],
        max_vocabulary_size_per_gpu: int | None,
        embedding_vec_size: int,
        slot_num: int,
        max_nnz: int | Sequence[int | None] | None = None,
        max_feature_num: int | None = None,
        use_hashtable: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        strategy: str = "auto",
        truncate: bool = False,
        **options: Unpack[TableKeywords],
    ) -> None:
        super().__init__(
            TableOptions(
                max_vocabulary_size_per_gpu,
                embedding_vec_size,
                use_hashtable,
                dtype,
                device,
                **options,
            )
        )
        self.slot_num = check_count(self.name, "slot_num", slot_num)
        self.combiner = check_combiner(self.name, combiner, self.slot_num)
        check_choice(self.name, "strategy", strategy, STRATEGIES)
        if strategy == "reduce_scatter" and "max" in self.combiner:
            raise ValueError(
                f"{self.name}: strategy='reduce_scatter' adds up, and combiner is {combiner!r}"
            )
        self.strategy = strategy
        self.max_nnz = check_max_nnz(self.name, max_nnz, truncate, self.slot_num)
        self.truncate = truncate
        if max_feature_num is not None:
            max_feature_num = check_count(self.name, "max_feature_num", max_feature_num)
        self.max_feature_num = max_feature_num

    @uncompiled
    def forward(
        self, inputs: Any, sample_weights: Any = None, scores: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Pool the vectors of each bag's keys.

        Args:
            inputs: the bags; see Shape above.
            sample_weights: one weight for each key, floating point: flat ``[n]``, or in the form
                of inputs. A KeyedJaggedTensor has its own weights.
            scores: with score="given", an int64 score in [0, 2^32) for each key, flat ``[n]`` in
                the order of the keys, or in the shape of a dense tensor of keys. Required for
                lookups in training; if a key occurs several times, on any ranks, its highest score
                counts.

        Returns:
            ``[batch, slot_num, dim]`` in the dtype of weight.
        """
        try:
            request = self.request(inputs, sample_weights)
            if scores is not None:
                beside(request, inputs, scores)
            asked: Asked = [request]
        except BaseException as error:
            asked = refused([self], error)
        return look_up(self.plan_cache, [self], asked)[0]

    def request(self, inputs: Any, sample_weights: Any = None) -> Request:
        """Check the input of a call, and return a request; see `EmbeddingLayer.request`."""
        return ask_bags(
            self,
            inputs,
            sample_weights,
            self.combiner,
            self.slot_num,
            self.max_nnz,
            self.max_feature_num,
            self.truncate,
        )

    def extra_repr(self) -> str:
        """Return the base class's text, with the settings for pooling added."""
        return (
            f"{super().extra_repr()}, combiner={self.combiner!r}, slot_num={self.slot_num}, "
            f"max_nnz={self.max_nnz}{', truncate=True' if self.truncate else ''}"
        )


class All2AllDenseEmbedding(EmbeddingLayer):
    """A layer that returns one vector for each key, without pooling, for inputs with several slots.

    `Embedding` is the corresponding layer with torch's interface.

    The table works as in `DistributedEmbedding`.

    Args:
        max_vocabulary_size_per_gpu: rows of this process's table, in [1, 2^31 - 1].
        embedding_vec_size: length of a vector (dim).
        slot_num: number of slots in each sample.
        nnz_per_slot: number of keys in each slot.
        dynamic_input: whether to accept 1-D keys of any length instead of a fixed number.
        use_hashtable: False means that keys are row numbers in [0, max_vocabulary_size_per_gpu).
        padding_key: entries with this key give zeros, get no gradient and are not inserted.
        dtype, device, options: as in `DistributedEmbedding`.

    Shape:
        - Input: ``[batch, slot_num, nnz_per_slot]``, int64 or int32. Output:
          ``[batch, slot_num, nnz_per_slot, dim]``.
        - With dynamic_input: ``[n]``, where n may be 0. Output: ``[n, dim]``. Or jagged, as for
          `Embedding`.
    """

    @takes_table_options("Embedding", mode="it does not pool, as EmbeddingBag does")
    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        nnz_per_slot: int,
        dynamic_input: bool = False,
        use_hashtable: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Unpack[TableKeywords],
    ) -> None:
        super().__init__(
            TableOptions(
                max_vocabulary_size_per_gpu,
                embedding_vec_size,
                use_hashtable,
                dtype,
                device,
                **options,
            )
        )
        self.slot_num = check_count(self.name, "slot_num", slot_num)
        self.nnz_per_slot = check_count(self.name, "nnz_per_slot", nnz_per_slot)
        self.dynamic_input = dynamic_input

    @uncompiled
    def forward(self, keys: torch.Tensor, scores: torch.Tensor | None = None) -> torch.Tensor:
        """Look up the vector of each key; see Shape above."""
        try:
            request = self.request(keys)
            if scores is not None:
                beside(request, keys, scores)
            asked: Asked = [request]
        except BaseException as error:
            asked = refused([self], error)
        return look_up(self.plan_cache, [self], asked)[0]

    def request(self, keys: torch.Tensor) -> Request:
        """Check the input of a call, and return a request; see `EmbeddingLayer.request`."""
        request = ask_vectors(self, keys)
        slots = self.slot_num, self.nnz_per_slot
        if self.dynamic_input:
            fits, expected = len(request.shape) == 1, "be 1-D"
        else:
            fits = request.shape[1:] == slots
            expected = f"have shape [batch, slot_num={slots[0]}, nnz_per_slot={slots[1]}]"
        if not fits:
            raise ValueError(
                f"{self.name}: keys must {expected}, got shape {request.shape}; "
                f"sparsekit.Embedding takes keys of any shape"
            )
        return request
