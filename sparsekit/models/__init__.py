"""Models built from sparsekit's layers, and the baselines they are compared with."""

from .baselines import BiasBaseline, fit_bias_baseline, rmse
from .buckets import QuantileBuckets
from .ratings import RatingModel, UserHistory
from .wide import WideModel

__all__ = [
    "BiasBaseline",
    "QuantileBuckets",
    "RatingModel",
    "UserHistory",
    "WideModel",
    "fit_bias_baseline",
    "rmse",
]
