"""Explains arguments of torch's embedding layers that are named differently here, or missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_OURS = {
    "num_embeddings": "here max_vocabulary_size_per_gpu",
    "embedding_dim": "here embedding_vec_size",
    "mode": "here combiner",
    "padding_idx": "here padding_key, any key",
    "include_last_offset": "offsets always have their end",
    "sparse": "gradients always are",
    "max_norm": "only drop-ins have it",
    "scale_grad_by_freq": "leave it out",
}


def explain_torch_words(keywords: Iterable[str], ours: dict[str, str]) -> str:
    """Explain which keywords are torch's arguments, and what to use instead in our own layers.

    Args:
        keywords: keywords that the caller has passed to the layer.
        ours: explanations that differ for this layer, by argument.

    Returns:
        Text that completes "there is no ..."; empty if no keyword is an argument of torch's layers.
    """
    given, meanings = set(keywords), {**_OURS, **ours}
    return ", no ".join(f"{word} ({meanings[word]})" for word in meanings if word in given)


_ABSENT = {
    "scale_grad_by_freq": "leave it out, or keep torch's layer",
    "_weight": "use from_pretrained, or assign(keys, vectors) of the layer",
    "_freeze": "use from_pretrained, or requires_grad_(False) of the layer",
}


def refuse_absent(layer: str, **arguments: Any) -> None:
    """Raise NotImplementedError for an argument of torch's layers that would change results here.

    Args:
        layer: name of the layer, for the error message.
        arguments: the caller's values for scale_grad_by_freq, _weight or _freeze.
    """
    for word, value in arguments.items():
        if value is not None and value is not False:
            shown = "" if word == "_weight" else f"={value!r}"
            raise NotImplementedError(f"{layer}: sparsekit has no {word}{shown}; {_ABSENT[word]}")
