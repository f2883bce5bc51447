"""Runs nvcc, and stores ptxas's report on each kernel in a file next to the object file.

CMakeLists.txt inserts this program before the compiler's command. Thus `make cuda-report` can read
the reports without compiling again, and a build prints only the other lines, such as warnings.
"""

import subprocess
import sys
from pathlib import Path


def is_report(line: str) -> bool:
    """Return whether the line belongs to the output of `-Xptxas -v`."""
    return line.startswith("ptxas info") or "bytes stack frame" in line


def main(command: list[str]) -> int:
    """Run the command; return its exit status."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines(keepends=True)
    sys.stderr.writelines(line for line in lines if not is_report(line))
    if done.returncode == 0 and "-o" in command:
        log = Path(command[command.index("-o") + 1] + ".ptxas")
        log.write_text("".join(line for line in lines if is_report(line)))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
