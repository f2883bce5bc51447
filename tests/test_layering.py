"""Only csrc/torch_ops includes torch, and every op has a file in every layer."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {".h", ".hpp", ".cpp", ".cu", ".cuh", ".c", ".inl"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include\w*[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
NAMESPACE = re.compile(r"\b(?:torch|at|c10|pybind11)::")
TORCH = ("torch/", "ATen/", "c10/", "caffe2/")
PYTHON = ("pybind11/", "Python.h")
STABLE = ("torch/csrc/stable/", "torch/headeronly/")


def violations(csrc):
    """Return a line "file: reason" for each violation below csrc."""
    found = []
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in SOURCES:
            continue
        layer, text = path.relative_to(csrc).parts[0], path.read_text()
        for header in INCLUDE.findall(text):
            wrong = (
                ".." in Path(header).parts
                or (header.startswith(TORCH) and layer != "torch_ops")
                or (header.startswith(TORCH) and not header.startswith(STABLE))
                or (header.startswith(PYTHON) and layer != "pybind")
                or (layer == "core" and header.startswith("torch_ops/"))
            )
            if wrong:
                found.append(f"{path.relative_to(csrc)}: includes {header}")
        if layer == "core":
            found += [f"{path.relative_to(csrc)}: uses {use}" for use in NAMESPACE.findall(text)]
    return found


# Names of CUDA that the host runner does not have.
CUDA_NAME = re.compile(
    r"\b(?:threadIdx|blockIdx|blockDim|gridDim|__(?:shfl|syncwarp|syncthreads|ballot|any|all|match|"
    r"popc|ffs|ldg|shared__|global__|device__)\w*|atomic[A-Z]\w*|cuda[A-Z]\w*|cub::)"
)
# simt.cuh wraps these names; the other two files also have a version for the host.
KNOW_CUDA = {"simt.cuh", "primitives.cu", "device_memory.cu"}


def test_kernels_know_of_the_machine_by_simt_only():
    files = [p for p in (ROOT / "csrc/core/cuda").iterdir() if p.name not in KNOW_CUDA]
    uses = {path.name: CUDA_NAME.findall(path.read_text()) for path in files}
    assert {name: names for name, names in uses.items() if names} == {}
    assert {"unique.cu", "segment_reduce.cuh"} <= set(uses)
    assert CUDA_NAME.findall((ROOT / "csrc/core/cuda/simt.cuh").read_text())


def stems(pattern, *others):
    return {path.stem.removeprefix("test_") for path in ROOT.glob(pattern)} - set(others)


# Suites that cover several ops, or one aspect of an op.
ACROSS_OPS = (
    "overlap",
    "colliding_keys",
    "renumbering",
    "copying_keys",
    "gaps",
    "group_launches",
    "kept_descriptors",
    "group_misaligned",
    "beyond_32_bits",
    "two_threads",
    "long_bags",
    "several_tables",
    "group_update",
    "group_bag_gradients",
    "sizes",
    "workspace",
    "bad_offsets",
    "kept_list",
)
LAYERS = {
    "csrc/core/include/sparsekit": stems("csrc/core/include/sparsekit/*.h"),
    "csrc/core/cpu": stems("csrc/core/cpu/*.cpp"),
    "csrc/core/cuda": stems("csrc/core/cuda/*.cu"),
    "csrc/torch_ops": stems(
        "csrc/torch_ops/*.cpp", "schemas", "device_context", "large_memory", "kept_list"
    ),
    "sparsekit/ops": stems("sparsekit/ops/[!_]*.py"),
    "tests/ops": stems("tests/ops/test_*.py", "checks", "opcheck", *ACROSS_OPS),
}
# On a device each table is swept by ops of its own.
CPU_ONLY = {"group_drop_lowest"}
# Each stem in one of these three folders is an op; core may have more, such as xxh64.
OPS = LAYERS["csrc/torch_ops"] | LAYERS["sparsekit/ops"] | LAYERS["tests/ops"]


def test_includes_follow_the_layers():
    assert violations(ROOT / "csrc") == []


def test_there_is_something_to_check():
    layers = {path.relative_to(ROOT / "csrc").parts[0] for path in (ROOT / "csrc").rglob("*.cpp")}
    assert layers >= {"core", "torch_ops"}
    includes = [INCLUDE.findall(path.read_text()) for path in (ROOT / "csrc").rglob("*.cpp")]
    assert all(includes)
    known = {"unique", "segment_sum", "gather_rows", "embedding_bag", "hash_table", "init_rows"}
    assert known | {"update_rows", "catch_up_rows", "bucketize"} <= OPS


@pytest.mark.parametrize("layer", LAYERS)
def test_every_op_has_its_file(layer):
    assert OPS - LAYERS[layer] == (CPU_ONLY if layer == "csrc/core/cuda" else set())


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("core/cpu/unique.cpp", "#include <torch/csrc/stable/tensor.h>"),
        ("core/cpu/unique.cpp", "  #  include <ATen/ATen.h>"),
        ("core/cpu/probe.h", '#include "c10/util/BFloat16.h"'),
        ("core/include/sparsekit/unique.h", "#include <torch/headeronly/core/ScalarType.h>"),
        ("core/include/sparsekit/unique.h", "#include <Python.h>"),
        ("core/cuda/unique.cu", "#include <pybind11/pybind11.h>"),
        ("core/cuda/simt.cuh", '#include "../../torch_ops/common.h"'),
        ("core/cpu/unique.cpp", "void f(const at::Tensor& keys);"),
        ("torch_ops/unique.cpp", "#include <torch/torch.h>"),
        ("torch_ops/unique.cpp", "#include <torch/library.h>"),
        ("torch_ops/common.h", "#include <ATen/Parallel.h>"),
        ("torch_ops/common.h", "#include <pybind11/pybind11.h>"),
        ("pybind/module.cpp", "#include <torch/csrc/stable/tensor.h>"),
    ],
)
def test_a_break_is_found(tmp_path, file, line):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"#pragma once\n{line}\n#include <cstdint>\n")
    (found,) = violations(tmp_path)
    assert found.startswith(f"{file}: ")
    (tmp_path / file).write_text("#include <cstdint>\n// torch's pool is injected\n")
    assert violations(tmp_path) == []
