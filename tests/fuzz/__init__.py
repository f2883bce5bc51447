"""A seeded differential fuzzer: every op and the layers against `tests/reference`.

`make fuzz SECONDS=n`, or ``python -m tests.fuzz --help``.
"""

import sys
from pathlib import Path

# For `import conftest`, as pytest has it.
sys.path.insert(0, str(Path(__file__).parents[1]))
