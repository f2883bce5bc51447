"""Reads a state saved by `DcpState` as if it were the files of a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CheckpointError
from .manifest import Manifest
from .manifest_file import without_files
from .save import manifest_of
from .tensor_file import Place, TensorFile

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.storage import StorageReader

# Names in a saved DcpState: the entry that holds the format's version, and the prefix of the
# entries that describe each rank's part. All other entries are named like files in a checkpoint.
FORMAT, NOTES = "sparsekit_format", "notes"
VERSION = 1


def stem(file: str) -> str:
    """Return the name of the entry that corresponds to a file in a checkpoint's folder."""
    return file.removesuffix(".safetensors")


class DcpSource:
    """A state written by torch.distributed.checkpoint, for `load` to read.

    Tensors are read on demand, so that only one part of one table is in memory at a time.

    Args:
        load_from: a path or a torch.distributed.checkpoint reader.
        name: the state's name in the saved dict; None if there is only one state.

    Raises:
        CheckpointError: there is no such state, or several.
    """

    def __init__(self, load_from: str | os.PathLike[str] | StorageReader, name: str | None) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
        from torch.distributed.checkpoint.storage import StorageReader

        if isinstance(load_from, StorageReader):
            self._reader: StorageReader = load_from
            self._where = str(getattr(load_from, "checkpoint_id", type(load_from).__name__))
        else:
            self._reader = FileSystemReader(os.fspath(load_from))
            self._where = os.fspath(load_from)
        try:
            self._metadata = self._reader.read_metadata()
            entries = self._metadata.state_dict_metadata
        except Exception as error:  # a storage backend may raise anything
            raise CheckpointError(
                f"{self}: is no checkpoint of torch.distributed.checkpoint, or cannot be read: "
                f"{error!r:.200}"
            ) from error
        self._prefix = self._found(name)
        self._parts: dict[str, dict[str, TensorStorageMetadata]] = {}
        for entry, about in entries.items():
            if entry.startswith(self._prefix) and isinstance(about, TensorStorageMetadata):
                part, _, tensor = entry[len(self._prefix) :].partition(".")
                self._parts.setdefault(part, {})[tensor] = about
        ranks = self._parts.get(NOTES, {})
        if not all(rank.isdecimal() for rank in ranks):
            raise CheckpointError(f"{self}: is damaged: notes of ranks {', '.join(ranks):.80}")
        self._notes = {rank: self.read(NOTES, rank) for rank in sorted(ranks, key=int)}
        self.manifest = self._manifest()

    def __str__(self) -> str:
        return self._where

    def _found(self, name: str | None) -> str:
        """Return the prefix shared by the names of all entries in the saved state."""
        prefixes = {
            entry.removesuffix(FORMAT).removesuffix("."): entry.removesuffix(FORMAT)
            for entry in self._metadata.state_dict_metadata
            if entry == FORMAT or entry.endswith(f".{FORMAT}")
        }
        if not prefixes:
            raise CheckpointError(f"{self}: has nothing that a DcpState has saved")
        listed = ", ".join(map(repr, sorted(prefixes)))
        if name is None and len(prefixes) > 1:
            raise CheckpointError(
                f"{self}: several DcpStates have saved there: {listed}; pass name= one of these"
            )
        if name is not None and name not in prefixes:
            raise CheckpointError(f"{self}: no DcpState has saved as {name!r}, but as {listed}")
        return prefixes[next(iter(prefixes)) if name is None else name]

    def _manifest(self) -> Manifest:
        known = self.read(FORMAT, "")
        if known.shape != (1,):
            raise CheckpointError(f"{self}: is damaged: {FORMAT} has shape {list(known.shape)}")
        version = int(known)
        if version > VERSION:
            raise CheckpointError(
                f"{self}: a newer version of sparsekit has saved there: its format is {version}, "
                f"and this one reads {VERSION}"
            )
        try:
            notes = [json.loads(bytes(note.numpy())) for note in self._notes.values()]
            first = notes[0]
            expected = [(first["id"], rank, first["world_size"]) for rank in range(len(notes))]
            found = [(note["id"], note["rank"], note["world_size"]) for note in notes]
            if found != expected or len(notes) != first["world_size"]:
                raise ValueError(f"ranks {[rank for _, rank, _ in found]}")
            made = manifest_of(notes, first["id"], None, None, first["optimizers"])
            return without_files(Path(self._where) / NOTES, made)
        except (
            AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError
        ) as error:  # fmt: skip
            raise CheckpointError(f"{self}: is damaged: notes of ranks: {error!r:.200}") from error

    def to_load(self) -> dict[str, Any]:
        """Return the entries that torch.distributed.checkpoint itself must read."""
        return {
            FORMAT: ToLoad.of(torch.zeros(1, dtype=torch.int64), self._where),
            NOTES: {rank: torch.zeros_like(note) for rank, note in self._notes.items()},
        }

    def check_read(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless torch.distributed.checkpoint has read this checkpoint."""
        notes = state.get(NOTES, {})
        if notes.keys() != self._notes.keys() or not all(
            torch.equal(notes[rank], note) for rank, note in self._notes.items()
        ):
            raise CheckpointError(
                f"{self}: is load_from, and torch.distributed.checkpoint has read another "
                f"checkpoint; give both the same"
            )

    def file(self, name: str) -> TensorFile:
        """Open a file, as `TensorStore.file` does."""
        part = stem(name)
        return _Part(self, part, self._parts.get(part, {}))

    def read(self, part: str, tensor: str) -> torch.Tensor:
        """Read a whole tensor from a part.

        Raises:
            CheckpointError: the tensor cannot be read.
        """
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        entry = f"{self._prefix}{part}.{tensor}" if tensor else f"{self._prefix}{part}"
        try:
            about = self._parts[part][tensor]
            value = torch.empty(about.size, dtype=about.properties.dtype)
            # Plan as torch.distributed.checkpoint.load does on one rank, but without its warning.
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner({entry: value}, self._metadata, True)
            self._reader.set_up_storage_reader(self._metadata, True)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            (plan,) = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as error:  # a storage backend may raise anything
            raise CheckpointError(f"{self}: {entry} cannot be read: {error!r:.200}") from error
        return value


class _Part(TensorFile):
    """Reads the entries of one part as if it were a file; keeps tensors in memory until `close`."""

    def __init__(
        self, source: DcpSource, part: str, entries: Mapping[str, TensorStorageMetadata]
    ) -> None:
        self.path = Path(str(source)) / part
        self.places = {
            name: Place(about.properties.dtype, tuple(about.size), 0)
            for name, about in entries.items()
        }
        self._source, self._name = source, part
        self._kept: dict[str, torch.Tensor] = {}

    def close(self) -> None:
        self._kept.clear()

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        if name not in self._kept:
            self._kept[name] = self._source.read(self._name, name)
        whole = self._kept[name]
        return whole if count is None else whole[first : first + count]


NEEDS_LOAD_FROM = (
    "torch.distributed.checkpoint.load needs to know what a checkpoint has before it reads: pass "
    "DcpState(..., load_from=path), the path or StorageReader that load reads from; one that has "
    "loaded is for saving again"
)


class ToSave(torch.Tensor):
    """A tensor that can only be saved: pickling it or loading into it raises an error."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __create_chunk_list__(self) -> list[Any]:
        """Raise: torch.distributed.checkpoint calls this before it loads into the tensor."""
        raise CheckpointError(NEEDS_LOAD_FROM)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A planner that does not flatten the state treats it as one object that is equal on all
        # ranks, so it would save only one rank's state.
        raise CheckpointError(
            "a DcpState has entries of each rank, so it cannot be pickled whole: give "
            "torch.distributed.checkpoint a planner with flatten_state_dict=True"
        )


class ToLoad(torch.Tensor):
    """A tensor to load into: saving it before it has been loaded raises an error."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    load_from: str

    @staticmethod
    def of(tensor: torch.Tensor, load_from: str) -> ToLoad:
        """Return a view of a tensor, marked as not loaded yet."""
        marked = tensor.as_subclass(ToLoad)
        marked.load_from = load_from
        return marked

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        """Refuse: torch.distributed.checkpoint calls this to plan a save."""
        raise CheckpointError(
            f"{name}: a DcpState with load_from={self.load_from!r} has nothing to save before it "
            f"has loaded; make one without"
        )

    def new_empty(self, *args: Any, **kwargs: Any) -> ToLoad:
        """Return a ToLoad: async_save copies into the result, and must not save it, either."""
        return super().new_empty(*args, **kwargs).as_subclass(ToLoad)
