"""Titles of the films of MovieLens-100K."""

from __future__ import annotations

import os

from .fetch import PackagedFile

MOVIELENS_100K_ITEMS = PackagedFile(
    title="The list of MovieLens-100K's films",
    package="recbole==1.2.1",
    member="recbole/dataset_example/ml-100k/ml-100k.item",
    sha256="51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
    way_out="go without titles",
)


def movielens_100k_titles(cache_dir: str | os.PathLike[str] | None = None) -> dict[int, str]:
    """Item -> title and year, ``"Toy Story (1995)"``; see `movielens_100k` for where from.

    Args:
        cache_dir: where to keep the file; None means ``$XDG_CACHE_HOME/sparsekit`` or
            ``~/.cache/sparsekit``.

    Raises:
        DatasetUnavailableError: it is not in the cache and cannot be fetched.
    """
    content, _ = MOVIELENS_100K_ITEMS.read(cache_dir)
    # Its SHA-256 has been verified, so it has these columns: id, title, year, genres.
    rows = [line.split("\t") for line in content.decode().splitlines()[1:]]
    return {int(item): f"{title} ({year})" for item, title, year, _ in rows}
