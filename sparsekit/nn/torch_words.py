"""Arguments of torch's embedding layers that have another name here, or that there are not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Init = TypeVar("_Init", bound=Callable[..., None])

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


def explain_torch_words(drop_in: str, **ours: str) -> Callable[[_Init], _Init]:
    """Have a layer say what it calls arguments of torch's that it is given.

    Args:
        drop_in: the class that takes them.
        ours: what to say of some of them, if it is not what we say otherwise.

    Raises:
        TypeError: (when the layer is made) such an argument; the message has our word for it.
    """

    def explained(init: _Init) -> _Init:
        @functools.wraps(init)
        def explaining(self: Any, *args: Any, **keywords: Any) -> None:
            meanings = {**_OURS, **ours}
            found = [f"{word} ({meanings[word]})" for word in meanings if word in keywords]
            if found:
                raise TypeError(
                    f"{keywords.get('name') or type(self).__name__}: there is no "
                    f"{', no '.join(found)}; sparsekit.{drop_in} takes torch's arguments"
                )
            init(self, *args, **keywords)

        return cast(_Init, explaining)

    return explained


_ABSENT = {
    "scale_grad_by_freq": "leave it out, or keep torch's layer",
    "_weight": "use from_pretrained, or assign(keys, vectors) of the layer",
    "_freeze": "use from_pretrained, or requires_grad_(False) of the layer",
}


def refuse_absent(layer: str, **arguments: Any) -> None:
    """Raise NotImplementedError for an argument of torch's layers that would change results here.

    Args:
        layer: what the error begins with.
        arguments: as given, some of scale_grad_by_freq, _weight and _freeze.
    """
    for word, value in arguments.items():
        if value is not None and value is not False:
            shown = "" if word == "_weight" else f"={value!r}"
            raise NotImplementedError(f"{layer}: sparsekit has no {word}{shown}; {_ABSENT[word]}")
