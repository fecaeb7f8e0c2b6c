"""X13: `make threats` runs each test named after a threat or a demand, and no other; no test just waits."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.house.tree import ROOT

pytestmark = pytest.mark.slow  # all tests are collected first

NAMED = re.compile(r"test_[TX]\d{2}_")
ONE_DIGIT = re.compile(r"test_(?:[TX]\d{2}_)*[TX]\d_")
# Of one generated test. A draw of those here takes up to 20 ms, so that these would take most of a minute.
EXAMPLES_MAX = 2_000


@dataclass(frozen=True)
class Written:
    """A test as it stands in its file.

    Attributes:
        slow: marked so, by itself, its class or its module.
        examples: that it generates, as far as it says so itself.
    """

    file: str
    name: str
    slow: bool
    examples: int

    @property
    def named(self) -> bool:
        """After a threat or a demand, by itself or by its file."""
        return bool(NAMED.match(self.name) or NAMED.match(Path(self.file).name))


def _marked_slow(node: ast.AST) -> bool:
    marks = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr == "slow"]
    return any(isinstance(mark.value, ast.Attribute) and mark.value.attr == "mark" for mark in marks)


def _examples(decorators: list[ast.expr]) -> int:
    return max(
        (
            word.value.value
            for decorator in decorators
            for call in ast.walk(decorator)
            if isinstance(call, ast.Call)
            for word in call.keywords
            if word.arg == "max_examples" and isinstance(word.value, ast.Constant) and isinstance(word.value.value, int)
        ),
        default=0,
    )


def written(root: Path) -> Iterator[Written]:
    """Every test below `root`/tests."""
    for path in sorted((root / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text())
        of_module = any(
            _marked_slow(node.value)
            for node in module.body
            if isinstance(node, ast.Assign)
            and [target.id for target in node.targets if isinstance(target, ast.Name)] == ["pytestmark"]
        )
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                slow = of_module or any(map(_marked_slow, node.decorator_list))
                yield Written(str(path.relative_to(root)), node.name, slow, _examples(node.decorator_list))


def sleeps(root: Path) -> list[str]:
    """FILE:LINE of every sleep that is not between two looks at what is waited for (the body of a `while`)."""
    found = []
    for path in sorted((root / "tests").rglob("*.py")):
        module = ast.parse(path.read_text())
        between_looks = {
            id(each) for loop in ast.walk(module) if isinstance(loop, ast.While) for each in ast.walk(loop)
        }
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and id(node) not in between_looks:
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called == "sleep":
                    found.append(f"{path.relative_to(root)}:{node.lineno}")
    return found


@functools.cache  # not while the tests are collected: each worker does that
def suite() -> tuple[Written, ...]:
    return tuple(written(ROOT))


def selected_by_make_threats(folder: Path) -> set[tuple[str, str]]:
    """(file, function) that pytest selects with the options of `make threats`.

    Asked of stand-ins that have the files, names and marks of the real tests: collecting those loads half of Python.
    """
    shutil.copy(ROOT / "pyproject.toml", folder)
    for test in suite():
        path = folder / test.file
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else "import pytest\n"
        mark = "@pytest.mark.slow\n" if test.slow else ""
        path.write_text(f"{before}\n\n{mark}def {test.name}() -> None:\n    pass\n")
    for package in {(folder / test.file).parent for test in suite()}:
        (package / "__init__.py").touch()  # else two files of one name are one module
    # without what a `make` around this test was given: its own flags, and TEST_FLAGS among them
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "TEST_FLAGS")}
    made = subprocess.run(
        ["make", "--dry-run", "threats"], cwd=ROOT, env=clean, check=True, capture_output=True, text=True
    )  # fmt: skip
    selected = set()
    for line in (line for line in made.stdout.splitlines() if "-m pytest" in line):
        options = shlex.split(line)[1:]
        asked = subprocess.run(
            [sys.executable, *options, "--collect-only", "-p", "no:cacheprovider"],
            cwd=folder, check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert asked.returncode == 0, asked.stdout + asked.stderr
        selected |= {
            (file, name) for file, _, name in (row.partition("::") for row in asked.stdout.splitlines()) if name
        }
    return selected


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    return selected_by_make_threats(tmp_path_factory.mktemp("stand-ins"))


def test_X13_make_threats_runs_each_test_that_is_named_after_a_threat(selected: set[tuple[str, str]]) -> None:
    wanted = {(test.file, test.name) for test in suite() if test.named}
    assert len(wanted) > 500
    assert wanted - selected == set()


def test_X13_make_threats_runs_nothing_else(selected: set[tuple[str, str]]) -> None:
    """Not what only begins alike, such as test_the_...: with those it would be the whole suite."""
    known = {(test.file, test.name): test for test in suite()}
    assert {each for each in selected if not known[each].named} == set()


def test_X13_numbers_have_two_digits() -> None:
    """So that `-k T03` finds the tests of T3 and `-k T3` those of thirty."""
    one_digit = [f"{test.file}::{test.name}" for test in suite() if ONE_DIGIT.match(test.name)]
    one_digit += [test.file for test in suite() if ONE_DIGIT.match(Path(test.file).name)]
    assert one_digit == []


def test_X13_no_test_sleeps() -> None:
    assert sleeps(ROOT) == []


def test_X13_many_draws_are_marked_slow() -> None:
    assert [f"{test.file}::{test.name}" for test in suite() if test.examples > EXAMPLES_MAX and not test.slow] == []


@pytest.mark.parametrize(
    ("text", "slow", "examples", "slept"),
    [
        ("@pytest.mark.slow\ndef test_x():\n    pass\n", True, 0, []),
        ("pytestmark = [pytest.mark.torch, pytest.mark.slow]\ndef test_x():\n    pass\n", True, 0, []),
        ("@settings(max_examples=100000)\n@given(NUMBERS)\ndef test_x(n):\n    pass\n", False, 100_000, []),
        ("def test_x():\n    time.sleep(1)\n", False, 0, ["tests/test_planted.py:2"]),
        ("def test_x():\n    while no():\n        sleep(0.1)\n    sleep(1)\n", False, 0, ["tests/test_planted.py:4"]),
    ],
)  # fmt: skip
def test_X13_what_is_looked_for_is_found(
    tmp_path: Path, text: str, slow: bool, examples: int, slept: list[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_planted.py").write_text(text)
    (found,) = written(tmp_path)
    assert (found.slow, found.examples, sleeps(tmp_path)) == (slow, examples, slept)
