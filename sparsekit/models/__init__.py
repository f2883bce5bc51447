"""Models built from sparsekit's layers, and the baselines they are compared with."""

from .baselines import BiasBaseline, fit_bias_baseline, rmse
from .buckets import QuantileBuckets
from .deepfm import DeepFM
from .dlrm import DLRM
from .ratings import RatingModel, UserHistory
from .wide import WideModel

__all__ = [
    "DLRM",
    "BiasBaseline",
    "DeepFM",
    "QuantileBuckets",
    "RatingModel",
    "UserHistory",
    "WideModel",
    "fit_bias_baseline",
    "rmse",
]
