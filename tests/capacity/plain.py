"""Hit rates in plain Python, and streams of keys."""

import numpy as np
import torch
from lifecycle.model import tie


def aged(row, now, halve_every):
    """Return the count of a row [count, last lookup], as it is now."""
    count, then = row
    return count >> (now // halve_every - then // halve_every if halve_every else 0)


def hit_rate(lookups, rows=None, *, score="lru", admission=1, ttl=None, halve_every=0):
    """Look keys up one by one in a dict, with sweeps down to 99% of the rows."""
    held, waiting, found, asked, swept = {}, {}, 0, 0, None
    for now, keys in enumerate(lookups, 1):
        times = {}
        for key in keys:
            times[key] = times.get(key, 0) + 1
        if ttl is not None and swept != now // max(1, ttl // 16):
            every = max(1, ttl // 16)
            swept = now // every
            oldest = now - now % every - ttl
            held = {k: row for k, row in held.items() if k in times or row[1] >= oldest}
        new = {}
        for key, count in times.items():
            asked += 1
            if key in held:
                found += 1
                continue
            waiting[key] = waiting.get(key, 0) + count
            if waiting[key] >= admission:
                new[key] = [waiting.pop(key), now]
        if rows is not None and len(held) + len(new) > rows:
            left = max(0, min(round(0.99 * rows), rows - len(new)))
            orders = {
                key: (row[1] if score == "lru" else aged(row, now, halve_every), tie(key))
                for key, row in held.items()
                if key not in times
            }
            loose = sorted(orders, key=orders.get)
            for key in loose[: len(held) - left]:
                del held[key]
        for key, count in times.items():
            if key in held:
                held[key] = [aged(held[key], now, halve_every) + count, now]
        held |= new
    return found / asked


def zipf(ids, batch, steps, drift, seed=0, exponent=1.05):
    """Return lookups of keys by a zipf law; the popular ones shift by `drift` in each."""
    rng = np.random.default_rng(seed)
    return [
        torch.from_numpy(
            (((ids ** (1 - exponent) - 1) * rng.random(batch) + 1) ** (1 / (1 - exponent))).astype(
                np.int64
            )
            + int(drift * step)
        )
        for step in range(steps)
    ]
