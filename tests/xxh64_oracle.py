"""Hashes values by the rules of `sparsekit.hashing`, with the xxhash package."""

import xxhash


def unsigned(value, seed=0):
    """Return the unsigned 64-bit hash of a value."""
    if value is None:
        data = b""
    elif isinstance(value, bytes):
        data = value
    else:
        data = str(value).encode()
    return xxhash.xxh64_intdigest(data, seed)


def oracle(value, seed=0):
    """Return the same hash as int64."""
    code = unsigned(value, seed)
    return code - 2**64 if code >= 2**63 else code
