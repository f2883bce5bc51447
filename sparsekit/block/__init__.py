"""Blocks the import of block.py of the unrelated package ``sparsekit`` on the public index.

If that package is installed after ours, it replaces our ``__init__.py`` by its own, which imports
``block`` first. Python prefers a folder to a file, so it imports this file, which raises an error
that explains the conflict.
"""

from .._distribution import refuse_mixture

refuse_mixture()
raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
