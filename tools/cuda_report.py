"""Prints registers, occupancy and spills of all kernels: `python -m tools.cuda_report [--all]`.

Reads ptxas's output from the newest CUDA build, as stored next to the object files by
tools/keep_ptxas_log.py. --all adds the kernels of CUB, which we do not tune.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc" / "core" / "cuda"

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_KERNEL = re.compile(
    r"SPARSEKIT_KERNEL\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\("
)


def occupancy(registers: int, shared: int, threads: int) -> float:
    """Return the fraction of a multiprocessor's 64 warps that can be resident.

    sm_80, sm_90 and sm_100 have the same limits: 65,536 registers, allocated to each warp in units
    of 256, and 32 blocks. The estimate assumes 100 KiB of shared memory; the system reserves 1 KiB
    of it per block. Dynamic shared memory is not counted: a few KiB, except for the 41 KiB of
    sort_digit_kernel and the 25 KiB or more of scatter_kernel.
    """
    of_warp = -(-registers * 32 // 256) * 256
    warps = threads // 32
    blocks = min(65536 // of_warp // warps, 64 // warps, 32, (100 << 10) // (shared + 1024))
    return blocks * warps / 64


@dataclass(frozen=True)
class Kernel:
    """A kernel as compiled for one set of template arguments and one chip."""

    source: str  # stem of the .cu file
    symbol: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def occupancy(self) -> float:
        """Return the fraction of a multiprocessor's warps that can be resident."""
        return occupancy(self.registers, self.shared, 256)

    @property
    def spills(self) -> bool:
        """Return whether the kernel uses local memory, which is not on the chip."""
        return bool(self.stack or self.spill_stores or self.spill_loads)


def parse(source: str, text: str) -> list[Kernel]:
    """Return the kernels in the output of `ptxas -v` for one source file."""
    kernels = []
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", text)[1:]:
        entry, registers = _ENTRY.search(part), _REGISTERS.search(part)
        frames = [[int(number) for number in found] for found in _FRAME.findall(part)]
        if not (entry and registers and frames):
            raise ValueError(f"{source}: this is no output of ptxas that is understood:\n{part}")
        shared = _SHARED.search(part)
        # Add the frames of functions that were not inlined; ptxas lists them with their kernel.
        stack, stores, loads = (sum(numbers) for numbers in zip(*frames, strict=True))
        kernels.append(
            Kernel(
                source=source,
                symbol=entry[1],
                arch=entry[2],
                registers=int(registers[1]),
                stack=stack,
                spill_stores=stores,
                spill_loads=loads,
                shared=int(shared[1]) if shared else 0,
            )
        )
    return kernels


def newest_build(root: Path = ROOT) -> Path | None:
    """Return the newest build folder with CUDA objects, or None."""
    builds = {log: log.stat().st_mtime for log in root.glob("build/cmake-*/**/*.ptxas")}
    if not builds:
        return None
    return root / Path(*max(builds, key=builds.__getitem__).relative_to(root).parts[:2])


def read(build: Path) -> list[Kernel]:
    """Return the kernels of a build; skip sources that no longer exist."""
    kernels = []
    for log in sorted(build.glob("**/*.cu.o.ptxas")):
        source = log.name.removesuffix(".cu.o.ptxas")
        if (SOURCES / f"{source}.cu").exists():
            kernels += parse(source, log.read_text())
    return kernels


def declared_kernels() -> set[str]:
    """Return the names of all kernels in the sources."""
    files = [*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh")]
    return {name for file in files for name in _KERNEL.findall(file.read_text())}


def demangle(symbols: Iterable[str]) -> dict[str, str]:
    """Return the readable name of each symbol, without our namespaces and without parameters."""
    symbols = list(symbols)
    done = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    return dict(zip(symbols, map(short_name, done.stdout.splitlines()), strict=True))


def short_name(name: str) -> str:
    """Shorten `void sparsekit::cuda::(…)::find_kernel<long>(…)` to `find_kernel<long>`."""
    name = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__\w+::", "", name)
    name = re.sub(r"^void |sparsekit::(cuda::|simt::)?", "", name)
    depth = 0
    for position, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            return name[:position]
    return name


def base_name(short: str) -> str:
    """Shorten `find_kernel<long>` to `find_kernel`."""
    return short.split("<")[0]


def is_ours(short: str) -> bool:
    """Return whether a short name belongs to a kernel of this project; the others are CUB's."""
    return "::" not in base_name(short)


def table(kernels: list[Kernel], all_kernels: bool) -> str:
    """Format a line for each kernel and chip; lines of kernels that spill are marked."""
    names = demangle({kernel.symbol for kernel in kernels})
    lines = [
        f"{'source':<15}{'kernel':<64}{'arch':<8}{'registers':>9}{'occupancy':>11}{'stack':>7}"
        f"{'spill st/ld':>13}{'shared':>8}"
    ]
    for kernel in sorted(kernels, key=lambda k: (k.source, names[k.symbol], k.arch.zfill(8))):
        name = names[kernel.symbol]
        if not (all_kernels or is_ours(name)):
            continue
        name = name if is_ours(name) else f"(CUB) {name}"
        name = name if len(name) < 64 else f"{name[:60]}..."
        spill = f"{kernel.spill_stores}/{kernel.spill_loads}"
        lines.append(
            f"{kernel.source:<15}{name:<64}{kernel.arch:<8}{kernel.registers:>9}"
            f"{kernel.occupancy:>11.0%}{kernel.stack:>7}{spill:>13}{kernel.shared:>8}"
            f"{'  SPILLS' if kernel.spills else ''}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if one of our kernels spills or no build has CUDA."""
    parser = argparse.ArgumentParser(prog="python -m tools.cuda_report", description=__doc__)
    parser.add_argument("--all", action="store_true", help="CUB's kernels as well")
    options = parser.parse_args(arguments)
    build = newest_build()
    if build is None:
        print("There is no build with CUDA here: run `SPARSEKIT_CUDA=1 make build`, with an nvcc.")
        return 1
    kernels = read(build)
    print(f"{build.relative_to(ROOT)}; bytes, shared memory is the static part\n")
    print(table(kernels, options.all))
    names = demangle({kernel.symbol for kernel in kernels})
    ours = [kernel for kernel in kernels if is_ours(names[kernel.symbol])]
    spilling = [kernel for kernel in ours if kernel.spills]
    print(f"\n{len(ours)} kernels, {len(spilling)} with a stack frame or spills")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
