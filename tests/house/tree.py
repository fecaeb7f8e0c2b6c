"""A copy of the product in which the tests break the house's rules, and the tools that must notice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.cli.own_names import TOP_LEVEL_NAMES

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = frozenset({"torch", "transformers", "peft", "accelerate"})


def modules() -> list[str]:
    """Every product module that a person wrote, packages left out."""
    return sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in TOP_LEVEL_NAMES
        for path in (ROOT / package).rglob("*.py")
        if path.name not in {"__init__.py", "__main__.py"} and "_generated" not in path.parts
    )


def copy_product(target: Path) -> None:
    """The packages and pyproject.toml; no environment, no git, no tests."""
    for package in TOP_LEVEL_NAMES:
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)


@dataclass(frozen=True)
class Planted:
    """A line in the copy: where a tool must say it stands."""

    module: str
    path: Path
    line: int


@dataclass(frozen=True)
class Tree:
    """A copied tree of its own for one test."""

    root: Path

    def plant(self, module: str, code: str) -> Planted:
        """Add `code` at the end of a module, which is made if the product has none of that name."""
        path = self.root.joinpath(*module.split(".")).with_suffix(".py")
        before = path.read_text() if path.exists() else '"""Planted."""\n'
        path.write_text(f"{before}{code}\n")
        return Planted(module, path, len(before.splitlines()) + 1)

    def run(self, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a tool of the environment in the copy, which comes first on every path it looks along."""
        return subprocess.run(
            [Path(sys.executable).with_name(tool), *arguments], check=False, cwd=self.root, capture_output=True,
            text=True, env={**os.environ, "PYTHONPATH": str(self.root), "COLUMNS": "300"},
        )  # fmt: skip

    def broken_contracts(self) -> dict[str, str]:
        """What lint-imports says of each broken contract, by name; each contract must be reported one way or other."""
        output = self.run("lint-imports", "--no-cache").stdout
        names = [contract["name"] for contract in SETTINGS["tool"]["importlinter"]["contracts"]]
        for name in names:
            assert f"\n{name} KEPT" in output or f"\n{name} BROKEN" in output, output
        details = output.partition("Broken contracts\n")[2]
        return {name: _section(details, name, names) for name in names if f"\n{name} BROKEN" in output}

    def lint_findings(self, *options: str) -> list[dict[str, Any]]:
        """Ruff's findings in the copy, with the rules of the copied pyproject.toml."""
        done = self.run("ruff", "check", "--no-cache", "--output-format=json", *options)
        findings: list[dict[str, Any]] = json.loads(done.stdout)
        return findings

    def loaded_after(self, code: str) -> list[str]:
        """Lines printed by `code`, run by a fresh interpreter that takes our packages from the copy."""
        done = self.run("python", "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]


def _section(details: str, name: str, names: list[str]) -> str:
    """The part under the underlined `name`, up to the next contract's."""
    _, _, rest = details.partition(f"\n{name}\n{'-' * len(name)}\n")
    assert rest, f"{name} is not explained:\n{details}"
    ends = [at for other in names if (at := rest.find(f"\n{other}\n{'-' * len(other)}\n")) >= 0]
    return rest[: min(ends)] if ends else rest
