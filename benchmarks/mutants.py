"""A control less, as a change of the code: what `benchmarks.controls` plants.

What is changed is found by what it says, in the function that it stands in: code may move within its function and be
set out anew, and a mutant still means the same. It is planted in a process that has loaded the code, and not in a file:
a process that a test starts does not have it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module  # noqa: TID251  # the names are in `benchmarks.control_mutants`
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Protocol

from policies.kind import Judgement, Rule


class Mutant(Protocol):
    """One control less.

    Attributes:
        name: of the control and what is done to it.
        module: that it stands in, by its dotted name.
    """

    @property
    def name(self) -> str: ...

    @property
    def module(self) -> str: ...

    def plant(self) -> None:
        """Take the control away in this process. Raises ValueError: what is to be changed is not there."""


@dataclass(frozen=True)
class OtherRule:
    """A rule that judges otherwise.

    Attributes:
        instead: makes its check of the check that it has.
    """

    name: str
    rule: Rule
    instead: Callable[[Check], Check]
    module: str = "policies.rules"

    def plant(self) -> None:
        # In place: whatever was made of the list of rules before holds this one.
        object.__setattr__(self.rule, "check", self.instead(self.rule.check))


Check = Callable[..., Judgement]


@dataclass(frozen=True)
class Edit:
    """Something else in a function than it does.

    Attributes:
        module: that is changed, by its dotted name.
        function: by its name within the module, as `Gate.transmit`.
        old: an expression, statements, or the head of an `if` with its colon, as Python. It must stand in the function
            once, however it is set out there. The head of an `if` finds none but an `if` with this condition.
        new: what stands there instead, of the same kind.
    """

    name: str
    module: str
    function: str
    old: str
    new: str

    def plant(self) -> None:
        function, code = self.found()
        function.__code__ = code  # whoever imported the function by its name runs this, too

    def found(self) -> tuple[FunctionType, CodeType]:
        """Return the function, and the code that it is to have. Raises as `planted`."""
        module = import_module(self.module)
        found: Any = module
        for part in self.function.split("."):
            found = inspect.getattr_static(found, part)
        file = inspect.getfile(module)
        whole = compile(self.planted(Path(file).read_text()), file, "exec", dont_inherit=True)
        (code,) = (each for each in _codes(whole) if each.co_qualname == self.function)
        return inspect.unwrap(found.fget if isinstance(found, property) else found), code

    def planted(self, source: str) -> str:
        """Return the module's source with the control gone. Raises ValueError: what is to be changed is not there."""
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


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


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
