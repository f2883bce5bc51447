"""FitData describes the data passed to fit, and identifies them by a checksum."""

import torch

from sparsekit.data import Prefetcher
from sparsekit.train import fit_data
from sparsekit.train.fit_data import FitData, checksum


def test_data_say_what_they_are():
    assert str(FitData((torch.arange(4.0),), 2, None, 3)) == "[4] samples in batches of 6"
    assert str(FitData((torch.arange(4.0),), None, 3, 3)) == "[4] samples in batches of 3"
    assert str(FitData([], None, None, 3)) == "batches of loaders"


def test_a_checksum_is_of_dtypes_shapes_and_order_whatever_the_pieces(monkeypatch):
    x = torch.arange(12).view(3, 4)
    others = [
        (x.int(),),
        (x.view(4, 3),),
        (x.T,),
        (x + 1,),
        (x, x[:0]),
        (x[:2], x[2:]),
        (x[2:], x[:2]),
    ]
    codes = [checksum(each) for each in [(x,), *others]]
    assert len(set(codes)) == len(codes)
    monkeypatch.setattr(fit_data, "_PIECE", 20)
    assert [checksum(each) for each in [(x,), *others]] == codes
    assert checksum((x.T.contiguous().T,)) == codes[0]
    assert checksum((x.float().requires_grad_(),)) == checksum((x.float(),))


def test_a_loader_whose_length_is_not_known_has_no_facts():
    class Stream(list):
        def __len__(self):
            raise NotImplementedError

    assert FitData(Stream(), None, None, 1).facts == {}
    assert FitData(Prefetcher(Stream()), None, None, 1).facts == {}
    assert FitData(iter([]), None, None, 1).facts == {}
    assert FitData([1, 2], None, None, 1).facts == {"batches": 2}


def test_a_prefetcher_stands_for_its_source():
    fit = FitData(Prefetcher([1, 2]), None, None, 1)
    assert not fit.is_reader  # the prefetcher has a state only if its source has one
    assert fit.facts == {"batches": 2}


def test_a_checksum_of_a_part_of_another_tensor():
    x = torch.arange(12)
    assert checksum((x[::2],)) == checksum((x[::2].clone(),))
