"""The host runner detects broken kernels, without which its results would mean nothing."""

import subprocess

import conftest
import pytest
import simt

RUNS = 50  # runs of each kernel in csrc/core/simt/selftest.cpp


@pytest.fixture(scope="module")
def outcome():
    program = simt.LIBRARY.parent / "sparsekit_simt_selftest"
    output = subprocess.run([program], capture_output=True, text=True, check=True)
    return dict(line.split(": ", 1) for line in output.stdout.splitlines())


@pytest.mark.parametrize("case", ["sum", "claim", "sum again"])
def test_right_kernels_give_right_results(outcome, case):
    assert outcome[case] == "0 wrong"


@pytest.mark.parametrize("case", ["sum without a barrier", "claim that is not atomic"])
def test_missing_synchronisation_gives_wrong_results(outcome, case):
    # Threads interleave at random, but a wrong result is almost certain.
    assert int(outcome[case].split()[0]) > RUNS * 0.9


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("a thread ends before a barrier", "some threads have ended, or wait at a barrier"),
        ("a lane misses a vote", "some threads have ended, or wait at a barrier"),
        ("warps part at a barrier", "barrier"),
        ("collectives differ", "lanes of a warp wait in different collectives"),
        ("no such grid", "a grid that no device runs"),
    ],
)
def test_broken_rules_are_errors(outcome, case, message):
    assert outcome[case].startswith("simt: kernel: ")
    assert message in outcome[case]


# 64 threads: each reads 4 own bytes and 4 common bytes, writes 8, and adds atomically to 4. A
# launch moves whole sectors of 32 bytes.
KERNEL = "64 atomics, 1536 accessed, 320 read, 544 written"


@pytest.mark.parametrize(
    ("case", "counts"),
    [
        ("counts of counted 0", KERNEL),
        ("counts of counted 1", KERNEL),
        ("counts of memset 2", "0 atomics, 512 accessed, 0 read, 512 written"),
        ("counts when off", "0 records"),
        ("counts when on again", "0 records"),
    ],
)
def test_counts_are_those_of_the_kernel(outcome, case, counts):
    assert outcome[case] == counts


def test_a_build_without_the_runner_is_one_sentence(tmp_path, monkeypatch):
    """The error for a build without the runner, such as `make demo`, is one sentence."""
    library = tmp_path / "libsparsekit_simt.so"
    monkeypatch.setattr(simt, "LIBRARY", library)
    monkeypatch.setattr(simt, "load", simt.load.__wrapped__)  # skip the cache of load
    with pytest.raises(pytest.UsageError) as caught:
        conftest.pytest_configure(None)
    assert str(caught.value) == (
        f"the tests run the CUDA kernels on the host, but this build of sparsekit has no "
        f"{library}: run `make build`"
    )
