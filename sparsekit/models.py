"""Models built from sparsekit's layers, and baselines to compare them with."""

from .recipes.autoencoder.dense_model import DenseAutoencoder
from .recipes.autoencoder.model import Autoencoder
from .recipes.autoencoder.rated_items import RatedItems
from .recipes.autoencoder.recommendations import (
    Recommendations,
    load_recommender,
    popular,
    recommend,
)
from .recipes.buckets import QuantileBuckets
from .recipes.clicks.deepfm import DeepFM
from .recipes.clicks.dlrm import DLRM
from .recipes.deepconn.model import DeepCoNN
from .recipes.ratings.baselines import BiasBaseline, fit_bias_baseline, rmse
from .recipes.ratings.model import RatingModel, UserHistory
from .recipes.wide.model import WideModel

__all__ = [
    "DLRM",
    "Autoencoder",
    "BiasBaseline",
    "DeepCoNN",
    "DeepFM",
    "DenseAutoencoder",
    "QuantileBuckets",
    "RatedItems",
    "RatingModel",
    "Recommendations",
    "UserHistory",
    "WideModel",
    "fit_bias_baseline",
    "load_recommender",
    "popular",
    "recommend",
    "rmse",
]
