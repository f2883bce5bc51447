"""A lookup: what several tables are asked in one call, by one of three routes.

    look_up -> begin -> one rank       Local   rows here, vectors, outputs
    (choose.py)      -> several ranks  ByKey   distinct keys out, vectors back, pooled here
                                       ByBag   whole bags out, sums back

A route is an object that owns the state of one call: it is begun, then asked for its outputs.
"""

from .choose import Route, begin, finish, look_up
from .tables import Kept, Tables, keep

__all__ = ["Kept", "Route", "Tables", "begin", "finish", "keep", "look_up"]
