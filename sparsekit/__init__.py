"""Sparse embeddings for PyTorch; any 64-bit integer can be an id."""

from ._distribution import refuse_mixture

refuse_mixture()

from . import _pybind  # noqa: E402

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    # `sparsekit.serving` works without torch. Using any other name raises an error.
    from ._without_torch import leave_out_what_needs_torch

    leave_out_what_needs_torch(__name__)
else:
    from ._load import checked, instruction_set, load

    load()  # needed by the imports below

    from . import distributed, hashing, nn, ops, optim
    from .distributed import init
    from .errors import TableFullError
    from .memory import empty_cache
    from .nn import (
        All2AllDenseEmbedding,
        DistributedEmbedding,
        Embedding,
        EmbeddingBag,
        EmbeddingGroup,
        Feature,
        group_embedding_lookup_sparse,
        load_torch_state_dict,
        memory_report,
        replace_embeddings,
        set_clock,
    )
    from .optim import split_embedding_variable_from_others
    from .tables.admission import MinCount, Probability
    from .tables.fallback import Fallback
    from .tables.hash_table import HashTable
    from .tables.life import Evicted, RowCounts
    from .tables.reports import raise_errors
    from .tables.scores import LFU, LRU

__version__: str = _pybind.build_info()["version"]


def build_info() -> dict[str, object]:
    """Describe how this installation was built, and which engine it uses.

    Returns:
        A dict with: the version; the compiler, the C++ standard and the build type; the torch
        version that it was built with, and the oldest one that it runs with; the Python version of
        the binding module; whether there are CUDA kernels, and for which chips (``cuda_archs``,
        such as ``"sm_80,sm_90"``); the version of NCCL that the native exchange was built with
        (``nccl``, False if it was left out); and the instruction set of the CPU engine in use.
    """
    return {**_pybind.build_info(), "cpu_engine": instruction_set()}


__all__ = [
    "LFU",
    "LRU",
    "All2AllDenseEmbedding",
    "DistributedEmbedding",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingGroup",
    "Evicted",
    "Fallback",
    "Feature",
    "HashTable",
    "MinCount",
    "Probability",
    "RowCounts",
    "TableFullError",
    "__version__",
    "build_info",
    "checked",
    "distributed",
    "empty_cache",
    "group_embedding_lookup_sparse",
    "hashing",
    "init",
    "load_torch_state_dict",
    "memory_report",
    "nn",
    "ops",
    "optim",
    "raise_errors",
    "replace_embeddings",
    "set_clock",
    "split_embedding_variable_from_others",
]
