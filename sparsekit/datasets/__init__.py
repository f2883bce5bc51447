"""Data sets for training: downloaded once into a cache, or read from a file of your own."""

from .adult import Adult, adult, read_adult
from .fetch import DatasetUnavailableError
from .films import movielens_100k_titles
from .ratings import Ratings, RatingsFormatError, movielens_100k, read_ratings

__all__ = [
    "Adult",
    "DatasetUnavailableError",
    "Ratings",
    "RatingsFormatError",
    "adult",
    "movielens_100k",
    "movielens_100k_titles",
    "read_adult",
    "read_ratings",
]
