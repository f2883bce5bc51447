"""Tests of maps of owners and of their codes."""

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsekit import hashing
from sparsekit.tables import owners as owners_module
from sparsekit.tables.owners import CodeOfMap, check_ranks_of, even_map, shared

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_an_even_map_gives_each_rank_its_share(ranks):
    made = even_map(ranks, CPU)
    assert made is even_map(ranks, CPU)
    assert even_map(ranks, torch.device("meta")).is_meta
    assert even_map(ranks, CPU) is made
    assert (made.dtype, made.shape) == (torch.int16, (65536,))
    assert (made.diff() >= 0).all()
    counts = torch.bincount(made.long(), minlength=ranks)
    assert counts.max() - counts.min() <= 1
    assert len(counts) == ranks


def test_equal_maps_are_shared():
    even = even_map(3, CPU)
    assert shared(even.clone(), 3) is even
    other = even.flip(0)
    assert shared(other, 3) is other


def test_a_map_made_in_inference_mode_is_used_outside():
    with torch.inference_mode():
        made = even_map(11, CPU)
    assert not made.is_inference()


def test_maps_of_fake_tensors_are_not_kept():
    with FakeTensorMode():
        assert type(even_map(13, CPU)) is not torch.Tensor
    made = even_map(13, CPU)
    assert type(made) is torch.Tensor
    with FakeTensorMode():
        assert even_map(13, CPU) is made


def test_the_current_gpu_is_meant_by_cuda(monkeypatch):
    made = torch.zeros(1)
    monkeypatch.setitem(owners_module._even, (2, torch.device("cuda", 3)), made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert even_map(2, torch.device("cuda")) is even_map(2, torch.device("cuda", 3)) is made
    assert even_map(2, CPU) is not made


def test_entries_of_a_map_are_ranks():
    check_ranks_of("n", torch.tensor([0, 1, 2]), 3)
    for bad in (-1, 3):
        with pytest.raises(ValueError, match=rf"^n: owners\[1\] is {bad}, but there are 3 rank"):
            check_ranks_of("n", torch.tensor([0, bad, bad]), 3)


def test_the_code_of_a_map_follows_its_values():
    code, owners = CodeOfMap(), even_map(2, CPU).clone()
    first = code.of("n", owners, 2)
    assert code.of("n", owners, 2) == first == CodeOfMap().of("n", owners.clone(), 2)
    assert len(first) == 16
    assert CodeOfMap().of("n", owners.flip(0), 2) != first
    assert code.of("n", owners.flip(0), 2) != first  # another map of the same version
    assert code.of("n", owners, 2) == first
    owners[-1] = 0
    changed = code.of("n", owners, 2)
    assert changed != first
    assert code.of("n", even_map(2, CPU), 2) == first
    owners[5] = 2
    with pytest.raises(ValueError, match=r"^n: owners\[5\] is 2, but there are 2 rank"):
        code.of("n", owners, 2)
    for copied in (copy.deepcopy(code), pickle.loads(pickle.dumps(code))):
        assert copied._made is None
    with torch.inference_mode():
        assert code.of("n", even_map(2, CPU).clone(), 2) == first


def test_a_code_is_made_once_for_each_map(monkeypatch):
    made = []
    xxh64 = hashing.xxh64
    monkeypatch.setattr(hashing, "xxh64", lambda values: (made.append(1), xxh64(values))[1])
    code, owners = CodeOfMap(), even_map(2, CPU).clone()
    with torch.inference_mode():
        inference = owners.clone()
    for count, one in enumerate((owners, inference, owners, owners.clone()), 1):
        for _ in range(3):
            code.of("n", one, 2)
            assert len(made) == count
    expected = int(xxh64([owners.numpy().tobytes()])) % 2**64
    assert code.of("n", owners, 2) == f"{expected:016x}"
