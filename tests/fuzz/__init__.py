"""A seeded differential fuzzer: compares every op and the layers with `tests/reference`.

Run it with `make fuzz SECONDS=n`; ``python -m tests.fuzz --help`` lists its options.
"""

import sys
from pathlib import Path

# This lets `import conftest` work as under pytest.
sys.path.insert(0, str(Path(__file__).parents[1]))
