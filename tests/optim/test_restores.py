"""After random sequences of training and restoring, a table equals a reference model.

SPARSEKIT_RESTORES=300 runs 300 sequences of each optimizer; the default is 1.
"""

import os

import pytest

from .restores import NAMES, run

SEQUENCES = int(os.environ.get("SPARSEKIT_RESTORES", "1"))


@pytest.mark.time_limit(3600 if SEQUENCES > 1 else 180)
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_come_back(name):
    for seed in range(SEQUENCES):
        run(name, seed)
