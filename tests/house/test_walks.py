"""What CONTRIBUTING.md adds step by step is added to a copy of the checkout, and works there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.house.tree import ROOT, Tree

BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def walk(title: str) -> list[tuple[str, str]]:
    """The blocks of one walk, with the language of each."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    text = page.partition(f"\n## Walk: {title}\n")[2].partition("\n## ")[0]
    return BLOCK.findall(text)


def apply(root: Path, language: str, block: str) -> Path:
    """Write a block into the file that its first line names, behind what earlier blocks wrote there; the file."""
    if language == "python":
        name, text = block.removeprefix("# ").split("\n", 1)
        path = root / name
        path.write_text(f"{path.read_text()}\n\n{text}" if path.exists() else text)
        return path
    head, *hunks = re.split(r"^@@.*\n", block, flags=re.MULTILINE)
    path = root / head.splitlines()[1].removeprefix("+++ b/")
    for hunk in hunks:
        before, after = (
            "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in marks) for marks in ("- ", "+ ")
        )
        assert path.read_text().count(before) == 1, before
        path.write_text(path.read_text().replace(before, after))
    return path


@pytest.mark.slow
def test_a_kind_is_added_as_the_page_says(tree: Tree) -> None:
    for each in ("tests", "tools"):
        shutil.copytree(ROOT / each, tree.root / each, ignore=shutil.ignore_patterns("__pycache__", "vectors"))
    written = {apply(tree.root, *block).relative_to(tree.root) for block in walk("a message kind")}
    assert len(written) == 3 + 1, "three files and a test"
    names = [str(path) for path in written if path.suffix == ".py"]
    assert tree.run("ruff", "check", *names).stdout == "All checks passed!\n"
    assert tree.run("ruff", "format", "--check", *names).returncode == 0
    out = "fedsilo/protocol/_generated"
    options = ["-Ifedsilo/protocol", f"--python_out={out}", f"--pyi_out={out}", "federation.proto", "control.proto"]
    assert tree.run("python", "-m", "grpc_tools.protoc", *options).returncode == 0
    digests = "tests/policies/test_tombstones.py::test_a_policy_that_names_none_keeps_its_digest_in_which_they_are_null"
    ours = [
        "tests/policies/test_demo_numbers.py",
        "tests/policies/test_examples.py::test_every_row_has_its_file",
        digests,
    ]
    done = tree.run("python", "-m", "pytest", "-vv", "-n0", *ours)
    assert done.returncode == 0 and done.stdout.count(" PASSED") == 2 * 5 + 1 + 2, done.stdout


@pytest.mark.slow
def test_a_task_and_a_method_are_added_as_the_page_says(tree: Tree) -> None:
    for each in ("tests", "tools"):
        shutil.copytree(ROOT / each, tree.root / each, ignore=shutil.ignore_patterns("__pycache__", "vectors"))
    written = {apply(tree.root, *block).relative_to(tree.root) for block in walk("a trainer task and a method")}
    names = [str(path) for path in written]
    assert tree.run("ruff", "check", *names).stdout == "All checks passed!\n"
    assert tree.run("ruff", "format", "--check", *names).returncode == 0
    ours = [name for name in names if name.startswith("tests")]
    ours += ["tests/algorithms/test_method_conformance.py", "tests/policies/test_rulesets.py"]
    done = tree.run("python", "-m", "pytest", "-vv", "-n0", "-k", "lookahead or half_of_the_way", *ours)
    assert done.returncode == 0, done.stdout
    for test in ("half_of_the_way_is_taken_back", "same_training[lookahead-step]", "in_its_ruleset[lookahead]"):
        assert f"{test} PASSED" in done.stdout, done.stdout
    assert "lookahead" not in (ROOT / "fedsilo/protocol/methods/__init__.py").read_text(), "the checkout stays as it is"


@pytest.mark.slow
def test_a_field_of_the_status_is_added_as_the_page_says(tree: Tree) -> None:
    for each in ("tests", "tools", "benchmarks"):
        shutil.copytree(ROOT / each, tree.root / each, ignore=shutil.ignore_patterns("__pycache__", "vectors"))
    written = {apply(tree.root, *block).relative_to(tree.root) for block in walk("a field of the status")}
    assert len(written) == 3 + 1, "three files and a test"
    names = [str(path) for path in written]
    assert tree.run("ruff", "check", *names).stdout == "All checks passed!\n"
    assert tree.run("ruff", "format", "--check", *names).returncode == 0
    done = tree.run("python", "-m", "pytest", "-vv", "-n0", "tests/console/test_rounds_left.py")
    assert done.returncode == 0 and done.stdout.count(" PASSED") == 2, done.stdout
