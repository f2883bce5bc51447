"""The cases of gpu_check_ops launch every kernel, so a sanitizer on a GPU sees all kernels."""

import contextlib
import re
from pathlib import Path

import gpu_check_ops
import torch
from simt_counts import counted

KERNELS = Path(__file__).parents[1] / "csrc" / "core" / "cuda"
CPU = torch.device("cpu")


def launched_in_sources():
    """Return the names that the sources pass to `launch`, such as "embedding_bag: parts"."""
    text = "".join(path.read_text() for path in KERNELS.glob("*.cu*"))
    return set(re.findall(r'launch\(\s*"([^"]+)"', text))


def test_every_kernel_is_launched():
    mode = contextlib.nullcontext  # counted() runs the ops on the host runner
    keys = torch.randint(-(2**62), 2**62, (257,), generator=torch.Generator().manual_seed(0))
    with counted() as counts:
        gpu_check_ops.check_keys(CPU, mode, keys)
        gpu_check_ops.check_rows(CPU, mode, 300, 16, torch.float32)
        for seed in range(6):
            gpu_check_ops.check_groups(CPU, mode, seed, torch.float32)
    launched = {name for _, name in counts if name}
    assert launched_in_sources() - launched == set()
