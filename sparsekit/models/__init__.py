"""Models built from sparsekit's layers, and the baselines they are compared with."""

from .autoencoder import Autoencoder
from .baselines import BiasBaseline, fit_bias_baseline, rmse
from .buckets import QuantileBuckets
from .deepconn import DeepCoNN
from .deepfm import DeepFM
from .dense_autoencoder import DenseAutoencoder
from .dlrm import DLRM
from .rated_items import RatedItems
from .ratings import RatingModel, UserHistory
from .recommendations import Recommendations, load_recommender, popular, recommend
from .wide import WideModel

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
