"""Large CPU outputs: in memory that is kept for later ones."""

import copy
import gc
import io
import threading

import pytest
import torch

import sparsekit
from sparsekit import ops
from sparsekit.memory import prefer_huge_pages

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _empty():
    gc.collect()
    sparsekit.empty_cache()


def large(rows=4 * MIB // 64):
    """A new output of 4 MiB, of ones."""
    return ops.gather_rows(torch.ones(1, 16), torch.zeros(rows, dtype=torch.int64))


def test_memory_is_used_again():
    first = large()
    address = first.data_ptr()
    other = large()
    assert other.data_ptr() != address
    del first
    assert large().data_ptr() == address
    assert torch.equal(other, torch.ones_like(other))


def test_memory_lives_as_long_as_any_view():
    view = large()[7:9]
    others = [large() for _ in range(3)]
    for other in others:
        other.zero_()
    assert torch.equal(view, torch.ones(2, 16))


def test_empty_cache_returns_what_is_idle():
    kept, gone = large(), large()
    assert sparsekit.empty_cache() == 0
    del gone
    assert sparsekit.empty_cache() == 4 * MIB
    assert sparsekit.empty_cache() == 0
    assert torch.equal(kept, torch.ones_like(kept))


def test_what_nobody_takes_is_returned_after_a_while():
    first = large()
    del first
    for _ in range(128):
        large(rows=8 * MIB // 64)
    idle_of_both = 12 * MIB
    large(rows=8 * MIB // 64)
    assert sparsekit.empty_cache() == idle_of_both - 4 * MIB


def test_small_outputs_are_torchs():
    small = large(rows=1000)
    del small
    assert sparsekit.empty_cache() == 0


def test_outputs_are_tensors_like_any_other():
    output = large()
    assert output.is_contiguous()
    assert torch.equal(output.t().contiguous().t(), output)
    assert torch.equal(copy.deepcopy(output), output)
    assert output.numpy().sum() == output.numel()
    file = io.BytesIO()
    torch.save(output, file)
    file.seek(0)
    assert torch.equal(torch.load(file), output)
    shared = large().share_memory_()
    assert shared.is_shared()
    assert torch.equal(shared, output)


def test_many_threads_take_and_give_back():
    wrong = []

    def work(number):
        for _ in range(20):
            output = large().fill_(number)
            other = large().fill_(-number)
            if not (output == number).all() or not (other == -number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_size_that_cannot_be_is_an_error():
    with pytest.raises(RuntimeError):
        ops.unsorted_segment_sum(torch.ones(1, 1 << 20), torch.tensor([0]), 1 << 40)


def test_huge_pages_are_a_hint_that_changes_no_value():
    tensor = torch.arange(3 * MIB)
    assert prefer_huge_pages(tensor) is tensor
    assert torch.equal(tensor, torch.arange(3 * MIB))
    assert prefer_huge_pages(torch.empty(0)).numel() == 0
    assert prefer_huge_pages(torch.empty(5, device="meta")).device.type == "meta"
