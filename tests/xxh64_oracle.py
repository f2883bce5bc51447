"""The codes of values as the rules of `sparsekit.hashing` have them, by the xxhash package."""

import xxhash


def unsigned(value, seed=0):
    """The 64 bits of one value."""
    if value is None:
        data = b""
    elif isinstance(value, bytes):
        data = value
    else:
        data = str(value).encode()
    return xxhash.xxh64_intdigest(data, seed)


def oracle(value, seed=0):
    """The same as int64 has them."""
    code = unsigned(value, seed)
    return code - 2**64 if code >= 2**63 else code
