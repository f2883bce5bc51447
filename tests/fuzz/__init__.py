"""A seeded differential fuzzer: compares every op and the layers with `tests/reference`.

`make fuzz SECONDS=n`, or ``python -m tests.fuzz --help``.
"""

import sys
from pathlib import Path

# This lets `import conftest` work as under pytest.
sys.path.insert(0, str(Path(__file__).parents[1]))
