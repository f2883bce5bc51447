"""Predicts the hit rates of tables by size, to decide how many rows to give them."""

from .curve import CapacityCurve, Curve, Point
from .policy import Policy

__all__ = ["CapacityCurve", "Curve", "Point", "Policy"]
