"""Blocks the import of block.py from the unrelated package ``sparsekit`` on the public index.

If that package is installed after ours, it replaces our ``__init__.py`` with its own, which first
imports ``block``. Python prefers a folder to a module file, so it imports this folder instead, and
this file raises an error that explains the conflict.
"""

from .._distribution import refuse_mixture

refuse_mixture()
raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
