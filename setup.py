"""Builds the libraries with CMake and ninja, and copies them into the package.

All other settings of the package are in pyproject.toml. CMakeLists.txt lists the sources.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
MINIMUM_TORCH = (2, 11)
# Search the Python environment's tools first, even if the environment is not activated.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def check_tools() -> None:
    """Exit if tools are missing, with a message that lists them and how to install them."""
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
    """Return the CMake options for CUDA kernels: whether to compile them, and for which chips.

    If this machine has a GPU and an nvcc, the kernels are compiled for that GPU. Without a GPU,
    they are compiled only on request, since that takes many times as long as the rest of the build.
    SPARSEKIT_CUDA=1 compiles them for three generations of GPUs. SPARSEKIT_CUDA_ARCHS selects the
    chips, such as "sm_90" or "sm_80;sm_90". SPARSEKIT_CUDA=0 leaves the kernels out.
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
    warn_of_newer_cuda(nvcc)
    return {
        "SPARSEKIT_CUDA": "ON",
        "SPARSEKIT_CUDA_ARCHS": archs.replace(",", ";").replace(" ", ";"),
        "CMAKE_CUDA_COMPILER": nvcc,
        "SPARSEKIT_NCCL_INCLUDE": nccl_include(),
    }


def warn_of_newer_cuda(nvcc: str) -> None:
    """Print a warning if nvcc's CUDA has a higher major version than torch's.

    In that case the kernels need a newer driver than torch, and may fail at their first launch.
    """
    import torch

    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return  # CMake will report the problem
    found = re.search(r"release (\d+)\.\d+", said)
    of_torch = torch.version.cuda
    if found and of_torch and int(found[1]) > int(of_torch.split(".")[0]):
        print(
            f"sparsekit: {nvcc} is of CUDA {found[1]}, torch of CUDA {of_torch}: the kernels need "
            f"a driver for CUDA {found[1]}, which torch does not; set CUDA_HOME to a CUDA "
            f"{of_torch.split('.')[0]} to avoid that"
        )


def nccl_include() -> str:
    """Return the folder of nccl.h; "" leaves the native exchange out of the build.

    Builds of torch with CUDA contain an nccl.h. SPARSEKIT_NCCL_INCLUDE selects another folder.
    SPARSEKIT_NCCL=0 leaves the native exchange out.
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
    """Return the chips of the GPUs in this machine, such as "sm_90", or ""."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ";".join(sorted({"sm_" + capability.replace(".", "") for capability in found}))


def has_gpu() -> bool:
    """Return whether the driver reports a GPU, even in a container without nvidia-smi."""
    return bool(present_archs()) or any(Path("/dev").glob("nvidia[0-9]*"))


class CMakeBuild(build_ext):
    """Command that builds all libraries as one CMake project; `Extension`s only list the files."""

    def with_host_runner(self) -> bool:
        """Return whether to also compile the CUDA kernels for the CPU, as the tests require.

        In-place builds contain them unless SPARSEKIT_SIMT=0 is set; wheels never do.
        """
        return bool(self.inplace) and os.environ.get("SPARSEKIT_SIMT") != "0"

    def run(self) -> None:
        """Configure, build, and copy the libraries to the paths that setuptools expects."""
        check_tools()
        import pybind11
        import torch

        # CMake caches the paths of its folder and tools, so use a separate build folder for each
        # clone and Python environment.
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
        # An earlier build may have left libraries that this build does not produce.
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
            # Create a new file. Overwriting the old one would crash processes that have mapped
            # it.
            destination.unlink(missing_ok=True)
            self.copy_file(str(library), str(destination))


setup(ext_modules=[Extension("sparsekit._pybind", [])], cmdclass={"build_ext": CMakeBuild})
