"""Describes the columns that a reader reads, and how it converts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from .._nearest import did_you_mean
from ..errors import check_choice, check_int

__all__ = ["Columns", "Keys"]

Kind = Literal["hash", "int", "hex"]


@dataclass(frozen=True)
class Keys:
    """Describes how the values of a categorical column are converted to keys.

    Attributes:
        kind: ``"hash"``: the key is `sparsekit.hashing.xxh64` of the value. ``"int"``: the value, a
            64-bit integer, is the key. ``"hex"``, in text files only: the value is a hexadecimal
            number of at most 16 digits, whose 64 bits are the key.
        separator: In text files, the byte that separates the values of a bag; None if each field
            has a single value.
        missing: The key for an empty field (in Parquet, for a null). With None, such a field is an
            empty bag.
        seed: Seed of the hash, in ``[0, 2**64)``. With different seeds, equal values of different
            columns get different keys, so that the columns can share a table.
    """

    kind: Kind = "hash"
    separator: str | None = None
    missing: int | None = None
    seed: int = 0

    def check(self, name: str) -> None:
        """Raise TypeError or ValueError, with the column's name, if an attribute is invalid."""
        check_choice(name, "kind", self.kind, ("hash", "int", "hex"))
        if self.separator is not None and len(self.separator.encode()) != 1:
            raise ValueError(f"{name}: separator must be one byte, got {self.separator!r}")
        if self.missing is not None:
            check_int(name, "missing", self.missing, -(2**63), 2**63 - 1)
        check_int(name, "seed", self.seed, 0, 2**64 - 1)


@dataclass(frozen=True)
class Columns:
    """Names of the columns to read, and how their values are converted to keys.

    Attributes:
        label: name of the label's column, or None.
        dense: names of numeric columns.
        sparse: how the values of each categorical column are converted to keys, by the column's
            name.
    """

    label: str | None
    dense: tuple[str, ...]
    sparse: dict[str, Keys]

    @classmethod
    def of(
        cls,
        reader: str,
        label: str | None,
        dense: Sequence[str],
        sparse: Sequence[str] | Mapping[str, Keys | Kind],
    ) -> Columns:
        """Check a reader's arguments, and make the columns from them.

        Raises:
            TypeError, ValueError: an argument has the wrong form or is out of range, or a column is
                named twice.
        """
        for argument, names in (("dense", dense), ("sparse", sparse)):
            if isinstance(names, str):
                raise TypeError(f"{reader}: {argument} must be a list of names, got {names!r}")
        if not isinstance(sparse, Mapping):
            if repeated := sorted({name for name in sparse if list(sparse).count(name) > 1}):
                raise ValueError(f"{reader}: sparse names {repeated} twice")
            sparse = dict.fromkeys(sparse, Keys())
        made = cls(
            label,
            tuple(dense),
            {name: Keys(how) if isinstance(how, str) else how for name, how in sparse.items()},
        )
        for name, how in made.sparse.items():
            if not isinstance(how, Keys):
                raise TypeError(
                    f"{reader}: sparse[{name!r}] must be Keys(...) or its kind, got {how!r}"
                )
            how.check(f"{reader}: sparse[{name!r}]")
        names = made.names()
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{reader}: columns {twice} are named twice")
        if not names:
            raise ValueError(f"{reader}: name at least one column in label, dense or sparse")
        return made

    def names(self) -> list[str]:
        """Return the names of all columns, the label first."""
        return [*([] if self.label is None else [self.label]), *self.dense, *self.sparse]

    def check_there(self, reader: str, source: str, there: Sequence[str]) -> None:
        """Raise ValueError unless ``there``, a file's columns, has each of `names` exactly once."""
        for name in self.names():
            if there.count(name) != 1:
                if not any(there):
                    raise ValueError(f"{reader}: {source} is empty, or begins with an empty line")
                what = "no column" if name not in there else "more than one column"
                hint = did_you_mean(name, there) if name not in there else ""
                raise ValueError(
                    f"{reader}: {source} has {what} {name!r}{hint or ';'} "
                    f"{'Its' if hint else 'its'} columns are {list(there)[:20]}"
                )

    def settings(self) -> dict[str, object]:
        """Return all settings as plain values, to be stored in a reader's state."""
        sparse = {name: list(astuple(how)) for name, how in self.sparse.items()}
        return {"label": self.label, "dense": list(self.dense), "sparse": sparse}
