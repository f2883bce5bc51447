"""Lets `python -m sparsekit` run the command ``sparsekit``."""

import sys

from .cli import main

sys.exit(main())
