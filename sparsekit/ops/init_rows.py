"""Writes initial vectors to embedding rows."""

import torch

from ._checks import ROW_DTYPES, signed_64
from ._op import Of, Op

DISTRIBUTIONS = {"constant": 0, "uniform": 1, "normal": 2}

_init = Op("init_rows_", {"out": Of(ROW_DTYPES, 2), "keys": Of((torch.int64,), 1)})


def init_rows_(
    out: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
    *,
    seed: int = 0,
    distribution: str = "uniform",
    a: float = -0.05,
    b: float = 0.05,
) -> None:
    """Write the initial vectors of keys to ``out[rows]``, in place.

    A value depends only on (seed, key, column): it is a draw of Philox4x32-10 (Salmon et al., SC
    2011) with the seed as key and (key, column // 4) as counter. It is computed in float32 and
    rounded to the dtype of out, so every dtype starts from the same numbers.

    Args:
        out: float32, float64 or bfloat16 ``[num_rows, dim]``, contiguous.
        keys: int64 ``[n]``.
        rows: int64 ``[n]``, the row to write each vector to; None means row i for key i.
        status: the status of `hash_table_find_or_insert_`; rows below ``status[0]`` are left
            unchanged, so only new rows are written. None writes all rows that are not negative.
        seed: any 64-bit integer, signed or unsigned.
        distribution: ``"constant"`` (a), ``"uniform"`` (in [a, b), before rounding to the dtype of
            out) or ``"normal"`` (mean a, standard deviation b).
        a: first parameter of the distribution.
        b: second parameter of the distribution.

    Raises:
        TypeError: out has a wrong dtype.
        ValueError: a wrong shape or distribution, a mix of devices, or out shares memory with
            another argument.
        IndexError: a row >= num_rows; the message gives its position.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(
            f"init_rows_: distribution must be one of {list(DISTRIBUTIONS)}, got {distribution!r}"
        )
    _init(out, keys, rows, status, signed_64(seed), DISTRIBUTIONS[distribution], a, b)
    torch.autograd.graph.increment_version(out)


@_init.fake
def _() -> None:
    return None
