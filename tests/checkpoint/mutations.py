"""Damages files and values at random: wrong types, sizes, names, nesting or lengths."""

import copy
import os
import random
import string

import pytest

# Number of seeds per test. `make test` tries few; SPARSEKIT_MUTATIONS=2000 takes about a
# minute per test.
COUNT = int(os.environ.get("SPARSEKIT_MUTATIONS", "30"))
time_limit = pytest.mark.time_limit(max(180, 2 * COUNT))
ODD = [
    None, True, -1, 0, 1, 2**31, 2**40, 2**62, 10**30, 0.5, 1e300, "", "0", "../x", "a/b", "\0",
    "é" * 300, "\udc80", "$tensor", "**", [], {}, [[]], [None], {"$tuple": 5}, {"$tensor": "x"},
    {"$scalar": [[], 1]}, {"$float": []}, {"$items": [[{}, 1]]}, {"$tuple": []}, {"": {}},
]  # fmt: skip


def places_in(value, at=()):
    """Yield the path to each value in nested dicts and lists."""
    yield at
    for key, each in value.items() if isinstance(value, dict) else ():
        yield from places_in(each, (*at, key))
    for number, each in enumerate(value) if isinstance(value, list) else ():
        yield from places_in(each, (*at, number))


def mutated(value, chance):
    """Return a copy of a nested value with one random change."""
    value = copy.deepcopy(value)
    *path, last = chance.choice([place for place in places_in(value) if place])
    parent = value
    for key in path:
        parent = parent[key]
    old = parent[last]
    kind = chance.choice(["odd", "odd", "near", "remove", "nest", "twice", "name"])
    if kind == "remove":
        del parent[last]
    elif kind == "near" and type(old) is int:
        parent[last] = old + chance.choice([-1, 1, 7])
    elif kind == "near" and isinstance(old, str) and old:
        parent[last] = old[:-1] + chance.choice(string.ascii_letters)
    elif kind == "nest":
        for _ in range(chance.choice([1, 2, 150])):
            old = chance.choice([[old], {"a": old}, {"$tuple": [old]}])
        parent[last] = old
    elif kind == "twice" and isinstance(parent, list):
        parent.append(old)
    elif kind == "name" and isinstance(parent, dict):
        parent[chance.choice(["x", "keys", "vectors", "", "é", *map(str, parent)])] = old
        parent.pop(last, None)
    else:
        parent[last] = chance.choice(ODD)
    return value


def damaged(content, chance):
    """Return a copy with some bytes changed, added or cut off."""
    content = bytearray(content)
    kind = chance.choice(["flip", "flip", "cut", "add", "number", "zero"])
    at = chance.randrange(len(content)) if content else 0
    if kind == "cut" or not content:
        return bytes(content[:at])
    if kind == "add":
        return bytes(content) + chance.randbytes(chance.randrange(1, 20))
    if kind == "flip":
        content[at] ^= 1 << chance.randrange(8)
    elif kind == "zero":
        content[at : at + 40] = bytes(len(content[at : at + 40]))
    else:
        number = chance.choice([2**31 - 1, 2**32 - 1, 2**62, 2**64 - 1, 1, 0])
        room = content[at : at + 8]
        content[at : at + 8] = number.to_bytes(8, chance.choice(["big", "little"]))[: len(room)]
    return bytes(content)


def seeds():
    """Return a random generator for each seed."""
    return [random.Random(seed) for seed in range(COUNT)]
