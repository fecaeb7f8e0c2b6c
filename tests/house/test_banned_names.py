"""Names that no module may use (TID251), and what ruff's security rules refuse: each planted in a copy and reported."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.house.tree import SETTINGS, Planted, Tree

BANNED: dict[str, dict[str, str]] = SETTINGS["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]

# What the ban is for (threats T10, T22, T35): taking one of these off the list is a decision, not an edit.
MUST_BE_BANNED = {
    "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing", "torch.load", "torch.hub",
    "numpy.load", "importlib.import_module", "urllib.request", "yaml.load", "yaml.safe_load", "yaml.unsafe_load",
}  # fmt: skip

# rule -> a statement that it must refuse; the modules are imported before it
REFUSED = {
    "S102": 'exec("1")',
    "S307": 'eval("1")',
    "S310": "urllib.request.urlopen(NAME)",
    "S506": "yaml.load(NAME, Loader=yaml.Loader)",
    "S602": "subprocess.run(NAME, shell=True)",
    "S605": "os.system(NAME)",
    "S606": 'os.execv("/bin/sh", NAME)',
    "S202": "tarfile.open(NAME).extractall()",
    "S301": "pickle.loads(NAME)",
    "S323": "ssl._create_unverified_context()",
}


def _uses(name: str) -> tuple[str, ...]:
    """Ways to use a banned name, one line each: by attribute, imported from its module, and under another name."""
    module, _, member = name.rpartition(".")
    if not module:
        return f"import {name}", f"import {name} as harmless", f"from {name} import anything"
    return (
        f"import {module}; {name}",
        f"import {module} as harmless; harmless.{member}",
        f"from {module} import {member}",
    )


def _reported(findings: list[dict[str, Any]]) -> dict[tuple[str, int], list[tuple[str, str]]]:
    """(file, line) -> (rule, message)."""
    found = defaultdict(list)
    for finding in findings:
        found[finding["filename"], finding["location"]["row"]].append((finding["code"], finding["message"]))
    return found


def test_X11_product_uses_no_banned_name(clean_tree: Tree) -> None:
    watched = {"TID251", *REFUSED}
    assert [finding for finding in clean_tree.lint_findings() if finding["code"] in watched] == []


def test_T22_two_places_are_excused(clean_tree: Tree) -> None:
    """Graders and files of kinds are loaded by names of a table in our own code."""
    findings = clean_tree.lint_findings("--ignore-noqa", "--select=TID251")
    places = [(Path(finding["filename"]).relative_to(clean_tree.root), finding["message"]) for finding in findings]
    message = f"`importlib.import_module` is banned: {BANNED['importlib.import_module']['msg']}"
    assert sorted(places) == [
        (Path(place), message) for place in ("fedsilo/grading/__init__.py", "policies/kinds/__init__.py")
    ]


def test_T22_T35_what_executes_on_load_is_banned() -> None:
    assert BANNED.keys() >= MUST_BE_BANNED
    assert all(entry["msg"] for entry in BANNED.values())


def test_T22_X11_each_use_of_each_banned_name_is_reported(tree: Tree) -> None:
    places = ("silo.guard.gate", "silo.trainer.data", "coordinator.planted", "fedsilo.protocol.planted")
    planted: list[tuple[str, Planted]] = [
        (name, tree.plant(places[number % len(places)], use))
        for number, (name, use) in enumerate((name, use) for name in BANNED for use in _uses(name))
    ]
    found = _reported(tree.lint_findings())
    missing = [
        (name, place)
        for name, place in planted
        if ("TID251", f"`{name}` is banned: {BANNED[name]['msg']}") not in found[str(place.path), place.line]
    ]
    assert not missing


@pytest.mark.parametrize("module", ["silo.guard.planted", "coordinator.planted"])
def test_T22_X11_what_runs_text_as_code_is_refused(module: str, tree: Tree) -> None:
    tree.plant(module, "import os, pickle, ssl, subprocess, tarfile, urllib.request, yaml\n\nNAME = input()")
    planted = {rule: tree.plant(module, statement) for rule, statement in REFUSED.items()}
    found = _reported(tree.lint_findings())
    rules = {rule: {code for code, _ in found[str(place.path), place.line]} for rule, place in planted.items()}
    assert {rule for rule in REFUSED if rule not in rules[rule]} == set()
