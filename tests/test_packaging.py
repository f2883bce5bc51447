"""A source distribution holds all that a build needs."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_source_distribution_can_be_built(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path]
    command[3:3] = ["egg_info", "--egg-base", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    needed = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    cmake = (ROOT / "CMakeLists.txt").read_text()
    # What CMakeLists.txt names besides.
    needed |= set(re.findall(r"\b(?:tools|sparsekit)/[\w/]+\.py\b", cmake))
    needed |= {"CMakeLists.txt", "setup.py", "pyproject.toml", "version.txt", "README.md"}
    assert len(needed) > 50
    assert needed - names == set()
