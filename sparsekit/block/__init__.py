"""Blocks the import of block.py of the unrelated package ``sparsekit`` on the public index.

Installed after ours, that package replaces our ``__init__.py`` with its own, which imports
``block`` first. Python prefers a folder to a file, so the import ends here, with an error that says
why.
"""

from .._distribution import refuse_mixture

refuse_mixture()
raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
