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


class CMakeBuild(build_ext):
    """Builds every library with one CMake project; `Extension`s only name what comes out."""

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
        }
        defines = [f"-D{name}={value}" for name, value in options.items()]
        configure = ["cmake", "--log-level=WARNING", "-G", "Ninja", f"-S{ROOT}", f"-B{build}"]
        for command in ([*configure, *defines], ["cmake", "--build", str(build)]):
            if subprocess.run(command, env={**os.environ, "PATH": PATH}).returncode != 0:
                raise SystemExit("sparsekit: CMake failed; its output is above")
        target = ROOT if self.inplace else Path(self.build_lib)
        for library in (build / "sparsekit").rglob("*.so"):
            destination = target / library.relative_to(build)
            destination.parent.mkdir(parents=True, exist_ok=True)
            # A new file, not new bytes in the old one: a running process has that one mapped.
            destination.unlink(missing_ok=True)
            self.copy_file(str(library), str(destination))


setup(ext_modules=[Extension("sparsekit._pybind", [])], cmdclass={"build_ext": CMakeBuild})
