"""Protocol and rules are functions of their arguments: files, clock, randomness and environment come in from outside.

The import contract keeps the modules out by which most of that is done; this looks for what needs no import, or hides
in one that has pure parts too (`time.strptime`, `numpy.random.Philox`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.tree import SETTINGS, Tree

CONTRACTS = SETTINGS["tool"]["importlinter"]["contracts"]
(PURE,) = (each["source_modules"] for each in CONTRACTS if each["name"] == "the protocol and the rules do no I/O")
BUILTINS = {"open", "print", "input", "eval", "exec", "breakpoint", "__import__", "globals"}
# Methods that read, write or ask the clock, whatever they are called on.
METHODS = {
    *("read_text", "read_bytes", "write_text", "write_bytes", "open", "tofile", "mkdir", "unlink"),
    *("now", "utcnow", "today"),
}
# Of these modules only the named parts are functions of their arguments; gmtime and default_rng only if given any.
PURE_PARTS = {
    "time": {"strptime", "strftime", "gmtime"},
    "numpy.random": {"Generator", "Philox", "default_rng"},
}
NEEDS_ARGUMENTS = {"time.gmtime": 1, "time.strftime": 2, "numpy.random.default_rng": 1, "numpy.random.Philox": 1}
FILE_FUNCTIONS = {
    f"numpy.{name}" for name in ("load", "save", "savez", "fromfile", "memmap", "loadtxt", "savetxt", "genfromtxt")
}


def impurities(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of everything in a module that is no function of its arguments."""
    names: dict[str, str] = {}
    module = ast.parse(source)
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.partition(".")[0]
                names[each.asname or top] = each.name if each.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})

    def full_name(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{full_name(node.value)}.{node.attr}"
        return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            called = full_name(node.func)
            if called in BUILTINS or called in FILE_FUNCTIONS or called.rpartition(".")[2] in METHODS:
                yield node.lineno, called
            elif len(node.args) < NEEDS_ARGUMENTS.get(called, 0):
                yield node.lineno, f"{called} without arguments"
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            owner, _, part = full_name(node).rpartition(".")
            if owner in PURE_PARTS and part not in PURE_PARTS[owner]:
                yield node.lineno, full_name(node)


def _files(module: Path) -> list[Path]:
    return sorted(module.rglob("*.py")) if module.is_dir() else [module.with_suffix(".py")]


def _impure_places(root: Path) -> set[tuple[Path, int, str]]:
    return {
        (path, line, what)
        for module in PURE
        for path in (*_files(root / module.replace(".", "/")), root / "fedsilo/grading/__init__.py")
        if "_generated" not in path.parts
        for line, what in impurities(path.read_text())
    }


def test_protocol_and_rules_are_functions_of_their_arguments(clean_tree: Tree) -> None:
    assert _impure_places(clean_tree.root) == set()


IMPURE = [
    ('open("x")', "open"),
    ("print(1)", "print"),
    ('from pathlib import Path; Path("x").read_text()', ".read_text"),
    ("a.b.write_bytes(c)", "a.b.write_bytes"),
    ("import time; time.time()", "time.time"),
    ("from time import monotonic as planted_clock; planted_clock()", "time.monotonic"),
    ("import time; clock = time.time_ns", "time.time_ns"),
    ("import time; time.gmtime()", "time.gmtime without arguments"),
    ('import time; time.strftime("%Y")', "time.strftime without arguments"),
    ("from datetime import datetime, UTC; datetime.now(UTC)", "datetime.datetime.now"),
    ("import numpy as np; np.random.normal(3)", "numpy.random.normal"),
    ("import numpy as np; np.random.default_rng()", "numpy.random.default_rng without arguments"),
    ("from numpy import random; random.seed(1)", "numpy.random.seed"),
    ('import numpy; numpy.load("x")', "numpy.load"),
    ("import numpy; numpy.zeros(3).tofile(y)", ".tofile"),
    ('__import__("os")', "__import__"),
]


@pytest.mark.parametrize("module", ["fedsilo.protocol.methods.pubswap.step", "policies.capacity"])
def test_planted_impurities_are_found(module: str, tree: Tree) -> None:
    planted = [
        (tree.plant(module, f"def _planted_{number}(a, c, y):\n    {statement}"), what)
        for number, (statement, what) in enumerate(IMPURE)
    ]
    assert _impure_places(tree.root) == {(place.path, place.line + 1, what) for place, what in planted}


@pytest.mark.parametrize(
    "statement",
    [
        'import time; time.strftime("%Y", time.gmtime(0))',
        'import time; time.strptime("2026", "%Y")',
        "import numpy as np; np.random.Generator(np.random.Philox(7)).normal(0.0, 1.0)",
        "import numpy as np; np.frombuffer(b'')",
    ],
)
def test_what_is_a_function_of_its_arguments_may_stay(statement: str) -> None:
    assert list(impurities(statement)) == []
