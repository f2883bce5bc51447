"""Ranks choose together what carries their exchange."""

from datetime import timedelta

import pytest
import torch

import sparsekit
from sparsekit.distributed import nccl

from .pool import Raised


def test_a_build_without_nccl(monkeypatch):
    monkeypatch.setattr(nccl._pybind, "build_info", lambda: {"nccl": False})
    with pytest.raises(RuntimeError, match=r"backend='nccl': this build .* no nccl.h"):
        sparsekit.init(backend="nccl")
    for backend in ("torch", "auto"):
        sparsekit.init(backend=backend)


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="one of auto, torch, nccl; got 'gloo'"):
        sparsekit.init(backend="gloo")


def make(backend, device="cuda"):
    group = torch.distributed.group.WORLD
    timeout = timedelta(seconds=20)
    return type(nccl.make_transport(backend, group, torch.device(device), timeout)).__name__


def choose(rank, backends, device, reasons):
    before, nccl.missing = nccl.missing, lambda: reasons[rank]
    try:
        return make(backends[rank], device)
    finally:
        nccl.missing = before


@pytest.mark.parametrize(
    ("backend", "device", "reasons"),
    [
        ("auto", "cpu", ["", ""]),
        ("torch", "cpu", ["", ""]),
        ("torch", "cuda", ["", ""]),
        ("auto", "cuda", ["no library", ""]),
        ("auto", "cuda", ["no library", "no library"]),
    ],
)
def test_torch_is_chosen(two_ranks, backend, device, reasons):
    assert two_ranks(choose, [backend] * 2, device, reasons) == ["TorchTransport"] * 2


@pytest.mark.parametrize(
    ("backends", "device", "reasons", "message"),
    [
        (["nccl"] * 2, "cpu", ["", ""], "backend='nccl' needs CUDA tensors, these are cpu"),
        (["nccl"] * 2, "cuda", ["no library", ""], "backend='nccl': on rank 0: no library"),
        (["torch", "auto"], "cuda", ["", ""], "different backends. rank 0: torch, rank 1: auto"),
    ],
)
def test_a_backend_that_cannot_be(two_ranks, backends, device, reasons, message):
    for outcome in two_ranks.outcomes(choose, backends, device, reasons):
        assert isinstance(outcome, Raised), outcome
        assert outcome.type == "RuntimeError"
        assert message in outcome.message


def layer_on_the_cpu(rank):
    settings = sparsekit.distributed.world.settings
    settings.backend = "nccl"
    try:
        sparsekit.DistributedEmbedding("sum", 10, 4, 1, 2)
    finally:
        settings.backend = "auto"


def test_a_layer_on_the_cpu_cannot_have_nccl(two_ranks):
    for outcome in two_ranks.outcomes(layer_on_the_cpu):
        assert "backend='nccl' needs CUDA tensors" in outcome.message
