"""Sets up backends, time limits and reproducibility for all tests, and makes difficult inputs."""

import collections
import contextlib
import faulthandler
import gc
import importlib.util
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator

# Under a sanitizer, load the library given by tests/sanitize.sh instead of the usual one. This
# code must run before the imports below, which load sparsekit.
if _library := os.environ.get("SPARSEKIT_PYBIND_LIBRARY"):
    _spec = importlib.util.spec_from_file_location("sparsekit._pybind", _library)
    sys.modules["sparsekit._pybind"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["sparsekit._pybind"])

import pytest
import simt
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from patience import patience

import sparsekit

# The backends on which tests of ops run: the CPU engine, the CUDA kernels on the host runner,
# and the CUDA kernels on a GPU if there is one.
HAS_GPU = bool(sparsekit.build_info()["cuda"]) and torch.cuda.is_available()
BACKENDS = ["cpu", "simt", *([pytest.param("cuda", marks=pytest.mark.cuda)] if HAS_GPU else [])]

# Random examples differ from run to run on a developer's machine, but not under CI. There is no
# deadline: if generating an example is slow, the machine is busy.
settings.register_profile(
    "sparsekit",
    deadline=None,
    max_examples=50,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("sparsekit")

# xdist runs one process per core, so more threads would only spin while they wait for one another.
# Tests about threads set the number themselves.
torch.set_num_threads(1)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
KEY_EXTREMES = (0, -1, INT64_MIN, INT64_MAX)
KEY_DTYPES = (torch.int64, torch.int32)
ROW_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}

# Any int64 key; extremes and repeated keys are drawn more often than by chance.
KEYS = st.one_of(
    st.sampled_from(KEY_EXTREMES), st.integers(-3, 3), st.integers(INT64_MIN, INT64_MAX)
)


# Time limit of a test in seconds: many times what any test takes. It grows on a busy machine
# (`patience`).
LIMIT_S = 180
# A test and its fixtures together may take this multiple of the test's limit.
WITH_FIXTURES = 1.5
# Seconds left for pytest to report a test that exceeded its limit, even on a busy machine.
REPORT_S = 15


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--time-factor", type=float, default=1, help="multiplies all time limits")
    parser.addoption("--at-most", type=int, help="parametrizations per test (> 1)")
    parser.addoption("--all-cases", action="store_true", help="ignore the mark `pairs`")


def pytest_configure(config: pytest.Config) -> None:
    """Load the host runner, and keep the real stderr: pytest captures it during a test."""
    global _stderr
    try:
        simt.load()
    except FileNotFoundError as error:
        raise pytest.UsageError(str(error)) from error
    _stderr = os.dup(2)


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply the mark `pairs`, and --at-most, for runs that repeat tests under a sanitizer."""
    tests = collections.defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for test in tests.values():
        if (mark := test[0].get_closest_marker("pairs")) and not config.getoption("--all-cases"):
            test = in_pairs(test, **mark.kwargs)
        kept.update(thinned(test, config.getoption("--at-most") or len(test)))
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    """Hide what exists from the garbage collector: a collection would visit a million objects."""
    gc.collect()
    gc.freeze()


def in_pairs(items: list[pytest.Item], any_device: bool = False) -> list[pytest.Item]:
    """Return items of a test that have every pair of values of two parameters, the same always.

    Each device gets all pairs of the other parameters, since its kernels have faults of their own,
    unless `any_device`: then a pair is on one device or the other.
    """
    devices = collections.defaultdict(list)
    for item in items:
        devices[None if any_device else id(item.callspec.params.get("device"))].append(item)
    kept = set()
    for same_device in devices.values():
        pairs = {}
        for item in same_device:
            values = [(n, id(v)) for n, v in item.callspec.params.items()]
            pairs[item] = set(itertools.combinations(sorted(values), 2))
        missing = set().union(*pairs.values())
        # Greedily: first the items that add the most pairs.
        for gain in range(max(map(len, pairs.values())), 0, -1):
            for item in same_device:
                if len(missing & pairs[item]) >= gain:
                    kept.add(item)
                    missing -= pairs[item]
    return [item for item in items if item in kept]


def thinned(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Return `most` of a test's items, evenly spread from the first to the last, the same always.

    Further items are added until all values remain of each parameter that has up to `most` values.
    """
    if len(items) <= most:
        return items
    # Stacked parameters repeat with periods that divide the length. The step is derived from the
    # length less one, so it follows none of them.
    kept = [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]
    # Values are compared by identity, since some cannot be hashed.
    values = {item: {(n, id(v)) for n, v in item.callspec.params.items()} for item in items}
    counts = collections.Counter(name for name, _ in set().union(*values.values()))
    missing = {value for item in items for value in values[item] if counts[value[0]] <= most}
    missing -= set().union(*(values[item] for item in kept))
    for item in items:
        if missing & values[item]:
            kept.append(item)
            missing -= values[item]
    return kept


def time_limit(test: pytest.Item) -> float:
    """Return a test's limit in seconds: the limit in its `time_limit` mark, or the default."""
    mark = test.get_closest_marker("time_limit")
    return (mark.args[0] if mark else LIMIT_S) * test.config.getoption("--time-factor")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Fail a test that exceeds its limit, even while it waits, for example for a process."""
    limit = time_limit(item)
    begin = time.monotonic()

    def expired(*_: object) -> None:
        left = patience(limit) - (time.monotonic() - begin)
        if left <= 0:
            pytest.fail(f"not done after {limit:g} s")
        signal.setitimer(signal.ITIMER_REAL, left)

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """End the process if a test hangs in native code; first print the stacks of all threads.

    xdist reports the test as failed and continues in a new process.
    """
    limit = patience(time_limit(item)) * WITH_FIXTURES + REPORT_S
    faulthandler.dump_traceback_later(limit, exit=True, file=_stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def needs_gpu(request: pytest.FixtureRequest) -> None:
    """Skip tests marked `cuda` on a machine without a GPU."""
    if request.node.get_closest_marker("cuda") and not HAS_GPU:
        pytest.skip("no GPU, or a build without CUDA")


@pytest.fixture
def forked_ranks() -> Iterator[None]:
    """Fork the ranks that commands start, since a new process takes seconds to import torch."""
    from forked_ranks import forked

    with forked():
        yield


@pytest.fixture(params=BACKENDS, scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of a test's tensors; tests of ops run once per backend."""
    return torch.device("cpu" if request.param == "simt" else request.param)


@pytest.fixture
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Return the name of the backend that belongs to `device`."""
    return request.node.callspec.params["device"]


@pytest.fixture(params=["cpu", "simt"], scope="session")
def engine(request: pytest.FixtureRequest) -> str:
    """Return the engine whose kernels a test of layers uses; the test's tensors are on the CPU."""
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    """Run tests of the simt backend under SimtMode, and tests on a GPU with checks on.

    The CPU and the host runner always check; without checks, a GPU reports an invalid row late.
    """
    parameters = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
    mode: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if "simt" in (parameters.get("device"), parameters.get("engine")):
        mode = simt.SimtMode()
    elif parameters.get("device") == "cuda":
        mode = sparsekit.checked(True)
    with mode:
        return (yield)


def pytest_report_header() -> str:
    """Return a header line that lists the backends, and tells why none is a GPU."""
    reason = "" if HAS_GPU else " (no GPU or a build without CUDA: nothing runs on a device)"
    cpu = f"cpu ({sparsekit.instruction_set()})"
    return f"sparsekit backends: {cpu}, simt{', cuda' if HAS_GPU else reason}"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def key_pattern(name: str, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return n keys of one of the patterns in KEY_PATTERNS, the same keys on every call."""
    limits = torch.iinfo(dtype)
    random = torch.randint(limits.min, limits.max, (n,), generator=generator(n), dtype=dtype)
    if name == "equal":
        return torch.full((n,), -7, dtype=dtype)
    if name == "distinct":
        return torch.randperm(n, generator=generator(n)).to(dtype) - n // 2
    if name == "half on one":
        return torch.where(random % 2 == 0, 3, random)
    if name == "few":
        return random % 11
    assert name == "extremes"
    extremes = torch.tensor([0, -1, limits.min, limits.max, 1], dtype=dtype)
    return extremes[random.to(torch.int64) % len(extremes)]


KEY_PATTERNS = ("equal", "distinct", "half on one", "few", "extremes")


def whole_numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return small whole numbers. Their sums are exact in any order, so results must be equal."""
    return torch.randint(-8, 9, shape, generator=generator(seed)).to(dtype)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that begins one element past an aligned address.

    A GPU faults on a wide access to such memory, so kernels must use narrow accesses.
    """
    space = torch.empty(1 + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    copy = space[1:].view(tensor.shape)
    copy.copy_(tensor)
    assert copy.is_contiguous()
    assert copy.data_ptr() % 16 != 0
    return copy


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that values are equal up to rounding, relative to the largest value."""
    tolerance = TOLERANCE[actual.dtype]
    largest = expected.abs().max().item() if expected.numel() else 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(1, largest))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the bits are equal: -0 differs from 0, and a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return _bytes(one) == _bytes(other)


def _bytes(tensor: torch.Tensor) -> bytes:
    # The clone is needed: a single element counts as contiguous whatever its stride, and then
    # view() to another dtype would fail.
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def deterministic(on: bool = True):
    """Turn deterministic algorithms on or off within the block. On the CPU they are always on."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def assert_same_bits_for_any_threads(compute) -> None:
    """Call `compute`, which returns tensors, with several thread counts and compare the bits.

    On the host runner and on a GPU, the interleaving of threads differs in each call anyway.
    """
    before = torch.get_num_threads()
    try:
        results = []
        with deterministic():
            for threads in (1, 2, 2, 4):
                torch.set_num_threads(threads)
                results.append(compute())
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            assert same_bits(one, other)
