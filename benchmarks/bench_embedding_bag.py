"""embedding_bag forward against F.embedding_bag."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import sparsekit

from .common import Result, compare


def run(quick: bool) -> Iterator[Result]:
    """Bags of 2 and of 20 uniform rows of a large table."""
    num_rows, n = (1_000, 400) if quick else (1_000_000, 400_000)
    generator = torch.Generator().manual_seed(0)
    for dim in (16,) if quick else (16, 64, 256):
        weight = torch.randn(num_rows, dim, generator=generator)
        rows = torch.randint(0, num_rows, (n,), generator=generator)
        for per_bag in (2, 20):
            offsets = torch.arange(0, n + 1, per_bag)

            def ours(
                w: torch.Tensor = weight, r: torch.Tensor = rows, o: torch.Tensor = offsets
            ) -> torch.Tensor:
                return sparsekit.ops.embedding_bag(w, r, o)

            def theirs(
                w: torch.Tensor = weight, r: torch.Tensor = rows, o: torch.Tensor = offsets
            ) -> torch.Tensor:
                return F.embedding_bag(r, w, o, mode="sum", include_last_offset=True)

            torch.testing.assert_close(ours(), theirs(), rtol=1e-4, atol=1e-4)
            yield compare(f"bags of {per_bag}, {n:,} rows x {dim}", ours, "F.embedding_bag", theirs)
