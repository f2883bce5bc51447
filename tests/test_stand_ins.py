"""The stand-in for hypothesis has every name that the tests use."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
STAND_IN = TESTS / "stand_ins" / "hypothesis"


def defined(path):
    """Return the names defined in a module, without its imports."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_has_all_that_is_used():
    names = {"": defined(STAND_IN / "__init__.py") | {"strategies"}}
    names["strategies"] = defined(STAND_IN / "strategies.py")
    missing, seen = set(), 0
    for path in sorted(TESTS.rglob("*.py")):
        # Files that gpu_check.sh does not run may use the real hypothesis.
        if STAND_IN in path.parents or path.name.startswith("test_hashing"):
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hypothesis"):
                module = node.module.partition(".")[2]
                used = {(module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "st":
                used = {("strategies", node.attr)}
            else:
                continue
            seen += len(used)
            missing |= {(path.name, *use) for use in used if use[1] not in names[use[0]]}
    assert seen > 20
    assert missing == set()
