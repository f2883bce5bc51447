"""Every engine gives the same bits, and a failed load raises one clear ImportError."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ops.optimizer_rules import CASES, widths

from sparsekit import _load

PACKAGE = Path(_load.__file__).parent
# Rule, settings and, for each state, whether it has a single value per row.
RULES = [(rule, v, [w == 1 for w in widths(rule, count, 2)]) for rule, v, count in CASES.values()]

# A program that calls every op and prints a digest of each result. Its inputs come from numpy:
# torch's random normals depend on the instruction set.
DIGESTS = (
    f"RULES = {RULES}\n"
    + """
import hashlib
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import sparsekit
from sparsekit import ops

random = np.random.default_rng(0)
called = set()


class Record(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        called.add(str(func))
        return func(*args, **(kwargs or {}))


def rows(n, dim, dtype):
    return torch.from_numpy(random.standard_normal((n, dim))).to(dtype)


def integers(low, high, n):
    return torch.from_numpy(random.integers(low, high, n))


def show(name, *tensors):
    for i, tensor in enumerate(tensors):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        print("digest", f"{name}:{i}", hashlib.sha256(data).hexdigest())


def use_everything():
    for key_dtype in (torch.int64, torch.int32):
        keys = integers(-2000, 2000, 9000).to(key_dtype)
        keys[::100] = 0
        show(f"unique {key_dtype}", *ops.unique(keys))
        show(f"hash_integers {key_dtype}", ops.hash_integers(keys, 5))
        _, inverse, _, count = torch.ops.sparsekit.unique_padded(keys)
        show(f"unique_padded {key_dtype}", inverse, count)
        show(f"bucketize {key_dtype}", *ops.bucketize(keys, 7))
        words = torch.ops.sparsekit.kept_list([integers(0, 9, 1) for _ in range(3)])
        show("words", torch.ops.sparsekit.words_of([words]))
        owners = torch.arange(65536).remainder(7).to(torch.int16)
        show(f"bucketize {key_dtype} by map", *ops.bucketize(keys, 7, owners))
        for load_factor in (0.6, 1.0):
            table = sparsekit.HashTable(4000, load_factor=load_factor)
            table.hash_seed.fill_(-0x123456789ABCDEF)
            name = f"table {key_dtype} {load_factor}"
            show(f"{name} insert", table.find_or_insert(keys[:5000]), table.buckets)
            show(f"{name} find", table.find(keys), table.keys())
            larger = sparsekit.HashTable(9000).buckets
            ops.hash_table_copy_(larger, table.buckets, table.hash_seed, len(table) // 2)
            show(f"{name} copy", larger)
            kept = torch.arange(len(table)) % 3 > 0
            new_rows = ops.compact_rows((~kept).nonzero().squeeze(1), len(table))
            ops.hash_table_renumber_(table.buckets, table.hash_seed, new_rows)
            table.size.fill_(int(kept.sum()))
            show(f"{name} renumber", new_rows, table.buckets, table.keys())
            in_use, scores = len(table), integers(0, 50, len(table))
            pinned = integers(0, in_use, 300)
            for kind in (1, 2):
                lowest = scores, table.buckets, in_use, kind, 7, 60, pinned, in_use // 3
                show(f"{name} lowest {kind}", *ops.lowest_rows(*lowest))
                dropped = ops.group_drop_lowest_(
                    [table.buckets], [table.hash_seed], [table.size], [scores.clone()],
                    [torch.tensor(0)], [pinned.int()],
                    torch.tensor([[kind, 7, 60, in_use // 9, 1, 1, 1]])
                )
                show(f"{name} dropped {kind}", *dropped, table.buckets, table.keys())
                in_use = len(table)
                scores, pinned = scores[:in_use], integers(0, in_use, 300)
            more = integers(-(2**31), 2**31, 5000)
            try:
                table.find_or_insert(more)
            except sparsekit.TableFullError:
                show(f"{name} refused", table.buckets, table.size)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for dim in (1, 3, 16, 64, 100, 257):
            name = f"{dtype} {dim}"
            data, ids = rows(3000, dim, dtype), integers(-1, 40, 3000)
            ids[::2] = 7
            show(f"segment_sum {name}", ops.unsorted_segment_sum(data, ids, 40))
            show(f"gather {name}", ops.gather_rows(data, ids))
            offsets = torch.cat([integers(0, 3001, 60), torch.tensor([0, 3000])]).sort()[0]
            weight = rows(40, dim, dtype).requires_grad_()
            sample_weights = rows(3000, 1, dtype).squeeze(1).requires_grad_()
            for combiner in ("sum", "mean", "sqrtn"):
                for weights in ([], [sample_weights]):
                    bags = ops.embedding_bag(weight, ids, offsets, combiner, *weights)
                    leaves = [weight, *weights]
                    gradients = torch.autograd.grad(bags, leaves, torch.ones_like(bags) * 0.3)
                    show(f"bags {name} {combiner} {len(weights)}", bags, *gradients)
            moved, places = rows(3000, dim, dtype), torch.full((3000,), -1, dtype=torch.int32)
            places[2000::3] = torch.arange(334, dtype=torch.int32)
            ops.move_rows_([moved], places, 2000, [torch.ones((), dtype=dtype)])
            show(f"move rows {name}", moved)
            out = torch.empty(500, dim, dtype=dtype)
            for distribution in ("constant", "uniform", "normal"):
                ops.init_rows_(out, integers(-(2**63), 2**63 - 1, 500), distribution=distribution)
                show(f"init {name} {distribution}", out)
            wide = torch.float32 if dtype == torch.bfloat16 else dtype
            for rule, settings, of_rows in RULES:
                states = [rows(500, 1 if one else dim, wide) ** 2 for one in of_rows]
                count = len(states)
                weight, row_step = rows(500, dim, dtype), torch.zeros(500, dtype=torch.int32)
                touched = torch.from_numpy(random.permutation(500)[:300])
                ops.update_rows_(weight, states, row_step, touched, rows(300, dim, dtype),
                                 torch.tensor([3]), rule, settings, rounding_seed=7)
                if (rule, count) in (("sgd", 1), ("adam", 2)):
                    numbers = torch.full((400, 2), 0.01, dtype=torch.float64)
                    ops.catch_up_rows_(weight, states, row_step, None, numbers, 4, rule, settings)
                show(f"{rule} {count} {name}", weight, *states)


def use_layers():
    dims = (3, 16, 64, 100)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for fused in (False, True):
            name = f"group {dtype} {fused}"
            group = sparsekit.EmbeddingGroup({
                f"t{t}": sparsekit.DistributedEmbedding(
                    ("sum", "mean", "sqrtn")[t % 3], 5000, dim, 1, 90, name=f"t{t}", dtype=dtype
                ) for t, dim in enumerate(dims)
            })
            optimizer = sparsekit.optim.LazyAdam(group.parameters(), lr=0.1)
            handle = sparsekit.optim.fuse_in_backward(optimizer, group) if fused else None
            for step in range(3):
                group.train(step < 2)
                inputs = {}
                for t in group.layers:
                    bags = 9000 if (fused, dtype, t) == (True, torch.float32, "t2") else 300
                    offsets = torch.arange(bags + 1) * 9000 // bags
                    inputs[t] = integers(-2000, 2000, 9000), offsets
                out = group(inputs)
                show(f"{name} forward", *out.values())
                torch.autograd.backward(
                    list(out.values()), [torch.ones_like(o) * 0.3 for o in out.values()]
                )
                for p in group.parameters():
                    if p.grad is not None:
                        show(f"{name} gradient", p.grad._indices(), p.grad._values())
                optimizer.step()
                optimizer.zero_grad()
                show(f"{name} weights", *group.parameters())


def use_what_ranks_need():
    dims, none = [3, 16, 64], torch.empty(0, dtype=torch.int64)
    owners = torch.from_numpy(random.integers(0, 3, 65536)).to(torch.int16)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        keys = [integers(-2000, 2000, 9000) for _ in dims]
        features = torch.tensor([[t, t, 0, 9000, 3, 1, t, 0, dim] for t, dim in enumerate(dims)])
        by_owner, counts, numbers, inverse, places, bags, key_starts = ops.group_bucketize(
            [owners], [0, -1, 0], [-1] * 3, keys, [none] * 3, features, 3
        )
        show(f"bucketize {dtype}", by_owner[: int(numbers.sum())], counts, numbers, inverse)
        ends = counts.T.cumsum(1)
        sizes = counts.T * torch.tensor(dims)[:, None]
        begins = (sizes.flatten().cumsum(0) - sizes.flatten()).view(3, 3)
        come = torch.stack([begins, ends], 2)
        rows_of = ops.group_exchange_rows(places, bags, features, come, dims)
        out = torch.zeros(int(sizes.sum()), dtype=dtype)
        grads = [rows(9000, dim, dtype) for dim in dims]
        ops.group_embedding_bag_backward_at_(
            out, [1] * 3, grads, dims, inverse, rows_of, numbers, bags, features, [], key_starts
        )
        show(f"gradients {dtype}", out)
        scores = [integers(-(2**63), 2**63 - 1, 9000) for _ in dims]
        distinct = integers(0, 9000, 27000).int(), numbers.clone()
        for occurrences in (None, integers(0, 9, 27000)):
            ops.group_touch_(
                scores, inverse, *distinct, bags, features, torch.tensor([[1, 0], [2, 7], [2, 0]]),
                [torch.tensor([2**31 + t]) for t in range(3)], occurrences
            )
        show(f"scores {dtype}", *scores)


torch.set_num_threads(1)
with Record():
    use_everything()
    use_layers()
    use_what_ranks_need()
print("engine", sparsekit.build_info()["cpu_engine"])
schemas = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("sparsekit::")}
print("missing", sorted(schemas - {name.replace(".", "::", 1).split(".")[0] for name in called}))
"""
)


def run(program, package_parent=PACKAGE.parent, capability=None):
    """Run Python code that imports this package, with ATEN_CPU_CAPABILITY set or unset."""
    path = os.pathsep.join([str(package_parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("ATEN_CPU_CAPABILITY", None)
    if capability is not None:
        environment["ATEN_CPU_CAPABILITY"] = capability
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd="/", capture_output=True, text=True
    )


def digests(capability):
    """Return a dict of result names to digests, and a dict of the other lines printed."""
    done = run(DIGESTS, capability=capability)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    results = {" ".join(words[1:-1]): words[-1] for words in lines if words[0] == "digest"}
    return results, {words[0]: words[1] for words in lines if words[0] != "digest"}


@pytest.fixture(scope="module")
def generic():
    results, about = digests("default")
    assert about["engine"] == "generic"
    assert about["missing"] == "[]"
    assert len(results) > 300
    return results


@pytest.mark.parametrize("engine", ["avx2", "avx512"])
def test_engines_give_the_same_bits(generic, engine):
    if missing := _load.ENGINES[engine] - _load.processor_flags():
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    results, about = digests(engine)
    assert about["engine"] == engine
    assert [name for name in results if results[name] != generic.get(name)] == []
    assert len(results) == len(generic)


def test_what_engines_need_is_what_they_are_compiled_with():
    text = (Path(__file__).parents[1] / "CMakeLists.txt").read_text()
    for engine, needs in _load.ENGINES.items():
        options = re.search(rf"add_core\({engine} ([^)]*)\)", text)[1]
        flags = re.findall(r"-m(\w+)(?=\s|$)", options)
        assert {"bmi1" if flag == "bmi" else flag for flag in flags} == needs


# Loading


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Copy the compiled libraries to a folder, and make load() use that folder."""
    ignored = shutil.ignore_patterns("simt", "libsparsekit_cuda.so")
    shutil.copytree(PACKAGE / "lib", tmp_path / "lib", ignore=ignored)
    monkeypatch.setattr(_load, "_LIB", tmp_path / "lib")
    monkeypatch.setattr(_load, "_other_copy", lambda: None)
    return tmp_path / "lib"


def minimum():
    return ".".join(map(str, _load.MINIMUM_TORCH))


AVX2 = "avx2 bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("capability", "flags", "engines"),
    [
        ("AVX512", AVX512, ["avx512", "avx2", "generic"]),
        ("AVX512", AVX512.replace("avx512dq ", ""), ["avx2", "generic"]),
        ("AVX512", AVX2, ["avx2", "generic"]),
        ("AVX512", "sse4_2", ["generic"]),
        ("AVX2", AVX512, ["avx2", "generic"]),
        ("AVX2", "avx2", ["generic"]),
        ("DEFAULT", AVX512, ["generic"]),
        ("a name to come", AVX512, ["generic"]),
    ],
)
def test_an_engine_is_chosen_by_what_is_there(libraries, monkeypatch, capability, flags, engines):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(_load, "processor_flags", lambda: frozenset(flags.split()))
    for name in ("avx512", "avx2"):
        (libraries / name).mkdir(exist_ok=True)  # a build for another processor lacks these engines
    for engine in engines:
        assert _load.instruction_set() == engine
        shutil.rmtree(libraries / engine, ignore_errors=True)


# torch reads the CPU's features from ATEN_CPU_CAPABILITY, sparsekit reads them from /proc/cpuinfo.
FORCED = """
import builtins, io, warnings
import torch

def stand_in(path, *arguments, **keywords):
    if path == "/proc/cpuinfo":
        return io.StringIO("processor : 0\\nflags : fpu FLAGS syscall\\n\\nprocessor : 1\\n")
    return really_open(path, *arguments, **keywords)

really_open, builtins.open = open, stand_in
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import sparsekit
print(sparsekit.build_info()["cpu_engine"], *[w.message for w in caught], sep="|")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a processor without these engines")
@pytest.mark.parametrize(
    ("flags", "missing", "engine"),
    [
        (AVX2, "avx512bw, avx512dq, avx512f, avx512vl", "avx2"),
        ("avx avx512f", "avx2, avx512bw, avx512dq, avx512vl, bmi1, bmi2", "generic"),
    ],
)
def test_a_forced_instruction_set_that_the_processor_lacks(flags, missing, engine):
    done = run(FORCED.replace("FLAGS", flags), capability="avx512")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        f"{engine}|sparsekit: torch is set to avx512 (ATEN_CPU_CAPABILITY), but this processor has "
        f"no {missing}; running the {engine} engine\n"
    )


@pytest.mark.parametrize("version", ["2.10.1", "2.10.0+cpu", "1.13.1", "2.9.0a0+git1234"])
def test_a_torch_that_is_too_old(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError) as caught:
        _load.load()
    for part in (f"torch >= {minimum()}", f"found torch {version}", "pip install"):
        assert part in str(caught.value)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.12.0a0+git1234", "3.0.0"])
def test_a_torch_that_is_new_enough(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    assert _load._torch_version() >= _load.MINIMUM_TORCH


def test_too_old_a_torch_at_import():
    done = run("import torch; torch.__version__ = '2.10.0'; import sparsekit")
    assert done.returncode == 1
    assert re.search(rf"^ImportError: .*torch >= {minimum()}.*2\.10\.0", done.stderr, re.MULTILINE)
    assert "During handling" not in done.stderr


def library_of(libraries, which):
    folder = libraries / _load.instruction_set() if which == "core" else libraries
    return folder / f"libsparsekit_{which}.so"


@pytest.mark.parametrize("which", ["core", "torch"])
def test_a_missing_library(libraries, which):
    library = library_of(libraries, which)
    library.unlink()
    with pytest.raises(ImportError) as caught:
        _load.load()
    assert f"{library} does not exist" in str(caught.value)
    assert "make build" in str(caught.value)


@pytest.mark.parametrize("which", ["core", "torch"])
@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF" + b"\x00" * 100])
def test_a_library_that_does_not_load(libraries, which, content):
    library = library_of(libraries, which)
    library.unlink()  # replace the file: a process may have the old one mapped
    library.write_bytes(content)
    with pytest.raises(ImportError) as caught:
        _load.load()
    for part in (str(library), f"torch {torch.__version__}", f"torch >= {minimum()}", "Rebuild"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_second_copy_in_one_process(tmp_path):
    ignored = shutil.ignore_patterns("simt", "libsparsekit_cuda.so", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "sparsekit", ignore=ignored)
    program = (
        "import sys, sparsekit\n"
        "for name in [name for name in sys.modules if name.startswith('sparsekit')]:\n"
        "    del sys.modules[name]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import sparsekit\n"
    )
    done = run(program)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: sparsekit: this process has already loaded another copy")
    assert str(PACKAGE / "lib") in last
    assert str(tmp_path) in last


def test_a_source_tree_that_was_not_built(tmp_path):
    shutil.copytree(
        PACKAGE, tmp_path / "sparsekit", ignore=shutil.ignore_patterns("*.so", "lib", "__pycache__")
    )
    done = run("import sparsekit", package_parent=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "make build" in last
