"""Shows the table options among a layer's keywords in `help`, and refuses unknown keywords."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .._nearest import did_you_mean
from ..tables.options import keyword_parameters
from .torch_words import explain_torch_words

_Init = TypeVar("_Init", bound=Callable[..., None])


def takes_table_options(drop_in: str = "", **ours: str) -> Callable[[_Init], _Init]:
    """Let ``help`` and ``inspect`` show the ``**options`` of a layer's ``__init__`` by name.

    Args:
        drop_in: the class to recommend for torch's arguments, if the layer's own class lacks them.
        ours: our names for some of torch's arguments; see `explain_torch_words`.

    Raises:
        TypeError: (when the layer is made) a keyword is unknown; the message suggests the most
            similar keyword, or our name for a torch argument.
    """

    def decorate(init: _Init) -> _Init:
        signature = inspect.signature(init)
        own = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
        parameters = [*own, *keyword_parameters()]
        known = {each.name: each.annotation for each in parameters[1:]}  # self is left out

        @functools.wraps(init)
        def checking(self: Any, *args: Any, **keywords: Any) -> None:
            if not known.keys() >= keywords.keys():
                called = keywords.get("name") or type(self).__name__
                if drop_in and (words := explain_torch_words(keywords, ours)):
                    words += f"; sparsekit.{drop_in} takes torch's arguments"
                else:
                    word = next(word for word in keywords if word not in known)
                    words = f"{word}{did_you_mean(word, known)}"
                raise TypeError(f"{called}: there is no {words}")
            init(self, *args, **keywords)

        checking.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        checking.__annotations__ = known
        return cast(_Init, checking)

    return decorate
