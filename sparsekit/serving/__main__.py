"""Prints flags for C compilers: ``gcc lookup.c $(python -m sparsekit.serving --cflags --libs)``."""

import argparse
import shlex
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def main() -> None:
    """Print the flags or folders that the arguments ask for, on one line."""
    parser = argparse.ArgumentParser(
        prog="python -m sparsekit.serving",
        description="Print where the serving library is, for compilers and build systems.",
    )
    include, lib = PACKAGE / "include", PACKAGE / "lib"
    libs = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-lsparsekit_serving"]
    for option, words, of in [
        ("--cflags", [f"-I{include}"], "flags for compilers"),
        ("--libs", libs, "flags for linkers"),
        ("--cmake", [str(PACKAGE)], "folder to add to CMAKE_PREFIX_PATH"),
        ("--pkgconfig", [str(lib / "pkgconfig")], "folder to add to PKG_CONFIG_PATH"),
    ]:
        parser.add_argument(
            option, dest="words", action="append_const", const=words, help=f"print {of}"
        )
    args = parser.parse_args()
    if not args.words:
        parser.error("say what to print: --cflags, --libs, --cmake or --pkgconfig")
    print(shlex.join(word for words in args.words for word in words))


if __name__ == "__main__":
    main()
