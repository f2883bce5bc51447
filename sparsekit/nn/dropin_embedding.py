"""The drop-in for torch.nn.Embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._compiling import uncompiled
from ..lookup import Asked, look_up, refused
from ..lookup.request import Request, ask_vectors
from ..lookup.user_scores import beside
from ..tables.options import TableKeywords
from .dropin import DropIn, rows_of, with_vectors
from .keywords import takes_table_options
from .torch_words import refuse_absent

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Embedding(DropIn):
    """A layer with a vector for each id, called like ``torch.nn.Embedding``; any int64 is an id.

    In training an unseen id gets the next free row of ``weight``, so rows are in the order of the
    ids' first occurrence; `vectors`, `assign` and `items` access rows by id. In evaluation nothing
    is inserted, and an unseen id gets its initial vector. ``weight.grad`` is a sparse tensor. The
    optimizers of `sparsekit.optim` accept it, as do torch's SparseAdam, SGD and Adagrad.

    Args:
        num_embeddings: rows of this process's table, in [1, 2^31 - 1]: the number of distinct ids
            that it can hold. None makes a table that grows (``on_full="grow"``). With
            ``use_hashtable=False`` ids are row numbers below num_embeddings, as in torch.
        embedding_dim: length of a vector.
        padding_idx: an id, in [-num_embeddings, num_embeddings), where -1 means the last id. Its
            vector is always zero and gets no gradient.
        max_norm: None, or the largest allowed norm of a vector. Before a vector with a larger norm
            is read, the rank that owns it scales it by ``max_norm / (norm + 1e-7)`` in ``weight``
            itself. As in torch this happens in evaluation too, so only one thread at a time may
            look up. On CUDA each call then waits for the device. In evaluation an id without a row
            gets its initial vector, unscaled.
        norm_type: p of that norm, > 0.
        scale_grad_by_freq: must be False.
        sparse: ignored; gradients are always sparse.
        _weight, _freeze: not supported; see `from_pretrained`.
        device: as in `DistributedEmbedding`.
        dtype: float32, float64 or bfloat16; None means torch's default dtype.
        padding_key: may be given instead of padding_idx; any int64, and -1 is a key like any other.
        embedding_initializer: as in `DistributedEmbedding`, but None means ``Normal(0.0, 1.0)``,
            torch's default.
        name: name of the layer, for error messages. Initial vectors depend on the name, or on
            `torch.manual_seed` if there is none.
        use_hashtable, other options: as in `DistributedEmbedding`.

    Shape:
        - Input: ``[*]``, int64 or int32, of any shape.
        - Output: ``[*, embedding_dim]`` in the dtype of weight.
        - Or torch.nested jagged ``[bags, j]``, or a JaggedTensor, whose weights are ignored.
          Output: torch.nested jagged ``[bags, j, embedding_dim]``.

    Raises:
        TypeError, ValueError: a bad argument or input, such as a padding_idx out of its range.
        NotImplementedError: scale_grad_by_freq, _weight or _freeze was passed.
        IndexError: (a call without the hash table) an id out of range.
        TableFullError: (a call in training) there are more new ids than free rows.

    Example:
        >>> layer = Embedding(1000, 8, padding_idx=0)
        >>> layer(torch.tensor([[7, 10**18, 0], [-5, 7, 7]])).shape
        torch.Size([2, 3, 8])
    """

    @takes_table_options()
    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        _weight: torch.Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        use_hashtable: bool = True,
        **options: Unpack[TableKeywords],
    ) -> None:
        refuse_absent(
            options.get("name") or "Embedding",
            scale_grad_by_freq=scale_grad_by_freq,
            _weight=_weight,
            _freeze=_freeze,
        )
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            use_hashtable,
            dtype,
            device,
            **options,
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        *,
        num_embeddings: int | None = None,
        **options: Any,
    ) -> Embedding:
        """Make a layer whose ids 0..n-1 have copies of these vectors.

        In a single process, the copies are in rows 0..n-1 of ``weight``.

        Args:
            embeddings: float32, float64 or bfloat16 ``[n, dim]``.
            freeze: whether training leaves the vectors unchanged.
            padding_idx: as in the layer; a negative padding_idx counts from n.
            max_norm: as in the layer.
            norm_type: as in the layer.
            scale_grad_by_freq: as in the layer.
            sparse: as in the layer.
            num_embeddings: rows of the table, at least n; None means n, which leaves no rows for
                other ids.
            options: further keywords of the layer.

        Raises:
            ValueError: embeddings is not ``[n, dim]``, or is not zero at padding_idx.
            The layer raises further errors.
        """
        called = options.get("name") or cls.__name__
        rows, padding_idx = rows_of(called, embeddings, padding_idx, num_embeddings)
        if padding_idx is not None and embeddings[padding_idx].any():
            raise ValueError(
                f"{called}: the vector at padding_idx={padding_idx} is not zeros, which that of a "
                f"padding always is here; write zeros there, or leave padding_idx out"
            )
        layer = cls(
            rows,
            embeddings.shape[1],
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            **{"device": embeddings.device, "dtype": embeddings.dtype, **options},
        )
        return with_vectors(layer, embeddings, freeze)

    @uncompiled
    def forward(self, input: torch.Tensor, *, scores: torch.Tensor | None = None) -> torch.Tensor:
        """Look up the vector of each id; see Shape above."""
        try:
            request = self.request(input)
            if scores is not None:
                beside(request, input, scores)
            asked: Asked = [request]
        except BaseException as error:
            asked = refused([self], error)
        return look_up(self.plan_cache, [self], asked)[0]

    def request(self, keys: torch.Tensor) -> Request:
        """Check the input of a call, and return a request; see `EmbeddingLayer.request`."""
        return ask_vectors(self, keys)
