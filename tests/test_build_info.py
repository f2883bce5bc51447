"""sparsekit.build_info(): each entry agrees with another source of the same fact."""

import re
import sys
from pathlib import Path

import sparsekit
from sparsekit import _load


def test_it_says_what_this_build_is():
    info = sparsekit.build_info()
    assert info["version"] == sparsekit.__version__
    assert re.match(r"(GCC|Clang) \d+", info["compiler"])
    assert info["cxx_standard"] == 17
    assert info["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert info["torch_minimum"] == ".".join(map(str, _load.MINIMUM_TORCH))
    # Torch's version has three components, the minimum has two.
    built_with = re.match(r"(\d+)\.(\d+)\.\d+", info["torch_built_with"])
    assert built_with
    assert (int(built_with[1]), int(built_with[2])) >= _load.MINIMUM_TORCH
    assert info["cuda"] is bool(info["cuda_archs"])
    if info["cuda"]:
        assert (Path(sparsekit.__file__).parent / "lib" / "libsparsekit_cuda.so").exists()
    assert info["cpu_engine"] == sparsekit.instruction_set()
