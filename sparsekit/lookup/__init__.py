"""Looks up keys in several tables with one call, via one of three routes.

    look_up -> begin -> one rank       Local   find rows and pool vectors
    (route.py)       -> several ranks  ByKey   send distinct keys, pool the vectors received
                                       ByBag   send whole bags, add up the sums received

A route object holds the state of one lookup; its method `outputs` finishes the lookup.
"""

from .descriptors import remember
from .plan import LookupPlan, PlanCache
from .route import Asked, Route, begin, finish, look_up, refused

__all__ = [
    "Asked", "LookupPlan", "PlanCache", "Route", "begin", "finish", "look_up", "refused", "remember"
]  # fmt: skip
