"""Declares the options that all layers share, with types and defaults, and checks them."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypedDict, get_type_hints

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from .. import _pybind, hashing, memory
from ..distributed.world import WIRE_DTYPES, settings
from ..errors import check_choice, check_int, check_number
from ..ops._checks import KEY_DTYPES, ROW_DTYPES
from .admission import MinCount, Probability
from .fallback import Fallback
from .initializers import Initializer
from .scores import LFU, Score, UserScore, score_of

PLACEMENTS = ("hash", "modulo")

# Initial number of rows that a table has room for, if the user gives none.
FIRST_ROWS = 1024


class TableKeywords(TypedDict, total=False):
    """Types of the keywords that every layer accepts; see `DistributedEmbedding`."""

    key_dtype: torch.dtype
    embedding_initializer: Initializer | Callable[[torch.Tensor], Any] | None
    padding_key: int | None
    on_full: str
    max_capacity: int | None
    storage: str
    max_resident_bytes: int | None
    max_rows: int | None
    low_watermark: float
    score: Score | Callable[[torch.Tensor], torch.Tensor] | str | None
    ttl: int | None
    admission: MinCount | Probability | None
    before_admission: str | Fallback
    gradient_reduction: str
    seed: int | None
    name: str | None
    process_group: dist.ProcessGroup | None
    placement: str | None
    wire_dtype: torch.dtype | None
    max_keys_per_rank: int | None
    insert: bool


@dataclass(frozen=True)
class TableOptions:
    """All options of a table, and the defaults of `TableKeywords`."""

    max_vocabulary_size_per_gpu: int | None
    embedding_vec_size: int
    use_hashtable: bool
    dtype: torch.dtype | None
    device: torch.device | str | None
    key_dtype: torch.dtype = torch.int64
    embedding_initializer: Initializer | Callable[[torch.Tensor], Any] | None = None
    padding_key: int | None = None
    on_full: str = "error"
    max_capacity: int | None = None
    storage: str = "memory"
    max_resident_bytes: int | None = None
    max_rows: int | None = None
    low_watermark: float = 0.99
    score: Score | Callable[[torch.Tensor], torch.Tensor] | str | None = None
    ttl: int | None = None
    admission: MinCount | Probability | None = None
    before_admission: str | Fallback = "initial"
    gradient_reduction: str = "mean"
    seed: int | None = None
    name: str | None = None
    process_group: dist.ProcessGroup | None = None
    placement: str | None = None
    wire_dtype: torch.dtype | None = None
    max_keys_per_rank: int | None = None
    insert: bool = True

    def checked(self, name: str) -> TableOptions:
        """Check the options; return them with defaults filled in. Error messages begin with `name`.

        Initializer and name are not changed, and a seed that must be drawn stays None.

        Raises:
            TypeError, ValueError: an option has the wrong type or is out of range.
            NotImplementedError: this build has no kernels for the device.
        """
        if self.max_vocabulary_size_per_gpu is None:
            return self._without_rows(name).checked(name)
        capacity = check_count(
            name, "max_vocabulary_size_per_gpu", self.max_vocabulary_size_per_gpu, 2**31 - 1
        )
        dim = check_count(name, "embedding_vec_size", self.embedding_vec_size)
        check_choice(name, "key_dtype", self.key_dtype, KEY_DTYPES)
        dtype = self.dtype or torch.get_default_dtype()
        check_choice(name, "dtype", dtype, ROW_DTYPES)
        check_choice(name, "on_full", self.on_full, ("error", "evict", "grow"))
        check_choice(name, "gradient_reduction", self.gradient_reduction, ("mean", "sum"))
        wire_dtype = self.wire_dtype or settings.wire_dtype
        if self.wire_dtype is not None:
            check_choice(name, "wire_dtype", wire_dtype, (*WIRE_DTYPES, dtype))
        placement = self.placement
        if placement is None:
            placement = "hash" if self.use_hashtable else "modulo"
        check_choice(name, "placement", placement, PLACEMENTS)
        if placement == "hash" and not self.use_hashtable:
            raise ValueError(
                f"{name}: placement='hash' needs the hash table: with use_hashtable=False a key is "
                f"a row number, key // world_size on rank key % world_size"
            )
        if self.max_keys_per_rank is not None:
            check_count(name, "max_keys_per_rank", self.max_keys_per_rank)
        if not isinstance(self.insert, bool):
            raise TypeError(f"{name}: insert must be True or False, got {self.insert!r}")
        device = _checked_device(name, self.device)
        folder = self._checked_storage(name, device)
        max_capacity = self._checked_growth(name, capacity, dim * dtype.itemsize, device, folder)
        padding_key = self.padding_key
        if padding_key is not None:
            padding_key = check_int(name, "padding_key", padding_key, -(2**63), 2**63 - 1)
            if isinstance(self.before_admission, Fallback):
                self.before_admission.check(name, torch.tensor([padding_key], device="cpu"))
        return replace(
            self,
            **self._checked_life(name),
            max_vocabulary_size_per_gpu=capacity,
            max_capacity=max_capacity,
            storage="memory" if folder is None else folder,
            embedding_vec_size=dim,
            placement=placement,
            wire_dtype=wire_dtype if wire_dtype in WIRE_DTYPES else None,
            device=device,
            padding_key=padding_key,
            dtype=dtype,
            seed=_checked_seed(name, self.name, self.seed),
            process_group=self.process_group or settings.process_group,
        )

    def _without_rows(self, name: str) -> TableOptions:
        """Return options that let the table grow, since no number of rows has been given."""
        for given, reason in (
            (not self.use_hashtable, "use_hashtable=False"),
            (self.on_full == "evict", "on_full='evict'"),
        ):
            if given:
                raise ValueError(
                    f"{name}: {reason} needs a number of rows: max_vocabulary_size_per_gpu (or "
                    f"num_embeddings) is None, which is for tables that grow"
                )
        rows = FIRST_ROWS
        if isinstance(self.max_capacity, int):
            rows = max(1, min(rows, self.max_capacity))
        return replace(self, max_vocabulary_size_per_gpu=rows, on_full="grow")

    def _checked_growth(
        self,
        name: str,
        capacity: int,
        row_bytes: int,
        device: torch.device,
        folder: str | None,
    ) -> int | None:
        """Check the growth options; return the largest number of rows if the table grows."""
        if self.on_full != "grow":
            if self.max_capacity is not None:
                raise ValueError(
                    f"{name}: max_capacity={self.max_capacity} needs on_full='grow', got "
                    f"on_full={self.on_full!r}"
                )
            return None
        if not self.use_hashtable:
            raise ValueError(
                f"{name}: on_full='grow' needs the hash table: with use_hashtable=False the rows "
                f"are as many as there are keys"
            )
        if self.max_capacity is None:
            # Choose more rows than fit into memory or on the disk, so that allocating as much
            # again, as torch's optimizers do for a state, fails at once rather than when memory is
            # used up.
            disk = None if folder is None else shutil.disk_usage(folder)
            bound = memory.total_bytes(device) if disk is None else disk.total
            rows = 5 * bound // (4 * row_bytes)
            return max(capacity, min(2**31 - 1, rows))
        return check_int(name, "max_capacity", self.max_capacity, capacity, 2**31 - 1)

    def _checked_storage(self, name: str, device: torch.device) -> str | None:
        """Check the storage options; return the folder for files of rows, if any."""
        if not isinstance(self.storage, str):
            raise TypeError(f"{name}: storage must be a string, got {self.storage!r}")
        kind, _, folder = self.storage.partition(":")
        if self.storage != "memory" and not (kind == "mmap" and folder):
            raise ValueError(
                f"{name}: storage must be 'memory' or 'mmap:FOLDER', got {self.storage!r}"
            )
        if self.max_resident_bytes is not None:
            check_count(name, "max_resident_bytes", self.max_resident_bytes)
            if not folder:
                raise ValueError(
                    f"{name}: max_resident_bytes={self.max_resident_bytes} needs "
                    f"storage='mmap:FOLDER', got storage={self.storage!r}"
                )
        if not folder:
            return None
        if device.type == "cuda":
            raise NotImplementedError(
                f"{name}: storage={self.storage!r} needs device='cpu', got {device}: a GPU cannot "
                f"read rows that lie in files"
            )
        folder = os.path.abspath(folder)
        if not os.path.isdir(folder):
            raise ValueError(f"{name}: storage={self.storage!r}: there is no folder {folder}")
        return folder

    def _checked_life(self, name: str) -> dict[str, Any]:
        """Check the options for the life of rows, and return them with defaults filled in."""
        given = {name: getattr(self, name) for name in ("max_rows", "score", "ttl", "admission")}
        given = {option: value for option, value in given.items() if value is not None}
        evicts = self.on_full == "evict"
        if not self.use_hashtable and (given or evicts):
            option, value = next(iter([*given.items(), ("on_full", self.on_full)]))
            raise ValueError(
                f"{name}: {option}={value!r} needs the hash table: with use_hashtable=False every "
                f"key has a row for ever"
            )
        if self.max_rows is not None:
            if not evicts:
                raise ValueError(f"{name}: max_rows={self.max_rows} needs on_full='evict'")
            check_count(name, "max_rows", self.max_rows)
        low_watermark = check_number(name, "low_watermark", self.low_watermark)
        if not 0 < low_watermark <= 1:
            raise ValueError(f"{name}: low_watermark must be in (0, 1], got {low_watermark}")
        if low_watermark != TableOptions.low_watermark and not evicts:
            raise ValueError(f"{name}: low_watermark={low_watermark} needs on_full='evict'")
        if self.ttl is not None:
            check_count(name, "ttl", self.ttl, 2**62)
        if not isinstance(self.admission, (MinCount, Probability, type(None))):
            raise TypeError(
                f"{name}: admission must be sparsekit.MinCount(...), sparsekit.Probability(...) or "
                f"None, got {self.admission!r}"
            )
        if not isinstance(self.before_admission, Fallback):
            check_choice(name, "before_admission", self.before_admission, ("initial", "zero"))
        if self.before_admission != "initial" and self.admission is None:
            raise ValueError(f"{name}: before_admission={self.before_admission!r} needs admission")
        scored = evicts or any(given.values())
        score = score_of(name, "lru" if self.score is None else self.score) if scored else None
        told = evicts or self.admission is not None or isinstance(score, LFU)
        if self.max_keys_per_rank is not None and told:
            option = "on_full='evict'" if evicts else f"score={self.score!r}"
            option = option if self.admission is None else "admission"
            raise ValueError(
                f"{name}: {option} cannot have max_keys_per_rank, whose messages have room neither "
                f"for the rows in use nor for how often keys come"
            )
        if self.max_keys_per_rank is not None and self.ttl is not None:
            raise ValueError(
                f"{name}: ttl={self.ttl} cannot have max_keys_per_rank, whose lookups drop no rows"
            )
        if self.max_keys_per_rank is not None and isinstance(score, UserScore):
            raise ValueError(
                f"{name}: score={score.called} cannot have max_keys_per_rank, whose ranks do not "
                f"agree on scores before rows change"
            )
        return {"score": score, "low_watermark": low_watermark}


def keyword_parameters() -> list[inspect.Parameter]:
    """Return `TableKeywords` as parameters of a function signature, with defaults."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(TableOptions, name),
            annotation=annotation,
        )
        for name, annotation in get_type_hints(TableKeywords).items()
    ]


def check_count(name: str, argument: str, value: int, most: int = 2**63 - 1) -> int:
    """Check that ``value`` is in [1, most], and return it as an int; see `check_int`."""
    return check_int(name, argument, value, 1, most)


def _checked_device(name: str, device: torch.device | str | None) -> torch.device:
    device = torch.device(device or torch.get_default_device())
    if device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(f"{name}: device must be cpu, cuda or meta, got {device}")
    if device.type == "cuda" and not _pybind.build_info()["cuda"]:
        raise NotImplementedError(
            f"{name}: device is {device}, but this build of sparsekit has no CUDA kernels; install "
            f"it with SPARSEKIT_CUDA=1 in the environment, where there is an nvcc"
        )
    return device


def _checked_seed(called: str, name: str | None, seed: int | None) -> int | None:
    """Return the seed as a signed 64-bit integer; an unsigned seed keeps its 64 bits."""
    # Layers get different seeds, so that equal keys (user 5 and item 5) start from different
    # vectors. The seed is part of the state, so that a loaded layer keeps its seed.
    if seed is None and name is None:
        return None
    if seed is None:
        return int(hashing.xxh64([name], seed=settings.seed))
    seed = check_int(called, "seed", seed, -(2**63), 2**64 - 1)
    return (seed + 2**63) % 2**64 - 2**63


def drawn_seed() -> int:
    """Draw a seed from torch's default generator, which torch.manual_seed seeds."""
    with _disable_current_modes():  # in FakeTensorMode, tensors have no values
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_())
