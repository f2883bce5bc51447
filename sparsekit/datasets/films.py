"""Returns titles, years and genres of the films in MovieLens-100K."""

from __future__ import annotations

import os

from .fetch import PackagedFile

MOVIELENS_100K_ITEMS = PackagedFile(
    title="The list of MovieLens-100K's films",
    package="recbole==1.2.1",
    member="recbole/dataset_example/ml-100k/ml-100k.item",
    sha256="51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
    way_out="`sparsekit train deepconn --data FILE` with reviews of your own; elsewhere go without "
    "titles",
)


def movielens_100k_films(
    cache_dir: str | os.PathLike[str] | None = None,
) -> dict[int, tuple[str, str, str]]:
    """Return each film's title, year and genres by item id. For the source, see `movielens_100k`.

    Args:
        cache_dir: folder for the cached file; None means ``$XDG_CACHE_HOME/sparsekit`` or
            ``~/.cache/sparsekit``.

    Raises:
        DatasetUnavailableError: the data is not in the cache and cannot be downloaded.
    """
    content, _ = MOVIELENS_100K_ITEMS.read(cache_dir)
    # The columns need no check, since the SHA-256 has been verified.
    rows = [line.split("\t") for line in content.decode().splitlines()[1:]]
    return {int(item): (title, year, genres) for item, title, year, genres in rows}


def movielens_100k_titles(cache_dir: str | os.PathLike[str] | None = None) -> dict[int, str]:
    """Return the title and year of each film, by item id, such as ``"Toy Story (1995)"``."""
    films = movielens_100k_films(cache_dir)
    return {item: f"{title} ({year})" for item, (title, year, _) in films.items()}
