"""Separates the parameters of embedding layers from all others."""

from collections.abc import Iterable

import torch

from ..tables.weight import EmbeddingWeight

Named = tuple[str, torch.nn.Parameter]


def split_embedding_variable_from_others(
    module_or_parameters: torch.nn.Module | Iterable[torch.nn.Parameter | Named],
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Separate the parameters of sparsekit's embedding layers from all others.

    Args:
        module_or_parameters: a module, its ``parameters()`` or its ``named_parameters()``.

    Returns:
        ``(embedding parameters, other parameters)``, each in the order given.

    Raises:
        TypeError: a single parameter, or an item that is not a parameter; the message gives its
            position.

    Example:
        >>> sparse, dense = split_embedding_variable_from_others(model)
        >>> optimizers = [LazyAdam(sparse), torch.optim.Adam(dense)]
    """
    if isinstance(module_or_parameters, torch.nn.Module):
        module_or_parameters = module_or_parameters.parameters()
    if isinstance(module_or_parameters, torch.Tensor):
        # Without this check, iterating over a tensor would yield its rows.
        raise TypeError(
            "split_embedding_variable_from_others takes a module or several parameters and got a "
            "single one; put it in a list"
        )
    embedding: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for position, item in enumerate(module_or_parameters):
        parameter = item[1] if isinstance(item, tuple) else item
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"split_embedding_variable_from_others: item {position} is no parameter but a "
                f"{type(parameter).__name__}"
            )
        (embedding if isinstance(parameter, EmbeddingWeight) else others).append(parameter)
    return embedding, others
