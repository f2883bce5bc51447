"""No CUDA kernel spills registers, and the report of spills is correct."""

import re

import pytest

import sparsekit
from tools import cuda_report, cuda_sass

SYMBOL = "_ZN9sparsekit4cuda45_GLOBAL__N__3f552258_12_bucketize_cu_8dc9048012count_kernelIlEEvPKT_l"
LOG = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{SYMBOL}' for 'sm_90'
ptxas info    : Function properties for {SYMBOL}
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 16 bytes cumulative stack size, 128 bytes smem
ptxas info    : Compile time = 41.099 ms
ptxas info    : Compiling entry function '_ZN3cub11EmptyKernelIvEEvv' for 'sm_100'
ptxas info    : Function properties for _ZN3cub11EmptyKernelIvEEvv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 4 registers, used 0 barriers
"""
SASS = f"""
\t\tFunction : {SYMBOL}
        /*00f0*/                   LDG.E.128 R2, desc[UR10][R2.64] ;    /* 0x0000000a02027981 */
                                                                        /* 0x001ea2000c1e1b00 */
        /*0100*/              @!P1 REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R4 ;
        /*0110*/                   LDL.64 R8, [R1+0x8] ;
        /*0120*/                   IMAD.MOV.U32 R5, RZ, RZ, RZ ;
"""


@pytest.fixture(scope="module")
def kernels():
    """Return the kernels of the loaded build by their short names."""
    if not sparsekit.build_info()["cuda"]:
        pytest.skip("this build of sparsekit has no CUDA")
    build = cuda_report.newest_build()
    if build is None:
        pytest.skip("the build folder is gone, and with it what ptxas said")
    found = cuda_report.read(build)
    names = cuda_report.demangle({kernel.symbol for kernel in found})
    return [(names[kernel.symbol], kernel) for kernel in found]


def test_no_kernel_spills(kernels):
    spilling = [
        f"{name} on {kernel.arch}: {kernel}"
        for name, kernel in kernels
        if cuda_report.is_ours(name) and kernel.spills
    ]
    assert not spilling, "\n".join(spilling)


def test_report_has_every_kernel_on_every_arch(kernels):
    declared = cuda_report.declared_kernels()
    assert {"find_kernel", "update_rows_kernel", "sum_chunks_kernel"} <= declared
    for arch in {kernel.arch for _, kernel in kernels}:
        compiled = {cuda_report.base_name(name) for name, kernel in kernels if kernel.arch == arch}
        assert declared <= compiled
    printed = cuda_report.table([kernel for _, kernel in kernels], all_kernels=False)
    assert all(name in printed for name in declared)
    assert "CUB" not in printed


def test_every_kernel_is_in_the_status():
    """docs/gpu-status.md has a row for each kernel."""
    text = (cuda_report.ROOT / "docs" / "gpu-status.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+_kernel)`", row.split("|")[1])}
    assert listed == cuda_report.declared_kernels()


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "share"),
    [
        (32, 0, 256, 1),
        (40, 0, 256, 0.75),
        (64, 0, 256, 0.5),
        (65, 0, 256, 0.375),
        (73, 0, 256, 0.375),
        (96, 0, 256, 0.25),
        (40, 0, 128, 0.75),
        (16, 0, 32, 0.5),  # the limit on blocks bounds the occupancy
        (32, 49 << 10, 256, 0.25),  # shared memory bounds the occupancy
    ],
)
def test_occupancy(registers, shared, threads, share):
    assert cuda_report.occupancy(registers, shared, threads) == share


def test_spills_are_seen():
    ours, theirs = cuda_report.parse("bucketize", LOG)
    assert (ours.registers, ours.stack, ours.spill_stores, ours.spill_loads) == (64, 16, 12, 20)
    assert (ours.arch, ours.shared, ours.spills) == ("sm_90", 128, True)
    assert (theirs.arch, theirs.registers, theirs.spills) == ("sm_100", 4, False)
    assert "SPILLS" in cuda_report.table([ours], all_kernels=False)
    assert "EmptyKernel" not in cuda_report.table([theirs], all_kernels=False)
    assert "EmptyKernel" in cuda_report.table([theirs], all_kernels=True)


def test_output_that_is_not_understood_is_refused():
    with pytest.raises(ValueError, match="no output of ptxas"):
        cuda_report.parse("bucketize", LOG.replace("spill stores", "something new"))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void sparsekit::cuda::(anonymous namespace)::a_kernel<int>(int*, f<(1)>)",
            "a_kernel<int>",
        ),
        ("sparsekit::cuda::_GLOBAL__N__a5c8bb63_13_x_cu_fe6b83b0::b_kernel()", "b_kernel"),
        ("void sparsekit::cuda::c_kernel<sparsekit::BFloat16, 4>(long)", "c_kernel<BFloat16, 4>"),
        ("void cub::detail::scan::Kernel<(int)4>(int)", "cub::detail::scan::Kernel<(int)4>"),
    ],
)
def test_short_names(name, short):
    assert cuda_report.short_name(name) == short
    assert cuda_report.is_ours(short) == ("cub" not in name)


def test_instructions_are_counted():
    counts = cuda_sass.count(SASS)[SYMBOL]
    assert counts == {"LDG.128": 1, "REDG.ADD.F32x4.GPU": 1, "LDL.64": 1}
    assert cuda_sass.uses_local_memory(counts)
    assert cuda_sass.describe(counts) == "1 LDG.128, 1 LDL.64, 1 REDG.ADD.F32x4.GPU"
