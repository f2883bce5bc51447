"""setup.py compiles CUDA kernels if a GPU can run them or a variable requests them."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
ALL = "sm_80;sm_90;sm_100"


@pytest.fixture(scope="module")
def cuda_options():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["setup.py", "--quiet", "--name"])
        patch.chdir(ROOT)
        return runpy.run_path("setup.py", run_name="setup")["cuda_options"]


@pytest.fixture
def choose(cuda_options, monkeypatch, capsys):
    """Return a function that returns the chips to compile for and the printed text."""
    names = cuda_options.__globals__

    def chosen(nvcc, gpu, **variables):
        for name in ("SPARSEKIT_CUDA", "SPARSEKIT_CUDA_ARCHS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(f"SPARSEKIT_{name}", value)
        monkeypatch.setattr(shutil, "which", lambda name, path: "/bin/nvcc" if nvcc else None)
        monkeypatch.setitem(names, "present_archs", lambda: gpu if gpu != "unnamed" else "")
        monkeypatch.setitem(names, "has_gpu", lambda: bool(gpu))
        capsys.readouterr()
        options = cuda_options()
        assert (options["SPARSEKIT_CUDA"] == "ON") is bool(options["SPARSEKIT_CUDA_ARCHS"])
        return options["SPARSEKIT_CUDA_ARCHS"], capsys.readouterr().out

    return chosen


@pytest.mark.parametrize(
    ("nvcc", "gpu", "variables", "archs", "said"),
    [
        (True, "", {}, "", "this machine has no GPU; SPARSEKIT_CUDA=1 builds them"),
        (True, "", {"CUDA": "1"}, ALL, f"with CUDA kernels for {ALL}"),
        (True, "", {"CUDA_ARCHS": "sm_80,sm_90"}, "sm_80;sm_90", "with CUDA kernels for sm_80"),
        (True, "", {"CUDA": "0", "CUDA_ARCHS": "sm_90"}, "", ""),
        (True, "sm_90", {}, "sm_90", "with CUDA kernels for sm_90"),
        (True, "unnamed", {}, ALL, f"with CUDA kernels for {ALL}"),
        (True, "sm_90", {"CUDA": "0"}, "", ""),
        (True, "sm_90", {"CUDA_ARCHS": "sm_100"}, "sm_100", "with CUDA kernels for sm_100"),
        (False, "sm_90", {}, "", ""),
        (False, "", {}, "", ""),
    ],
)  # fmt: skip
def test_when_kernels_are_compiled(choose, nvcc, gpu, variables, archs, said):
    chosen, printed = choose(nvcc, gpu, **variables)
    assert chosen == archs
    assert (said in printed) if said else not printed


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CUDA": "1"}, "SPARSEKIT_CUDA=1, but no nvcc"),
        ({"CUDA_ARCHS": "sm_90"}, "SPARSEKIT_CUDA_ARCHS=sm_90, but no nvcc"),
        ({"CUDA": "off"}, "SPARSEKIT_CUDA must be 0 or 1, got 'off'"),
    ],
)
def test_what_cannot_be_compiled(choose, variables, message):
    with pytest.raises(SystemExit, match=message):
        choose(False, "", **variables)


@pytest.mark.parametrize(
    ("of_nvcc", "of_torch", "warns"),
    [
        ("13.0", "12.8", True),
        ("13.0", "13.0", False),
        ("12.9", "13.0", False),
        ("13.0", None, False),
    ],
)
def test_a_newer_cuda_than_that_of_torch(
    cuda_options, tmp_path, monkeypatch, capsys, of_nvcc, of_torch, warns
):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {of_nvcc}, V{of_nvcc}.48'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.version, "cuda", of_torch)
    cuda_options.__globals__["warn_of_newer_cuda"](str(nvcc))
    expected = "is of CUDA 13, torch of CUDA 12.8: the kernels need a driver for CUDA 13"
    assert (expected in capsys.readouterr().out) is bool(warns)
