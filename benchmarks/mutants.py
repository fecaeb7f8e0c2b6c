"""A control less, as a change of the code: what `benchmarks.controls` plants.

What is changed is found by what it says, in the function that it stands in: code may move within its function and be
set out anew, and a mutant still means the same.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Mutant(ABC):
    """One control less.

    Attributes:
        name: of the control and what is done to it.
        module: that is changed, by its dotted name.
    """

    name: str
    module: str

    def path_in(self, tree: Path) -> Path:
        """Return the module's file in a checkout."""
        package = tree.joinpath(*self.module.split("."))
        return package / "__init__.py" if package.is_dir() else package.with_suffix(".py")

    def apply(self, tree: Path) -> str:
        """Change the checkout and return what its file was. Raises ValueError: what is to be changed is not there."""
        path = self.path_in(tree)
        original = path.read_text()
        path.write_text(self.planted(original))
        return original

    @abstractmethod
    def planted(self, source: str) -> str:
        """Return the module's source with the control gone. Raises ValueError: what is to be changed is not there."""


@dataclass(frozen=True)
class Addition(Mutant):
    """Code at the end of a module, which replaces what the module has made."""

    code: str

    def planted(self, source: str) -> str:
        return source + self.code


@dataclass(frozen=True)
class Edit(Mutant):
    """Something else in a function than it does.

    Attributes:
        function: by its name within the module, as `Gate.transmit`.
        old: an expression, statements, or the head of an `if` with its colon, as Python. It must stand in the function
            once, however it is set out there. The head of an `if` finds none but an `if` with this condition.
        new: what stands there instead, of the same kind.
    """

    function: str
    old: str
    new: str

    def planted(self, source: str) -> str:
        function = _function(ast.parse(source), self.function)
        found, new = self._found_in(function)
        if len(found) != 1:
            place = f"{self.module}:{self.function}"
            raise ValueError(f"{self.name}: {place} holds `{self.old}` {len(found)} times, not once")
        return _with(source, found[0], new)

    def _found_in(self, function: ast.AST) -> tuple[list[Nodes], Nodes]:
        """Return what `old` is in the function, and what stands instead."""
        if self.old.endswith(":"):
            conditions = [node.test for node in ast.walk(function) if isinstance(node, ast.If)]
            return _alike(conditions, _condition(self.old)), [_condition(self.new)]
        old, new = _expression(self.old), _expression(self.new)
        if old is not None and new is not None:
            return _alike(_expressions(function), old), [new]
        return _runs_alike(function, ast.parse(self.old).body), list(ast.parse(self.new).body)


Nodes = list[Any]  # statements that follow each other, or one expression


def _function(tree: ast.AST, name: str) -> ast.AST:
    """Return the function of a dotted name. Raises ValueError: there is none of that name, or there are several."""
    found = [tree]
    for part in name.split("."):
        found = [node for outer in found for node in _named(outer) if node.name == part]
    if len(found) != 1 or isinstance(found[0], ast.ClassDef):
        raise ValueError(f"there are {len(found)} functions of the name {name}, not one")
    return found[0]


def _named(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield the functions and classes in a node, and not those within one of these."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        else:
            yield from _named(child)


def _condition(head: str) -> ast.expr:
    (statement,) = ast.parse(f"{head} ...").body
    if not isinstance(statement, ast.If):
        raise ValueError(f"{head!r} is no head of an if")
    return statement.test


def _expression(source: str) -> ast.expr | None:
    """Return the expression that this is, or None where it is none."""
    try:
        return ast.parse(source, mode="eval").body
    except SyntaxError:
        return None


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield all expressions of a function but those in the texts of its messages, which decide nothing."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        if not isinstance(child, ast.JoinedStr):
            yield from _expressions(child)


def _alike(found: Iterable[ast.expr], wanted: ast.expr) -> list[Nodes]:
    return [[node] for node in found if ast.dump(node) == ast.dump(wanted)]


def _runs_alike(function: ast.AST, wanted: list[ast.stmt]) -> list[Nodes]:
    """Return where these statements follow each other."""
    found: list[Nodes] = []
    for node in ast.walk(function):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(block, list):
                continue  # the body of a lambda or of a conditional expression
            runs = (block[start : start + len(wanted)] for start in range(len(block) - len(wanted) + 1))
            found += [run for run in runs if [ast.dump(one) for one in run] == [ast.dump(one) for one in wanted]]
    return found


def _with(source: str, old: Nodes, new: Nodes) -> str:
    """Return the source with other code in one place; all else keeps its lines and its comments."""
    first, last = old[0], old[-1]
    lines = source.encode().splitlines(keepends=True)  # columns are counted in bytes
    before = b"".join(lines[: first.lineno - 1]) + lines[first.lineno - 1][: first.col_offset]
    after = lines[last.end_lineno - 1][last.end_col_offset :] + b"".join(lines[last.end_lineno :])
    if isinstance(new[0], ast.expr):
        text = f"({ast.unparse(new[0])})"  # it may stand beside an operator that binds more tightly
    else:
        text = "\n".join(ast.unparse(each) for each in new).replace("\n", "\n" + " " * first.col_offset)
    return before.decode() + text + after.decode()
