"""`python -m sparsekit` is the command ``sparsekit``."""

import sys

from .cli import main

sys.exit(main())
