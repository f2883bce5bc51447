"""Tests of the package's name when installed, and of the contents of its source distribution."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import tomllib

from sparsekit import _distribution

ROOT = Path(__file__).resolve().parents[1]
NAME = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]


def test_the_source_distribution_can_be_built(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path]
    command[3:3] = ["egg_info", "--egg-base", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    needed = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    cmake = (ROOT / "CMakeLists.txt").read_text()
    # Files that CMakeLists.txt also needs.
    needed |= set(re.findall(r"\b(?:tools|sparsekit)/[\w/]+\.py\b", cmake))
    needed |= {"CMakeLists.txt", "setup.py", "pyproject.toml", "version.txt", "README.md"}
    assert len(needed) > 50
    assert needed - names == set()


def test_every_message_and_page_installs_this_package():
    """On the public index, our import name is another package, which no text may install."""
    asked = (
        "setup.py",
        "README.md",
        "CONTRIBUTING.md",
        "sparsekit",
        "docs",
        "examples",
        "benchmarks",
    )
    found = []
    for path in (file for name in asked for file in [ROOT / name, *(ROOT / name).rglob("*.*")]):
        if path.suffix in {".py", ".md"}:
            found += re.findall(r"pip install\W+(sparsekit[\w-]*)\[", path.read_text())
    assert len(found) >= 5
    assert set(found) == {NAME}


OTHER = "from . import block\nfrom .block import BlockSpec\n"


@pytest.mark.parametrize("last", ["ours", "the other's"])
def test_files_of_the_other_package_in_our_folder(tmp_path, monkeypatch, last):
    """Importing a mixture of two packages raises, since pip overwrites files without a warning."""
    package = tmp_path / "sparsekit"
    package.mkdir()
    for file in (ROOT / "sparsekit").iterdir():
        (package / file.name).symlink_to(file)
    (package / "block.py").write_text("class BlockSpec: pass\n")
    if last != "ours":
        (package / "__init__.py").unlink()
        (package / "__init__.py").write_text(OTHER)
    record = tmp_path / "sparsekit-0.1.5.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("sparsekit/__init__.py,sha256=0,1\nsparsekit/block.py,sha256=0,1\n")

    def run(code):
        command = [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}",
        ]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    for code in ("import sparsekit", "from sparsekit.cli import main"):
        done = run(code)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            f"ImportError: {package} holds files of two distributions: of {NAME}, which this is, "
            f"and of sparsekit 0.1.5, which is another package or an older one of ours. Remove "
            f"both, then install {NAME} again: pip uninstall -y sparsekit {NAME}"
        )
    record.write_text("../../../bin/sparsekit,sha256=0,1\n__editable__.sparsekit-0.1.0.pth,,\n")
    monkeypatch.setattr(_distribution, "_PACKAGE", package)
    _distribution.refuse_mixture()  # an editable installation has no files here
