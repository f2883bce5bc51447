"""Optimizers for sparse rows, and functions to clip, check and split parameters."""

from .adagrad import Adagrad, RowWiseAdagrad
from .adam import Adam
from .clip import clip_grad_norm_, clip_grad_value_
from .finite import NonFiniteGradientError, check_finite_gradients
from .ftrl import Ftrl
from .fuse import fuse_in_backward
from .lazy_adam import LazyAdam
from .rms_prop import RMSProp
from .row_adam import LazyLAMB, PartialRowWiseAdam
from .row_optimizer import RowOptimizer
from .sgd import SGD
from .split import split_embedding_variable_from_others

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Ftrl",
    "LazyAdam",
    "LazyLAMB",
    "NonFiniteGradientError",
    "PartialRowWiseAdam",
    "RMSProp",
    "RowOptimizer",
    "RowWiseAdagrad",
    "check_finite_gradients",
    "clip_grad_norm_",
    "clip_grad_value_",
    "fuse_in_backward",
    "split_embedding_variable_from_others",
]
