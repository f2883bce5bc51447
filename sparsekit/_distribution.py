"""Detects files of the unrelated PyPI package ``sparsekit`` in our folder.

On PyPI, our package is called ``sparsekit-torch``, but it is imported as ``sparsekit``. Therefore
``pip install sparsekit`` installs the unrelated package into our folder.
"""

from __future__ import annotations

from pathlib import Path

NAME = "sparsekit-torch"
_PACKAGE = Path(__file__).parent


def refuse_mixture() -> None:
    """Check that pip has not installed the unrelated package ``sparsekit`` into our folder.

    Raises:
        ImportError: pip has done so, and the folder now mixes files from two packages.
    """
    # Only a package installed into our folder lists this file; editable installations do not.
    ours = f"{_PACKAGE.name}/__init__.py,"
    for info in _PACKAGE.parent.glob("sparsekit-*.dist-info"):
        record = info / "RECORD"
        if record.exists() and ours in record.read_text(errors="replace"):
            other = info.name.removesuffix(".dist-info").replace("-", " ")
            raise ImportError(
                f"{_PACKAGE} holds files of two distributions: of {NAME}, which this is, and of "
                f"{other}, which is another package or an older one of ours. Remove both, then "
                f"install {NAME} again: pip uninstall -y sparsekit {NAME}"
            )
