"""Ranks choose together which transport carries their exchange."""

import errno
import os
import re
import resource
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import sparsekit
from sparsekit.distributed import backend as choice
from sparsekit.distributed import nccl, shared_memory

from . import on_device
from .pool import Raised

on_cpu = pytest.mark.skipif(on_device.NAME != "cpu", reason="for tensors on the CPU")


def test_a_build_without_nccl(monkeypatch):
    monkeypatch.setattr(nccl._pybind, "build_info", lambda: {"nccl": False})
    with pytest.raises(RuntimeError, match=r"backend='nccl': this build .* no nccl.h"):
        sparsekit.init(backend="nccl")
    for backend in ("torch", "auto"):
        sparsekit.init(backend=backend)


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="one of auto, torch, nccl, shared_memory; got 'gloo'"):
        sparsekit.init(backend="gloo")


def make(backend, device="cuda"):
    group = torch.distributed.group.WORLD
    timeout = timedelta(seconds=20)
    return type(choice.make_transport(backend, group, torch.device(device), timeout)).__name__


def choose(rank, backends, device, reasons):
    before, nccl.missing = nccl.missing, lambda: reasons[rank]
    try:
        return make(backends[rank], device)
    finally:
        nccl.missing = before


@pytest.mark.parametrize(
    ("backend", "device", "reasons"),
    [
        ("torch", "cpu", ["", ""]),
        ("auto", "meta", ["", ""]),
        ("torch", "cuda", ["", ""]),
        ("auto", "cuda", ["no library", ""]),
        ("auto", "cuda", ["no library", "no library"]),
    ],
)
def test_torch_is_chosen(two_ranks, backend, device, reasons):
    assert two_ranks(choose, [backend] * 2, device, reasons) == ["TorchTransport"] * 2


def connected(rank, backend, device):
    """Return the name of the transport connected for a device, and its timeout."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (nccl, shared_memory):
            name = module.__name__.rpartition(".")[2]
            patch.setattr(module, "connect", lambda teller, *rest, name=name: (name, *rest))
        timeout = timedelta(seconds=20 + rank)
        group = torch.distributed.group.WORLD
        return choice.make_transport(backend, group, torch.device(device), timeout)


@pytest.mark.parametrize("backend", ["auto", "of the device"])
def test_what_is_connected_for_a_device(two_ranks, backend):
    for device, own, *rest in (("cuda", "nccl", torch.device("cuda")), ("cpu", "shared_memory")):
        found = two_ranks(connected, backend if backend == "auto" else own, device)
        assert found == [(own, *rest, timedelta(seconds=20 + rank)) for rank in range(2)]


@pytest.mark.parametrize(
    ("backends", "device", "reasons", "message"),
    [
        (["nccl"] * 2, "cpu", ["", ""], "backend='nccl' needs CUDA tensors, these are cpu"),
        (["nccl"] * 2, "cuda", ["no library", ""], "backend='nccl': on rank 0: no library"),
        (
            ["shared_memory"] * 2,
            "cuda",
            ["", ""],
            "'shared_memory' needs CPU tensors, these are cu",
        ),
        (["torch", "auto"], "cuda", ["", ""], "different backends. rank 0: torch, rank 1: auto"),
        (["nccl", "auto"], "cpu", ["", ""], "different backends. rank 0: nccl, rank 1: auto"),
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


def without_memory(rank, backend, what, where):
    """Choose a transport while some ranks lack a resource; return its name and the warnings."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == where:
            OBSTACLES[what](patch)
        chosen = make(backend, "cpu")
        for limit in LIMITED:
            resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)
    return chosen, [str(warning.message) for warning in caught]


def refuse(name, code):
    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    return lambda patch: patch.setattr(shared_memory.os, name, fail)


LIMITED = [resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS]


def limit(which, value):
    return lambda patch: resource.setrlimit(which, (value(), resource.getrlimit(which)[1]))


def open_files(more):
    # Allow `more` open files in addition to those that are open now.
    return lambda: os.dup(0) + more


def address_space():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2**20


OBSTACLES = {
    "memfd": refuse("memfd_create", errno.ENOSYS),
    "seccomp": refuse("memfd_create", errno.EPERM),
    "memory": refuse("posix_fallocate", errno.ENOSPC),
    "file size": limit(resource.RLIMIT_FSIZE, lambda: 4096),
    "address space": limit(resource.RLIMIT_AS, address_space),
    "files": limit(resource.RLIMIT_NOFILE, open_files(0)),
    "files for what comes": limit(resource.RLIMIT_NOFILE, open_files(2)),
}


@on_cpu
@pytest.mark.parametrize(
    ("what", "where", "reason"),
    [
        ("memfd", 0, "on rank 0: .*Function not implemented"),
        ("seccomp", 0, "on rank 0: .*Operation not permitted"),
        ("memory", 0, "on rank 0: .*No space left on device"),
        ("file size", 0, "on rank 0: .*File too large"),
        ("address space", 0, "on rank 0: .*Cannot allocate memory"),
        ("address space", 1, "on rank 1: .*Cannot allocate memory"),
        ("files", 0, "on rank 0: .*Too many open files"),
        ("files", 1, "on rank 1: .*Too many open files"),
        ("files for what comes", 1, "on rank 1: .*Too many open files"),
    ],
)
def test_memory_that_cannot_be_had(two_ranks, what, where, reason):
    (first, warned), (second, silent) = two_ranks(without_memory, "shared_memory", what, where)
    assert first == second == "TorchTransport"
    assert silent == []  # only one rank warns
    (warning,) = warned
    assert re.search(
        f"backend='shared_memory' cannot be had; gloo takes its place: {reason}", warning
    )
    assert two_ranks(without_memory, "auto", what, where) == [("TorchTransport", [])] * 2
    assert two_ranks(make_on, "shared_memory") == ["SharedMemoryTransport"] * 2


def make_on(rank, backend):
    return make(backend, "cpu")


def on_other_hosts(rank, backend, way):
    with pytest.MonkeyPatch.context() as patch:
        if way == "hosts":
            path = Path(os.devnull if rank else shared_memory._BOOT_ID)
            patch.setattr(shared_memory, "_BOOT_ID", path)
        else:  # in another container this address does not exist
            offer = shared_memory._Meeting.offer
            unknown = b"\0nobody is here"
            patch.setattr(
                shared_memory._Meeting, "offer", lambda self: offer(self)._replace(address=unknown)
            )
        return make(backend, "cpu")


@on_cpu
@pytest.mark.parametrize(
    ("way", "reason"),
    [("hosts", "ranks run on several hosts"), ("containers", "on rank 1: .*Connection refused")],
)
def test_ranks_that_cannot_share_memory(two_ranks, way, reason):
    assert two_ranks(on_other_hosts, "auto", way) == ["TorchTransport"] * 2
    for outcome in two_ranks.outcomes(on_other_hosts, "shared_memory", way):
        assert isinstance(outcome, Raised), outcome
        assert re.search(f"backend='shared_memory': {reason}", outcome.message)


@on_cpu
@pytest.mark.parametrize("backend", ["auto", "shared_memory"])
def test_ranks_of_one_host_share_memory(two_ranks, backend):
    assert two_ranks(make_on, backend) == ["SharedMemoryTransport"] * 2


def layer_over(rank, backend):
    sparsekit.init(backend=backend)
    try:
        layer = sparsekit.DistributedEmbedding("sum", 10, 4, 1, 2, name="over")
        layer(torch.tensor([[[1, 2]]])).sum().backward()
        return type(layer.exchange.transport).__name__
    finally:
        sparsekit.init(backend="auto")


@on_cpu
def test_a_layer_over_a_backend(two_ranks):
    for backend, name in (
        ("auto", "SharedMemoryTransport"),
        ("torch", "TorchTransport"),
        ("shared_memory", "SharedMemoryTransport"),
    ):
        assert two_ranks(layer_over, backend) == [name] * 2
