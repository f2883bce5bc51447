"""Formats the figures of tables as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .._sizes import size_text
from .histogram import Spread
from .nearest import NEAR
from .table_figures import Some, TableFigures

# `findings` mentions figures above these limits.
_FULL = 0.95
_SKEWED = 1.2
_MANY_DEAD = 0.5


def findings(table: TableFigures) -> list[str]:
    """List what may be wrong with a table, most serious first.

    The findings are: vectors with nan or inf; a rank with more than 95% of its capacity in use,
    unless rows have scores and can therefore be evicted; a rank with more than 1.2 times the mean
    number of rows; more than half of the rows dead; equal vectors.
    """
    found = []
    if bad := table.nan.rows + table.inf.rows:
        keys = [*table.nan.keys, *table.inf.keys]
        found.append(f"{bad:,} vector(s) with nan or inf: {_keys(keys, bad)}")
    fullest = max(table.rows_of_ranks) * len(table.rows_of_ranks) / table.capacity
    if table.hash_table and table.score_kind is None and fullest > _FULL:
        found.append(f"nearly full: the fullest rank has {fullest:.1%} of its capacity in use")
    if table.skew > _SKEWED:
        found.append(f"skewed: the fullest rank has {table.skew:.2f} times the mean of rows")
    if table.dead is not None and table.dead.rows > _MANY_DEAD * table.rows:
        found.append(f"{table.dead.rows / table.rows:.0%} of the rows are dead: never updated")
    if table.alike.equal:
        found.append(_equal(table))
    return found


def lines(tables: Sequence[TableFigures]) -> Iterator[str]:
    """Yield a summary line for each table, then all figures of each table."""
    rows = [("table", "rows", "of", "load", "dead", "zero", "nan, inf", "median norm", "in files")]
    rows += [
        (
            shown(table.name),
            f"{table.rows:,}",
            f"{table.capacity:,}",
            f"{table.load:.1%}",
            "unknown" if table.dead is None else f"{table.dead.rows:,}",
            f"{table.zero.rows:,}",
            f"{table.nan.rows + table.inf.rows:,}",
            "" if table.norms is None else f"{table.norms.quantiles[0.5]:.4g}",
            size_text(sum(part.in_files for part in table.parts.values())),
        )
        for table in tables
    ]
    yield from _aligned(rows)
    for table in tables:
        yield ""
        yield from _of_table(table)


def _of_table(table: TableFigures) -> Iterator[str]:
    kind = "hash table" if table.hash_table else "row numbers"
    yield f"{shown(table.name)}: dim {table.dim}, {table.dtype}, {kind}"
    ranks = ""
    if len(table.rows_of_ranks) > 1:
        of_ranks = " + ".join(f"{rows:,}" for rows in table.rows_of_ranks)
        ranks = f"; {of_ranks} on {len(table.rows_of_ranks)} ranks, skew {table.skew:.2f}"
    yield f"  rows    {table.rows:,} of {table.capacity:,}{ranks}"
    if table.lowest_key is not None:
        yield f"  keys    from {table.lowest_key} to {table.highest_key}{_collisions(table)}"
    yield f"  norms   {_spread(table.norms)}"
    if table.score_kind is not None:
        by = "units of set_clock" if table.clock_by_user else "lookups"
        yield f"  ages    {_spread(table.ages)} ({by}; clock {table.clock:,})"
        what = {"lfu": "LFU: counts before halving", "user": "the user's"}.get(table.score_kind)
        if what is not None:
            yield f"  scores  {_spread(table.scores)} ({what})"
    for name in ("zero", "nan", "inf"):
        some: Some = getattr(table, name)
        if some.rows:
            yield f"  {name:6}  {some.rows:,} vector(s): {_keys(some.keys, some.rows)}"
    if table.dead is None:
        yield f"  dead    unknown: {table.why_unknown}"
    else:
        listed = f": {_keys(table.dead.keys, table.dead.rows)}" if table.dead.rows else ""
        share = table.dead.rows / max(table.rows, 1)
        yield f"  dead    {table.dead.rows:,} row(s) never updated, {share:.1%}{listed}"
    yield f"  alike   {_alike(table)}"
    yield from (
        f"          cosine {cosine:.6f}: {one} and {other}"
        for one, other, cosine in table.alike.pairs
    )
    sizes: list[tuple[str, ...]] = [("  bytes ", "in files", "of rows in use", "reserved")]
    for name, part in table.parts.items():
        memory = ("", "") if part.in_memory is None else tuple(map(size_text, part.in_memory))
        sizes.append((f"    {shown(name)}", size_text(part.in_files), *memory))
    yield from _aligned(sizes)
    yield from (f"  ! {finding}" for finding in findings(table))


def _collisions(table: TableFigures) -> str:
    if table.sharing_ids is not None:
        return f"; if hashes modulo N, {table.sharing_ids:.2%} of the ids share a key"
    if table.colliding_pairs is None:
        return ""
    return f"; if 64-bit hashes, {table.colliding_pairs:.2g} pairs of ids with one key are expected"


def _equal(table: TableFigures) -> str:
    alike = table.alike
    drawn = f" (of {alike.of:,})" if alike.compared < alike.of else ""
    return f"{alike.equal:,} of {alike.compared:,} compared vectors{drawn} are equal to another"


def _alike(table: TableFigures) -> str:
    if table.alike.compared < 2:
        return "no two trained vectors to compare"
    if table.dim == 1:
        return f"{_equal(table)} (dim 1 has no directions)"
    return f"{_equal(table)}, {table.alike.near:,} have a cosine of {NEAR} or more with another"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "none"
    return ", ".join(
        f"{ {0.0: 'lowest', 0.5: 'median', 1.0: 'highest'}.get(at, f'{at:.0%}') } {value:.4g}"
        for at, value in spread.quantiles.items()
    )


def _keys(keys: Sequence[int], rows: int) -> str:
    return ", ".join(map(str, keys)) + ", …" * (rows > len(keys))


def shown(name: str) -> str:
    """Return a name, in quotes if it is not printable, or begins or ends with a space."""
    return name if name.isprintable() and name == name.strip() else repr(name)


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()
