"""Looks up keys in several tables with one call, by one of three routes.

    look_up -> begin -> one rank       Local   rows here, vectors, outputs
    (route.py)       -> several ranks  ByKey   distinct keys out, vectors back, pooled here
                                       ByBag   whole bags out, sums back

A route is an object that owns the state of one lookup; its method `outputs` finishes the lookup.
"""

from .plan import LookupPlan, PlanCache, remember
from .route import Asked, Route, begin, finish, look_up, refused

__all__ = [
    "Asked", "LookupPlan", "PlanCache", "Route", "begin", "finish", "look_up", "refused", "remember"
]  # fmt: skip
