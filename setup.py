"""Thin driver of CMake: configures, builds with ninja, copies the libraries beside the package.

Everything else about the package is in pyproject.toml; what is compiled is in CMakeLists.txt.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
NEED_TORCH = """\
sparsekit is compiled against the torch you will use, so torch (>= 2.11) must be installed first and
the build must be able to see it:
    pip install torch
    pip install --no-build-isolation {what}"""


class CMakeBuild(build_ext):
    """Builds every library with one CMake project; `Extension`s only name what comes out."""

    def run(self) -> None:
        """Configure, build, and put the results where setuptools expects them."""
        try:
            import pybind11
            import torch
        except ImportError as error:
            raise SystemExit(f"{error}.\n{NEED_TORCH.format(what=ROOT)}") from error
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
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
        subprocess.run([*configure, *defines], check=True)
        subprocess.run(["cmake", "--build", build], check=True)
        target = ROOT if self.inplace else Path(self.build_lib)
        for library in (build / "sparsekit").rglob("*.so"):
            destination = target / library.relative_to(build)
            destination.parent.mkdir(parents=True, exist_ok=True)
            # A new file, not new bytes in the old one: a running process has that one mapped.
            destination.unlink(missing_ok=True)
            self.copy_file(str(library), str(destination))


setup(ext_modules=[Extension("sparsekit._pybind", [])], cmdclass={"build_ext": CMakeBuild})
