"""What the source text weighs: modules, lines, untyped dictionaries, formatter pragmas and floors of imports."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
# The rest of the top level is product, so that code moved into a new folder is counted there.
_NOT_PRODUCT = frozenset({"tests", "benchmarks", "tools", "examples", "build", "dist"})
_UNTYPED = ("dict[str, Any]", "Mapping[str, Any]")
_UNFORMATTED = "# fmt: skip"


def python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files that a person wrote in a folder, in order of their names."""
    for path in sorted(folder.rglob("*.py")):
        if "_generated" not in path.parts and "__pycache__" not in path.parts:
            yield path


def product_files(root: Path = ROOT) -> list[Path]:
    """Return every Python file outside tests, benchmarks, tools, examples, generated code and hidden folders."""
    folders = (each for each in sorted(root.iterdir()) if each.is_dir())
    product = [each for each in folders if not each.name.startswith(".") and each.name not in _NOT_PRODUCT]
    return [path for folder in product for path in python_files(folder)]


def source_figures(root: Path = ROOT) -> dict[str, int]:
    """Return the counts that need no program to run. A line is what `wc -l` counts as one."""
    texts = [path.read_text() for path in product_files(root)]
    return {
        "modules": len(texts),
        "lines": sum(text.count("\n") for text in texts),
        "any_dicts": sum(text.count(each) for text in texts for each in _UNTYPED),
        "fmt_skips": sum(text.count(_UNFORMATTED) for text in texts),
        "test_lines": sum(path.read_text().count("\n") for path in python_files(root / "tests")),
    }


def floor_figures(root: Path = ROOT) -> dict[str, int]:
    """Return the floors of the two packages that people read most."""
    packages = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    # An import for type checkers alone runs nothing, and one that is deferred into a function does.
    graph = grimp.build_graph(*packages, cache_dir=None, exclude_type_checking_imports=True)
    return {"guard_floors": floors(graph, "silo.guard"), "console_floors": floors(graph, "console")}


def floors(graph: grimp.ImportGraph, package: str) -> int:
    """Return how many modules the longest chain of imports within a package has; a circle of modules counts as one."""
    modules = {module for module in graph.modules if f"{module}.".startswith(f"{package}.")}
    imported = {module: graph.find_modules_directly_imported_by(module) & modules for module in modules}
    reached = {module: _reached(module, imported) for module in modules}
    circle_of = {
        module: frozenset({other for other in reached[module] if module in reached[other]}) for module in modules
    }

    @functools.cache
    def height(circle: frozenset[str]) -> int:
        below = {circle_of[other] for module in circle for other in imported[module]} - {circle}
        return 1 + max((height(each) for each in below), default=0)

    return max(height(circle) for circle in set(circle_of.values()))


def _reached(module: str, imported: dict[str, set[str]]) -> set[str]:
    """Return the module and all that it imports, itself or through others."""
    reached, waiting = {module}, [module]
    while waiting:
        new = imported[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached
