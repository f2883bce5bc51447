"""Large CPU outputs reuse memory that the pool keeps."""

import copy
import gc
import io
import os
import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sparsekit
from sparsekit import ops
from sparsekit.memory import pool_bytes, prefer_huge_pages, untouched_zeros, zero_

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _empty():
    gc.collect()
    sparsekit.empty_cache()


def large(rows=4 * MIB // 64):
    """Return a new output of an op, by default 4 MiB of ones."""
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


def untouched(rows):
    """Return three outputs of an op, 8 bytes per row each, whose pages stay untouched."""
    no_keys = torch.zeros(1, dtype=torch.int64)
    keys = torch.empty(rows, dtype=torch.int64)
    return torch.ops.sparsekit.unique_padded(keys, no_keys)[:3]


def test_what_is_idle_is_bounded_by_what_is_in_use():
    draw = random.Random(5)
    held, peaks, idle_at_the_end = [], [], set()
    for _ in range(200):
        held.append(untouched(draw.randrange(1 << 18, 12 << 20)))
        now = pool_bytes()
        assert now.in_use >= sum(part.nbytes for outputs in held for part in outputs)
        assert now.idle <= now.recent_peak + 64 * MIB
        peaks.append(now.in_use)
        # The peak of the last 128 blocks covers at least the last 30 calls.
        assert now.recent_peak >= max(peaks[-30:])
        held = held[len(held) - draw.randrange(3) :]
        now = pool_bytes()
        assert now.idle <= now.recent_peak + 64 * MIB
        idle_at_the_end.add(now.idle)
    held.clear()
    assert max(idle_at_the_end) > 64 * MIB  # the pool does keep memory
    now = pool_bytes()
    assert now.in_use == 0
    assert sparsekit.empty_cache() == now.idle <= now.recent_peak + 64 * MIB
    assert pool_bytes().idle == 0


def test_a_peak_is_forgotten():
    held = [untouched(12 << 20) for _ in range(4)]
    assert pool_bytes().recent_peak >= 4 * 3 * 96 * MIB
    held.clear()
    for _ in range(128):
        untouched(1 << 18)
    now = pool_bytes()
    assert now.recent_peak < 100 * MIB
    assert now.idle <= now.recent_peak + 64 * MIB


def test_the_oldest_go_first():
    for _ in range(256):
        large()  # makes the pool forget larger peaks
    sparsekit.empty_cache()
    # No freed block fits the next request. Idle blocks may have up to the largest peak + 64 MiB, so
    # the block of 56 MiB is freed.
    places = [large(rows=size * MIB // 64).data_ptr() for size in (56, 60, 64)]
    assert pool_bytes().idle == (60 + 64) * MIB
    assert large(rows=56 * MIB // 64).data_ptr() == places[1]


@pytest.mark.parametrize(("varies", "most_changes"), [(0, 0), (0.1, 70)])
def test_a_steady_loop_takes_hardly_any_new_memory(varies, most_changes):
    """Steps reuse memory although, as in training, outputs are freed only after backward."""
    draw = random.Random(3)

    def step():
        part = 1 - varies * draw.random()
        kept = [untouched(int(rows * part)) for rows in (400_000, 800_000, 6_000_000)]
        del kept[0]
        untouched(int(3_000_000 * part))

    def total():
        return pool_bytes().in_use + pool_bytes().idle

    for _ in range(30):
        step()
    changes = 0
    for _ in range(100):
        before = total()
        step()
        changes += total() != before
    assert changes <= most_changes


def test_a_block_is_not_used_for_less_than_half():
    first = large(rows=20 * MIB // 64)
    address = first.data_ptr()
    del first
    assert large(rows=10 * MIB // 64).data_ptr() == address
    gc.collect()
    assert large(rows=7 * MIB // 64).data_ptr() != address


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


def test_an_output_cannot_grow():
    output = large()
    address, size = output.data_ptr(), output.untyped_storage().nbytes()
    for grow in (
        lambda: output.resize_(len(output) + 1, 16),
        lambda: output.untyped_storage().resize_(size + 1),
        lambda: torch.ops.aten.resize_.default(output, [1 << 60]),
    ):
        with pytest.raises(RuntimeError, match=r"not resizable|overflow"):
            grow()
        assert (output.data_ptr(), output.untyped_storage().nbytes()) == (address, size)
    output.resize_(3, 16)
    assert torch.equal(output, torch.ones(3, 16))


def compiled(folder, name, *options):
    """Compile tests/`name`.cpp and the pool into a program without torch."""
    if shutil.which("g++") is None:
        pytest.skip(f"no g++ to compile {name}.cpp")
    here = Path(__file__).parent
    sources = here.parent / "csrc" / "torch_ops"
    program = folder / name
    command = ["g++", "-std=c++17", "-O1", "-g", "-Wall", f"-I{sources}", "-pthread", "-o", program]
    files = [here / f"{name}.cpp", sources / "large_memory.cpp"]
    subprocess.run([*command, *options, *files], check=True, timeout=300)
    return program


def test_forks_beside_threads_that_allocate(tmp_path):
    program = compiled(tmp_path, "fork_pool")
    done = subprocess.run([program, "500"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "0 children failed\n")


def test_the_pool_under_sanitizers(tmp_path):
    sanitize = "-fsanitize=address,undefined"
    empty = ["g++", sanitize, "-shared", "-o", tmp_path / "empty.so", "-xc++", os.devnull]
    if shutil.which("g++") is None or subprocess.run(empty, capture_output=True).returncode != 0:
        pytest.skip("no g++ with sanitizers")
    program = compiled(tmp_path, "pool_steps", sanitize, "-fno-sanitize-recover")
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "0 in use, all released\n"), done.stderr[:3000]


def test_a_child_has_the_memory_of_its_parent():
    kept = large()
    child = os.fork()
    if child == 0:
        try:
            fresh, status = large(), 0
            status += not torch.equal(kept, fresh)
            del fresh
            status += sparsekit.empty_cache() != 4 * MIB
        except BaseException:
            status = 9
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(kept, torch.ones_like(kept))


def test_a_size_that_cannot_be_is_an_error():
    message = rf"unsorted_segment_sum: a result of shape \[{1 << 40}, {1 << 20}\] cannot be"
    with pytest.raises(ValueError, match=message):
        ops.unsorted_segment_sum(torch.ones(1, 1 << 20), torch.tensor([0]), 1 << 40)


def test_more_than_the_system_has_is_an_error():
    with pytest.raises(RuntimeError, match=f"no {1 << 44} bytes for an output or workspace of"):
        ops.unsorted_segment_sum(torch.ones(1, 4), torch.tensor([0]), 1 << 40)


def test_huge_pages_are_a_hint_that_changes_no_value():
    tensor = torch.arange(3 * MIB)
    assert prefer_huge_pages(tensor) is tensor
    assert torch.equal(tensor, torch.arange(3 * MIB))
    assert prefer_huge_pages(torch.empty(0)).numel() == 0
    assert prefer_huge_pages(torch.empty(5, device="meta")).device.type == "meta"


def test_huge_pages_of_a_tensor_beyond_2_gib():
    # Its pages stay untouched, so it takes no memory.
    tensor = torch.empty(5 << 30, dtype=torch.uint8)
    flags = [
        flags_at(prefer_huge_pages(t)[at:].data_ptr())
        for t, at in ((torch.empty(64 * MIB, dtype=torch.uint8), 32 * MIB), (tensor, 9 << 29))
    ]
    if "hg" not in flags[0]:
        pytest.skip("this system has no advice on huge pages")
    assert "hg" in flags[1]


def flags_at(address):
    """Return Linux's flags of the mapping at an address; hg: advised to use huge pages."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            low, high = (int(bound, 16) for bound in name.split("-"))
            here = low <= address < high
        elif here and name == "VmFlags:":
            return values
    raise AssertionError("no such mapping")


def test_huge_pages_under_fake_tensors():
    real = torch.arange(3 * MIB)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(5 << 40)
        assert prefer_huge_pages(fake) is fake
        assert prefer_huge_pages(real) is real
        layer = sparsekit.DistributedEmbedding("sum", 1 << 30, 64, 1, 1)
    assert layer.weight.shape == (1 << 30, 64)
    parameter = torch.nn.Parameter(torch.ones(3 * MIB))
    assert prefer_huge_pages(parameter) is parameter


def resident():
    """Return the memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_untouched_zeros_take_no_memory():
    before = resident()
    tensor = untouched_zeros([1 << 36, 16], torch.float32)  # 4 TiB
    assert tensor.shape == (1 << 36, 16)
    assert not tensor[[0, 1 << 35, -1]].any()
    assert resident() - before < 16 * MIB
    tensor = untouched_zeros([1 << 20, 16], torch.float64, first=1)
    before = resident()
    tensor[: 1 << 10] = 1
    assert resident() - before < MIB
    assert float(tensor.sum()) == 1 << 14


@pytest.mark.parametrize("begin", [0, 1, 1000, 300_000])
def test_zeroed_pages_go_back_to_the_system(begin):
    tensor = untouched_zeros([1 << 22, 3], torch.float32)
    tensor.fill_(1)
    before, version = resident(), tensor._version
    zero_(tensor[begin:])
    assert resident() - before < -32 * MIB
    assert tensor._version > version
    assert int(tensor.sum()) == 3 * begin
    tensor[-1] = 2
    assert int(tensor.sum()) == 3 * begin + 6


def test_only_own_whole_pages_go_back():
    part = untouched_zeros([1 << 20, 4], torch.float32)
    part.fill_(1)
    zero_(part[:, 1:3])
    assert part.sum(0).tolist() == [1 << 20, 0, 0, 1 << 20]
    for other in (torch.ones(1 << 20), torch.ones(3), part.clone(), part.share_memory_()):
        zero_(other)
        assert not other.any()


def test_untouched_zeros_outlive_their_maker_and_a_fork():
    tensor = untouched_zeros([1 << 20], torch.float32)[5:]
    gc.collect()
    tensor.fill_(3)
    child = os.fork()
    if child == 0:
        zero_(tensor)
        os._exit(int(tensor.any()))
    assert os.waitpid(child, 0)[1] == 0
    assert bool((tensor == 3).all())


def test_too_many_zeros_are_an_error():
    with pytest.raises(RuntimeError, match=rf"no memory for a tensor of shape \[{1 << 50}\]"):
        untouched_zeros([1 << 50], torch.float32)
    with pytest.raises(RuntimeError, match="no memory for a tensor of shape"):
        untouched_zeros([1 << 62, 4], torch.float32)


def test_a_table_takes_memory_for_its_rows_alone():
    before = resident()
    layer = sparsekit.Embedding(4_000_000, 64, name="users")
    optimizer = sparsekit.optim.LazyAdam(layer.parameters())
    index = layer.table.buckets.nbytes
    for _ in range(2):
        layer(torch.arange(1000)).sum().backward()
        optimizer.step()
    assert layer.weight.nbytes == 1_024_000_000
    assert resident() - before < index + 128 * MIB
