"""The drop-in for torch.nn.EmbeddingBag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._compiling import uncompiled
from ..errors import check_choice
from ..lookup import Asked, look_up, refused
from ..lookup.request import Request, ask_bags
from ..lookup.user_scores import beside
from ..tables.options import TableKeywords
from .dropin import DropIn, rows_of, with_vectors
from .embedding import STRATEGIES
from .keywords import takes_table_options
from .torch_words import refuse_absent

if TYPE_CHECKING:
    from typing_extensions import Unpack

MODES = ("sum", "mean", "max")


class EmbeddingBag(DropIn):
    """A layer that pools bags of ids, called like ``torch.nn.EmbeddingBag``; any int64 is an id.

    Rows, ids and gradients are as in `Embedding`.

    Args:
        num_embeddings, embedding_dim, max_norm, norm_type: as in `Embedding`.
        scale_grad_by_freq: must be False.
        mode: ``"mean"``, ``"sum"`` or ``"max"``. ``"max"`` first gathers the vectors of all ids;
            the maximum is elementwise, and on ties the first vector gets the gradient.
        sparse: ignored; gradients are always sparse, with ``"max"`` too.
        _weight: not supported; see `from_pretrained`.
        include_last_offset: whether offsets include the end of the last bag.
        padding_idx: as in `Embedding`; this id is not counted in a bag.
        device, dtype, padding_key, embedding_initializer, name: as in `Embedding`.
        use_hashtable, strategy, options: as in `DistributedEmbedding`.

    Shape:
        - Input: int64 or int32 ``[n]``, with offsets, or ``[bags, m]``, each row a bag; or
          torch.nested jagged ``[bags, j]``.
        - Offsets: int64 or int32 ``[bags]``, the position where each bag begins, 0 for the first
          bag; with include_last_offset ``[bags + 1]``, and the last offset is n.
        - per_sample_weights: floating point, in the form of input; only with ``mode="sum"``.
        - Output: ``[bags, embedding_dim]`` in the dtype of weight; an empty bag is zeros.

    In an `EmbeddingGroup`, inputs are ``[bags, m]``, or have any other form that
    `DistributedEmbedding` accepts for one slot. Offsets then include the end of the last bag.

    Raises:
        TypeError, ValueError: a bad argument or input; the message names the layer, the argument,
            the value and its position.
        NotImplementedError: scale_grad_by_freq or _weight was passed; (a call) per_sample_weights
            with a mode other than ``"sum"``.
        IndexError: (a call without the hash table) an id out of range.
        TableFullError: (a call in training) there are more new ids than free rows.

    Example:
        >>> layer = EmbeddingBag(1000, 8, mode="sum")
        >>> ids, offsets = torch.tensor([7, 10**18, -5, 7]), torch.tensor([0, 3])
        >>> layer(ids, offsets).shape
        torch.Size([2, 8])
    """

    @takes_table_options()
    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = True,
        _weight: torch.Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        use_hashtable: bool = True,
        strategy: str = "auto",
        **options: Unpack[TableKeywords],
    ) -> None:
        called = options.get("name") or "EmbeddingBag"
        refuse_absent(called, scale_grad_by_freq=scale_grad_by_freq, _weight=_weight)
        check_choice(called, "mode", mode, MODES)
        check_choice(called, "strategy", strategy, STRATEGIES)
        if mode == "max" and strategy == "reduce_scatter":
            raise ValueError(f"{called}: strategy='reduce_scatter' adds up, and mode is 'max'")
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
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.strategy = strategy

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = True,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        num_embeddings: int | None = None,
        **options: Any,
    ) -> EmbeddingBag:
        """Make a layer whose ids 0..n-1 have these vectors; see `Embedding.from_pretrained`."""
        called = options.get("name") or cls.__name__
        rows, padding_idx = rows_of(called, embeddings, padding_idx, num_embeddings)
        layer = cls(
            rows,
            embeddings.shape[1],
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            None,
            include_last_offset,
            padding_idx,
            **{"device": embeddings.device, "dtype": embeddings.dtype, **options},
        )
        return with_vectors(layer, embeddings, freeze)

    @property
    def combiner(self) -> str:
        """The pooling mode, which other layers call combiner."""
        return self.mode

    @uncompiled
    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        *,
        scores: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pool the vectors of each bag's ids; see Shape above."""
        try:
            request = self._asked(input, offsets, per_sample_weights)
            if scores is not None:
                beside(request, input, scores)
            asked: Asked = [request]
        except BaseException as error:
            asked = refused([self], error)
        return look_up(self.plan_cache, [self], asked)[0]

    def request(self, inputs: Any, sample_weights: Any = None) -> Request:
        """Check bags, and return a request; see `EmbeddingLayer.request`."""
        return self._bags(inputs, sample_weights)

    def _asked(self, input: Any, offsets: Any, weights: Any) -> Request:
        """Return the request for a call with torch's arguments."""
        if weights is not None:
            if self.mode != "sum":
                raise NotImplementedError(
                    f"{self.name}: per_sample_weights is only there with mode='sum', as in torch, "
                    f"and mode is {self.mode!r}; a weighted mean is that of DistributedEmbedding"
                )
            shapes = [getattr(tensor, "shape", None) for tensor in (input, weights)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"{self.name}: per_sample_weights must have the shape of input, but their "
                    f"shapes are {shapes[1]} and {shapes[0]}"
                )
        return self._bags(self._inputs(input, offsets), weights)

    def _inputs(self, input: Any, offsets: Any) -> Any:
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"{self.name}: input must be a tensor, got {type(input).__name__}")
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError(
                    f"{self.name}: offsets must be None for a 2-D input, each row of which is a bag"
                )
            return input
        if input.dim() != 1:
            raise ValueError(
                f"{self.name}: input must be [n] with offsets, or [bags, m], got shape "
                f"{tuple(input.shape)}; sparsekit.Embedding takes keys of any shape, and "
                f"sparsekit.DistributedEmbedding bags of several slots"
            )
        if not isinstance(offsets, torch.Tensor):
            raise ValueError(
                f"{self.name}: a 1-D input needs offsets, a tensor of where each bag begins, got "
                f"{offsets!r}"
            )
        if offsets.dim() != 1:
            raise ValueError(f"{self.name}: offsets must be 1-D, got shape {tuple(offsets.shape)}")
        if not self.include_last_offset:
            # torch.cat is faster than constant_pad_nd.
            offsets = torch.cat((offsets, offsets.new_full((1,), len(input))))
        return input, offsets

    def _bags(self, inputs: Any, weights: Any) -> Request:
        return ask_bags(self, inputs, weights, self.mode, None)

    def extra_repr(self) -> str:
        """Return the base class's text, with the settings for pooling added."""
        last = ", include_last_offset=True" if self.include_last_offset else ""
        return f"{super().extra_repr()}, mode={self.mode!r}{last}"
