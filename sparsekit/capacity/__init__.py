"""Predicts the hit rates of tables by size, to decide how many rows to give them."""

from .curve import CapacityCurve, Curve, Point
from .divide import Allotment, bytes_per_row, divide
from .layers import LayerCurves
from .measure import measured
from .policy import Policy

__all__ = [
    "Allotment",
    "CapacityCurve",
    "Curve",
    "LayerCurves",
    "Point",
    "Policy",
    "bytes_per_row",
    "divide",
    "measured",
]
