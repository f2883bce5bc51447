"""Thin driver of CMake: configures, builds with ninja, copies the libraries beside the package.

Everything else about the package is in pyproject.toml; what is compiled is in CMakeLists.txt.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
MINIMUM_TORCH = (2, 11)
# The environment's own tools first, also when it is not activated.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def check_tools() -> None:
    """Stop with one message that names everything that is missing and the command that helps."""
    missing = [name for name in ("torch", "pybind11") if importlib.util.find_spec(name) is None]
    missing += [name for name in ("cmake", "ninja") if shutil.which(name, path=PATH) is None]
    if missing:
        raise SystemExit(
            f"sparsekit: the build needs {', '.join(missing)} in the environment of "
            f"{sys.executable}. sparsekit is compiled against the torch that you will use, so the "
            f"build must see it:\n"
            f"    pip install torch 'setuptools>=77' pybind11 cmake ninja\n"
            f"    pip install --no-build-isolation {ROOT}"
        )
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
        raise SystemExit(f"sparsekit: the build needs torch >= 2.11, found {torch.__version__}")


def cuda_options() -> dict[str, str]:
    """Whether CUDA kernels are compiled in, and for which chips.

    They are if this machine has a GPU and an nvcc, for that GPU. Without a GPU they must be asked
    for, as they take many times as long as the rest: by SPARSEKIT_CUDA=1, or by the names of chips
    in SPARSEKIT_CUDA_ARCHS, such as "sm_90" or "sm_80;sm_90"; three generations if none are named.
    SPARSEKIT_CUDA=0 leaves them out.
    """
    wanted = os.environ.get("SPARSEKIT_CUDA", "")
    archs = os.environ.get("SPARSEKIT_CUDA_ARCHS", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"sparsekit: SPARSEKIT_CUDA must be 0 or 1, got {wanted!r}")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = os.pathsep.join([PATH, *(f"{home}/bin" for home in homes if home)])
    nvcc = shutil.which("nvcc", path=places)
    asked = bool(wanted or archs)
    if wanted == "0" or not (asked or (nvcc and has_gpu())):
        if nvcc and not asked:
            print(
                "sparsekit: no CUDA kernels, as this machine has no GPU; SPARSEKIT_CUDA=1 builds "
                "them all the same"
            )
        return {"SPARSEKIT_CUDA": "OFF", "SPARSEKIT_CUDA_ARCHS": "", "SPARSEKIT_NCCL_INCLUDE": ""}
    if not nvcc:
        name = "SPARSEKIT_CUDA=1" if wanted else f"SPARSEKIT_CUDA_ARCHS={archs}"
        raise SystemExit(f"sparsekit: {name}, but no nvcc in PATH, CUDA_HOME or /usr/local/cuda")
    archs = archs or present_archs() or "sm_80;sm_90;sm_100"
    print(f"sparsekit: with CUDA kernels for {archs}; SPARSEKIT_CUDA=0 leaves them out")
    return {
        "SPARSEKIT_CUDA": "ON",
        "SPARSEKIT_CUDA_ARCHS": archs.replace(",", ";").replace(" ", ";"),
        "CMAKE_CUDA_COMPILER": nvcc,
        "SPARSEKIT_NCCL_INCLUDE": nccl_include(),
    }


def nccl_include() -> str:
    """The folder of nccl.h, or nothing; without it the native exchange is left out.

    Torches with CUDA bring one. SPARSEKIT_NCCL_INCLUDE names another, SPARSEKIT_NCCL=0 leaves the
    native exchange out.
    """
    if os.environ.get("SPARSEKIT_NCCL") == "0":
        return ""
    named = os.environ.get("SPARSEKIT_NCCL_INCLUDE")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", "/usr"]
    places = [Path(path) / "nvidia/nccl/include" for path in sys.path]
    places += [Path(home) / "include" for home in homes if home]
    places = [Path(named)] if named else places
    for place in places:
        if (place / "nccl.h").exists():
            return str(place.resolve())
    if named:
        raise SystemExit(f"sparsekit: SPARSEKIT_NCCL_INCLUDE={named}, but there is no nccl.h")
    return ""


def present_archs() -> str:
    """Chips of the GPUs in this machine, such as "sm_90", or nothing."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ";".join(sorted({"sm_" + capability.replace(".", "") for capability in found}))


def has_gpu() -> bool:
    """Whether the driver shows a GPU; containers may have one without nvidia-smi."""
    return bool(present_archs()) or any(Path("/dev").glob("nvidia[0-9]*"))


class CMakeBuild(build_ext):
    """Builds every library with one CMake project; `Extension`s only name what comes out."""

    def with_host_runner(self) -> bool:
        """Whether the CUDA kernels are compiled for the host as well, as the tests need them.

        SPARSEKIT_SIMT=0 leaves that out of a build in place; a wheel has it never.
        """
        return bool(self.inplace) and os.environ.get("SPARSEKIT_SIMT") != "0"

    def run(self) -> None:
        """Configure, build, and put the results where setuptools expects them."""
        check_tools()
        import pybind11
        import torch

        # CMake remembers where it was and which tools it found: another place or environment
        # gets a folder of its own.
        place = hashlib.sha256(f"{ROOT} {sys.executable}".encode()).hexdigest()[:8]
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}-{place}"
        build.mkdir(parents=True, exist_ok=True)
        options = {
            "CMAKE_BUILD_TYPE": os.environ.get("SPARSEKIT_BUILD_TYPE", "Release"),
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "SPARSEKIT_TORCH_DIR": str(Path(torch.__file__).parent),
            "SPARSEKIT_TORCH_VERSION": torch.__version__,
            "SPARSEKIT_SIMT": "ON" if self.with_host_runner() else "OFF",
            **cuda_options(),
        }
        target = ROOT if self.inplace else Path(self.build_lib)
        defines = [f"-D{name}={value}" for name, value in options.items()]
        configure = ["cmake", "--log-level=WARNING", "-G", "Ninja", f"-S{ROOT}", f"-B{build}"]
        for command in ([*configure, *defines], ["cmake", "--build", str(build)]):
            if subprocess.run(command, env={**os.environ, "PATH": PATH}).returncode != 0:
                raise SystemExit("sparsekit: CMake failed; its output is above")
        # An earlier build may have had what this one leaves out.
        left_out = ["libsparsekit_cuda.so"] * (options["SPARSEKIT_CUDA"] == "OFF")
        left_out += ["simt/libsparsekit_simt.so"] * (not self.with_host_runner())
        for name in left_out:
            for folder in (build, target):
                (folder / "sparsekit" / "lib" / name).unlink(missing_ok=True)
        for library in (build / "sparsekit").rglob("*"):
            if library.is_dir() or (library.parent.name == "simt" and not self.with_host_runner()):
                continue
            destination = target / library.relative_to(build)
            destination.parent.mkdir(parents=True, exist_ok=True)
            # A new file, not new bytes in the old one: a running process has that one mapped.
            destination.unlink(missing_ok=True)
            self.copy_file(str(library), str(destination))


setup(ext_modules=[Extension("sparsekit._pybind", [])], cmdclass={"build_ext": CMakeBuild})
