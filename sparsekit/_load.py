"""Loads the compiled libraries, or raises one error that explains why they cannot be loaded.

The order matters. There is one engine per instruction set, and all engines have the same library
name, ``libsparsekit_core.so``. The engine for this machine is loaded first. The dynamic linker
then uses it for ``libsparsekit_torch.so``, which depends on that name.
"""

import ctypes
import functools
import re
import warnings
from pathlib import Path

import torch

MINIMUM_TORCH = (2, 11)
_LIB = Path(__file__).parent / "lib"
_OPS = "libsparsekit_torch.so"
OPS_LIBRARY = _LIB / _OPS
_CUDA = "libsparsekit_cuda.so"
_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps /path/to/sparsekit"
# Instruction sets that each engine needs, by their Linux names, best engine first. CMakeLists.txt
# compiles the engines with the same sets.
_AVX2 = frozenset({"avx2", "bmi1", "bmi2"})
ENGINES = {"avx512": _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "avx2": _AVX2}


def _torch_version() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def processor_flags() -> frozenset[str]:
    """Return the CPU flags that the operating system reports; empty if it reports none."""
    try:
        with open("/proc/cpuinfo") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(flags.split())


def instruction_set() -> str:
    """Return the engine that fits this machine: ``"avx512"``, ``"avx2"`` or ``"generic"``.

    The engine must match torch's setting, so that ``ATEN_CPU_CAPABILITY=default`` also selects our
    portable engine. It must also run on this processor, which torch does not check.
    """
    names = list(ENGINES)
    wanted = torch.backends.cpu.get_cpu_capability().lower()
    wanted_or_less = names[names.index(wanted) :] if wanted in names else []
    flags = processor_flags() if wanted_or_less else frozenset()
    fitting = (name for name in wanted_or_less if ENGINES[name] <= flags)
    return next((name for name in fitting if (_LIB / name).is_dir()), "generic")


def _warn_of_less(engine: str) -> None:
    """Warn if the processor lacks instruction sets that torch is set to use."""
    wanted = torch.backends.cpu.get_cpu_capability().lower()
    if missing := ENGINES.get(wanted, frozenset()) - processor_flags():
        warnings.warn(
            f"sparsekit: torch is set to {wanted} (ATEN_CPU_CAPABILITY), but this processor has no "
            f"{', '.join(sorted(missing))}; running the {engine} engine",
            RuntimeWarning,
            stacklevel=3,
        )


def _other_copy() -> str | None:
    """Return the path of the ops library of another copy of sparsekit, if one is loaded."""
    ours = str(_LIB / _OPS)
    paths = [p for p in torch.ops.loaded_libraries if Path(p).name == _OPS and p != ours]
    return paths[0] if paths else None


def load() -> None:
    """Make ``torch.ops.sparsekit`` available.

    Raises:
        ImportError: torch is too old, the libraries were not built or do not load, or another copy
            of sparsekit has been imported before.
    """
    minimum = ".".join(map(str, MINIMUM_TORCH))
    if _torch_version() < MINIMUM_TORCH:
        raise ImportError(
            f"sparsekit is built for torch >= {minimum}, but found torch {torch.__version__}. "
            f"Upgrade it: pip install 'torch>={minimum}'"
        )
    if other := _other_copy():
        raise ImportError(
            f"sparsekit: this process has already loaded another copy of its ops, {other}, and can "
            f"have only one; this one is in {_LIB.parent}"
        )
    engine = instruction_set()
    _warn_of_less(engine)
    core = _LIB / engine / "libsparsekit_core.so"
    ops = _LIB / _OPS
    # Load the CUDA kernels if the build has them. This works even without a GPU or driver.
    cuda = [_LIB / _CUDA] if (_LIB / _CUDA).exists() else []
    for library in (core, ops, *cuda):
        if not library.exists():
            raise ImportError(
                f"sparsekit's compiled library {library} does not exist. In a source tree run "
                f"`make build`; otherwise reinstall: {_REBUILD}"
            )
        try:
            if library is core:
                ctypes.CDLL(str(core))
            else:
                torch.ops.load_library(str(library))
        except OSError as error:
            raise ImportError(
                f"sparsekit's compiled library {library} does not load under torch "
                f"{torch.__version__} (built for torch >= {minimum}): {error}. "
                f"Rebuild it here: {_REBUILD}"
            ) from error


class checked:
    """A switch for immediate checks of values in CUDA memory.

    Checks are off by default. A row or offset out of range then reads as zeros, and nothing is
    written there. The error is raised by a later call: by one of the next 8 lookups, by an op that
    waits for the device anyway, such as `ops.unique`, or by `raise_errors`. With checks on, every
    op waits for the device, and the call itself raises an error that names the position and the
    value. The environment variable ``SPARSEKIT_CHECKED=1`` turns checks on from the start. On the
    CPU, values are always checked.

    The switch takes effect immediately. Used as a context manager, it is undone at the end of the
    block::

        with sparsekit.checked():
            step(batch)

    Args:
        on: whether to check.
    """

    def __init__(self, on: bool = True) -> None:
        self._before = _set_checked(on)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        _set_checked(self._before)


def _set_checked(on: bool) -> bool:
    if not (_LIB / _CUDA).exists():
        return True  # without CUDA, only the CPU's checks exist, and they are always on
    return bool(device_library().sparsekit_set_checked(int(on)))


@functools.cache
def device_library() -> ctypes.CDLL:
    """Return the library of CUDA kernels, to call functions in it that are not torch ops."""
    library = ctypes.CDLL(str(_LIB / _CUDA))
    library.sparsekit_num_errors.restype = ctypes.c_int64
    library.sparsekit_reported_error.restype = ctypes.c_char_p
    return library
