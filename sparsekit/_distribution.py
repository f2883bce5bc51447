"""Name under which pip knows this package, ``sparsekit-torch``; it is imported as ``sparsekit``.

The public index has an unrelated package ``sparsekit``; pip would install it into our folder.
"""

from __future__ import annotations

from pathlib import Path

NAME = "sparsekit-torch"
_PACKAGE = Path(__file__).parent


def refuse_mixture() -> None:
    """Check that no distribution ``sparsekit`` was installed into our folder, before or after ours.

    Raises:
        ImportError: there is one, so the files of two packages are mixed.
    """
    # Neither an editable installation nor one in another folder lists this file.
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
