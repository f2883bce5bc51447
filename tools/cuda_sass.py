"""Counts the memory instructions of each kernel: `python -m tools.cuda_sass [NAME ...]`.

Counts loads and stores of global memory by width, atomics, shuffles, votes, barriers and accesses
to local memory, for one chip. It counts instructions in the code, not executions: an unrolled loop
contains its loads several times. NAME selects kernels whose names contain NAME.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

from .cuda_report import ROOT, base_name, demangle, is_ours

LIBRARY = ROOT / "sparsekit" / "lib" / "libsparsekit_cuda.so"
TOOLS = ("cuobjdump", "nvdisasm")  # nvdisasm is called by cuobjdump

_FUNCTION = re.compile(r"^\s*Function : (\w+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
# Kinds of instructions to list, in this order: the first parts of their names.
_KINDS = (
    "LDG", "LD", "STG", "ST", "LDL", "STL", "ATOMG", "ATOM", "REDG", "RED", "ATOMS", "LDS", "STS",
    "SHFL", "MATCH", "VOTE", "VOTEU", "REDUX", "BAR", "MEMBAR",
)  # fmt: skip
# Local memory: spilled registers, and arrays that are not kept in registers.
_LOCAL = ("LDL", "STL")
# Parts of an instruction's name to omit because they do not tell its width or scope, such as E,
# which stands for extended addresses.
_DROPPED = {"E", "SYNC", "DEFER_BLOCKING", "FTZ", "RN", "STRONG", "IDX"}


def find_tools() -> dict[str, str]:
    """Return the paths of the disassemblers, from PATH or from the wheels in this environment."""
    wheels = Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin")
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, wheels)])
    found = {tool: shutil.which(tool, path=path) for tool in TOOLS}
    missing = [tool for tool, place in found.items() if place is None]
    if missing:
        raise SystemExit(
            f"{' and '.join(missing)} not found. They come with the CUDA toolkit, or with\n"
            f"    {sys.executable} -m pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    return {tool: str(place) for tool, place in found.items()}


def disassemble(library: Path, arch: str) -> str:
    """Return the machine code of a library for one chip as text."""
    tools = find_tools()
    path = os.pathsep.join([str(Path(tools["nvdisasm"]).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [tools["cuobjdump"], "-sass", "-arch", arch, str(library)],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
    )
    if done.returncode != 0:
        raise SystemExit(f"cuobjdump: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def simplify(instruction: str) -> str:
    """Shorten `LDG.E.128.CONSTANT` to `LDG.128.CONSTANT`."""
    first, *rest = instruction.split(".")
    return ".".join([first, *(part for part in rest if part not in _DROPPED)])


def count(text: str) -> dict[str, Counter[str]]:
    """Return the number of instructions of each listed kind, by symbol."""
    parts = _FUNCTION.split(text)[1:]
    counts: dict[str, Counter[str]] = {}
    for symbol, code in zip(parts[::2], parts[1::2], strict=True):
        found = Counter(map(simplify, _INSTRUCTION.findall(code)))
        counts[symbol] = Counter(
            {name: n for name, n in found.items() if name.split(".")[0] in _KINDS}
        )
    return counts


def uses_local_memory(counts: Counter[str]) -> bool:
    """Return whether any instruction loads or stores local memory."""
    return any(name.split(".")[0] in _LOCAL for name in counts)


def describe(counts: Counter[str]) -> str:
    """Format counts as `4 LDG.128, 1 STG.64, ...`, in the order of `_KINDS`."""
    order = sorted(counts, key=lambda name: (_KINDS.index(name.split(".")[0]), name))
    return ", ".join(f"{counts[name]} {name}" for name in order)


def main(arguments: list[str] | None = None) -> int:
    """Print the counts; return 1 if one of our kernels uses local memory."""
    parser = argparse.ArgumentParser(prog="python -m tools.cuda_sass", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a kernel's name")
    parser.add_argument("--arch", default="sm_90", help="one that the library is built for")
    parser.add_argument("--library", type=Path, default=LIBRARY)
    options = parser.parse_args(arguments)
    if not options.library.exists():
        print(f"{options.library} does not exist: run `SPARSEKIT_CUDA=1 make build`, with an nvcc.")
        return 1
    counts = count(disassemble(options.library, options.arch))
    if not counts:
        print(f"{options.library.name} has no machine code for {options.arch}.")
        return 1
    names = {symbol: name for symbol, name in demangle(counts).items() if is_ours(name)}
    # Print one copy of each kernel in a header: every source that includes the header has a copy.
    seen = set()
    local = 0
    for symbol, name in sorted(names.items(), key=lambda item: item[1]):
        line = describe(counts[symbol])
        wanted = not options.names or any(part in base_name(name) for part in options.names)
        if not wanted or (name, line) in seen:
            continue
        seen.add((name, line))
        local += uses_local_memory(counts[symbol])
        mark = "  LOCAL MEMORY" if uses_local_memory(counts[symbol]) else ""
        print(f"{name}{mark}\n    {line}")
    print(f"\n{options.arch}: {len(seen)} kernels, {local} with local memory")
    return 1 if local else 0


if __name__ == "__main__":
    sys.exit(main())
