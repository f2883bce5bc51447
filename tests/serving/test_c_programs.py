"""C and C++ programs build against the package's header and library, as a wheel installs them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sparsekit
from sparsekit.serving import Snapshot
from sparsekit.serving.writer import SnapshotWriter

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving" / "lookup.c"
PACKAGE = Path(sparsekit.__file__).parent
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Copy the package's files for C to a folder as pip would, with a space in its name."""
    package = tmp_path_factory.mktemp("site packages") / "sparsekit"
    shutil.copytree(PACKAGE / "include", package / "include")
    (package / "lib").mkdir()
    shutil.copy(PACKAGE / "lib" / "libsparsekit_serving.so", package / "lib")
    for folder in ("cmake", "pkgconfig"):
        shutil.copytree(PACKAGE / "lib" / folder, package / "lib" / folder)
    return package


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write a snapshot with a table "ads", of which every other key from 100 to 150 has a row."""
    path = tmp_path_factory.mktemp("model") / "model.sks"
    keys = np.arange(100, 150, 2)
    with SnapshotWriter(path, version=7) as snapshot:
        table = snapshot.table("ads", 3)
        table.append(keys, np.stack([keys, keys * 2, keys * 3], 1).astype(np.float32))
    return path


def run(*command, **options):
    """Run a command and return its result; it must not need anything of this environment."""
    environment = {"PATH": os.environ["PATH"], **options.pop("env", {})}
    return subprocess.run(command, env=environment, capture_output=True, text=True, **options)


def built(*command, **options):
    done = run(*command, **options)
    assert done.returncode == 0, done.stdout + done.stderr


def looks_up(program, model):
    """Require that a program finds what it is to find."""
    done = run(program, model, "ads", "100")
    assert (done.returncode, done.stderr) == (0, "")
    with Snapshot(model) as snapshot:
        total = snapshot.lookup("ads", np.arange(100, 126)[None], combiner="sum")[0, 0]
    assert done.stdout == (
        f"version 7: 13 of 26 keys have a row; the sum begins with {total:.6f}\n"
    )


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 64


@needs_compiler
def test_flags_by_the_module(model, tmp_path):
    command = [sys.executable, "-m", "sparsekit.serving", "--cflags", "--libs"]
    printed = subprocess.run(
        command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    ).stdout
    built("gcc", *STRICT, EXAMPLE, *printed.split(), "-o", tmp_path / "lookup", cwd=tmp_path)
    looks_up(tmp_path / "lookup", model)


@needs_compiler
def test_a_copy_elsewhere(installed, model, tmp_path):
    """The library is found relative to the package, wherever that is."""
    lib = installed / "lib"
    flags = [f"-I{installed / 'include'}", f"-L{lib}", f"-Wl,-rpath,{lib}", "-lsparsekit_serving"]
    built("gcc", *STRICT, EXAMPLE, *flags, "-o", tmp_path / "lookup", cwd=tmp_path)
    looks_up(tmp_path / "lookup", model)


@needs_compiler
@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_header_compiles_alone(installed, language, tmp_path):
    program = tmp_path / "alone"
    program.write_text('#include "sparsekit_serving.h"\nint main(void) { return 0; }\n')
    flags = ["-std=c++11"] if language == "c++" else STRICT[:1]
    built("gcc", "-x", language, *flags, *STRICT[1:], f"-I{installed / 'include'}", "-c",
          "-o", tmp_path / "alone.o", program)  # fmt: skip


@needs_compiler
def test_pkg_config(installed, model, tmp_path):
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    plain = tmp_path / "plain"  # flags with spaces need a shell
    shutil.copytree(installed, plain)
    folder = {"PKG_CONFIG_PATH": str(plain / "lib" / "pkgconfig")}
    printed = run("pkg-config", "--cflags", "--libs", "sparsekit_serving", env=folder)
    assert printed.returncode == 0, printed.stderr
    assert str(PACKAGE) not in printed.stdout
    built("gcc", *STRICT, EXAMPLE, *printed.stdout.split(), "-o", tmp_path / "lookup", cwd=tmp_path)
    looks_up(tmp_path / "lookup", model)
    version = run("pkg-config", "--modversion", "sparsekit_serving", env=folder).stdout
    assert version.strip() == sparsekit.__version__


CMAKE = """
cmake_minimum_required(VERSION 3.15)
project(example C)
find_package(sparsekit_serving {version} REQUIRED)
add_executable(lookup "{example}")
set_property(TARGET lookup PROPERTY C_STANDARD 99)
target_link_libraries(lookup PRIVATE sparsekit::serving)
"""


@needs_compiler
def test_find_package(installed, model, tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")

    def configured(version):
        text = CMAKE.format(version=version, example=EXAMPLE)
        (tmp_path / "CMakeLists.txt").write_text(text)
        return run("cmake", "-S", tmp_path, "-B", tmp_path / "build",
                   f"-DCMAKE_PREFIX_PATH={installed}")  # fmt: skip

    refused = configured("999.0")
    assert refused.returncode != 0
    assert "999.0" in refused.stderr
    done = configured(sparsekit.__version__)
    assert done.returncode == 0, done.stderr
    built("cmake", "--build", tmp_path / "build")
    looks_up(tmp_path / "build" / "lookup", model)


@needs_compiler
def test_errors_of_the_example(installed, model, tmp_path):
    lib = installed / "lib"
    built("gcc", EXAMPLE, f"-I{installed / 'include'}", f"-L{lib}", f"-Wl,-rpath,{lib}",
          "-lsparsekit_serving", "-o", tmp_path / "lookup")  # fmt: skip
    for arguments, message in [
        ([tmp_path / "none.sks", "ads"], rf"sk_open: {tmp_path}/none.sks.*: No such file"),
        ([model, "adz"], r'sk_find_table: .*model.sks: no table is named "adz"'),
        ([EXAMPLE, "ads"], r"sk_open: .*lookup.c.*"),
        ([], r"usage: "),
    ]:
        done = run(tmp_path / "lookup", *arguments)
        assert done.returncode != 0
        assert re.search(message, done.stderr), done.stderr


def test_only_functions_of_the_header_are_exported():
    library = PACKAGE / "lib" / "libsparsekit_serving.so"
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    lines = run("nm", "-D", "--defined-only", library).stdout.splitlines()
    header = (PACKAGE / "include" / "sparsekit_serving.h").read_text()
    declared = re.findall(r"^SK_API .*?\b(sk_\w+)\(", header, re.MULTILINE)
    assert len(declared) > 15
    assert sorted(line.split()[-1].partition("@")[0] for line in lines) == sorted(declared)


def test_the_library_needs_only_the_c_library():
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    library = PACKAGE / "lib" / "libsparsekit_serving.so"
    needed = re.findall(r"\(NEEDED\).*\[(.*?)\]", run("readelf", "-d", library).stdout)
    assert "libc.so.6" in needed
    assert set(needed) <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
