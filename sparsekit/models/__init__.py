"""Models built from sparsekit's layers, and the baselines they are compared with."""

from .baselines import BiasBaseline, fit_bias_baseline, rmse
from .ratings import RatingModel, UserHistory

__all__ = ["BiasBaseline", "RatingModel", "UserHistory", "fit_bias_baseline", "rmse"]
