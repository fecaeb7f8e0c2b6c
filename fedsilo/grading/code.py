"""`code`: takes the program out of a response, and tells a usable test program. Neither is ever run here.

Running them needs a sandbox (`fedsilo.grading.code_sandbox`), so grading in this process refuses, and says so; the
coordinator refuses this verifier altogether. The reference is a program that must run without an error
after the solution, and reach each of its `assert`s.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from fedsilo.grading.extraction import CutOff, outside_thinking
from fedsilo.grading.verdict import Verdict
from fedsilo.protocol.errors import UsageError

REFERENCE_CHARACTERS_MAX = 200_000
# a fence may stand in a quotation or behind the mark of a list's item, and is indented as much as that
_FENCE = re.compile(
    r"(?P<before>[ \t]*(?:>[ \t]?)*(?:(?:[-*+]|\d{1,3}[.)])[ \t]+)?[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<mark>[^`\n]*)"
)
_QUOTED = re.compile(r"[ \t]*(?:>[ \t]?)+")
_DEFINES = re.compile(r"^(?:async\s+)?(?:def|class)\s", re.MULTILINE)
_LANGUAGES = {"", "python", "py", "python3"}
_SPECIAL = re.compile(r"__\w+__")  # names that Python itself looks for
_BY_NAME = {"globals", "locals", "vars", "getattr", "dir"}  # a program that has one may use functions by their names


@dataclass(frozen=True)
class Subject:
    """The names that a test program takes from the solution, and the modules that it uses without importing them.

    Attributes:
        names: what is tested, asked of the solution alone.
        modules: of Python's own library; never the solution's.
    """

    names: tuple[str, ...]
    modules: tuple[str, ...]


def extract(response: str) -> str | None:
    """The last fenced block outside thinking that is marked as Python or not marked, and defines something.

    Where no block defines a function or class the last one counts; without fences, the whole response. A block that
    is not closed was cut off, and is no answer.
    """
    try:
        answer_text = outside_thinking(response)
    except CutOff:
        return None
    answer_text = answer_text.replace("\r\n", "\n")
    if "```" not in answer_text and "~~~" not in answer_text:
        return answer_text if answer_text.strip() else None
    try:
        found = list(_blocks(answer_text))
    except CutOff:
        return None
    if not found and "```" not in answer_text:  # `~~~` may be part of a text in the program
        return answer_text
    blocks = [body for mark, body in found if mark in _LANGUAGES]
    if not blocks:
        return None
    return next((body for body in reversed(blocks) if _DEFINES.search(body)), blocks[-1])


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks as (language, body), each without the indentation of its fence.

    Raises:
        CutOff: one is not closed.
    """
    opened: re.Match[str] | None = None
    body: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip())
        if opened is None:
            opened, body = fence, []
            continue
        before, mark = opened["before"], opened["mark"].split()
        if (
            fence is not None
            and fence["fence"].startswith(opened["fence"])
            and not fence["mark"]
            and not fence["before"].strip(" \t>")
        ):
            language = re.match(r"\{?\.?([A-Za-z0-9_+-]*)", mark[0] if mark else "")
            yield (language[1].lower() if language else ""), textwrap.dedent("".join(f"{each}\n" for each in body))
            opened = None
            continue
        if ">" in before and (quoted := _QUOTED.match(line)) is not None:
            inside, before = line[quoted.end() :], before[before.rindex(">") + 1 :].removeprefix(" ")
        else:
            inside = line
        indented = len(inside) - len(inside.lstrip(" \t"))
        body.append(inside[min(indented, len(before)) :])
    if opened is not None:
        raise CutOff


def check_reference(reference: str) -> bool:
    """Return True if it is a Python program with asserts that can fail and are reached, and says what it tests."""
    return subject(reference) is not None


def subject(reference: str) -> Subject | None:
    """Return what a test program tests, decided from its text alone; None where it asserts nothing or that is not
    clear.

    It is every name that the program neither defines nor imports and that is no built-in one. A module of Python's
    own library that it uses only as `module.name` is that module. Where no name is left, the subject has the name of
    a built-in: the one that is handed to a function of the test and not called elsewhere, or else the only one that
    is called.

    Nor is it a test program where an `assert` can only hold, as that of a tuple does, or stands in a function that is
    never used. `assert True` may stand there and counts for nothing.
    """
    if len(reference) > REFERENCE_CHARACTERS_MAX:
        return None
    try:
        tree = ast.parse(reference)
        free = _free_names(symtable.symtable(reference, "<test>", "exec"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes = list(ast.walk(tree))
    loaded = _counted(node.id for node in nodes if isinstance(node, ast.Name))
    owners = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    dotted = _counted(owner.id for owner in owners if isinstance(owner, ast.Name))
    modules = {name for name in free & sys.stdlib_module_names if loaded[name] == dotted.get(name, 0)}
    names = {name for name in free - modules if not hasattr(builtins, name) and not _SPECIAL.fullmatch(name)}
    if not names:
        names = _built_in_subject(tree, nodes, free - modules)
    if not names or not _asserts_something(nodes, free, names) or _unused_asserts(nodes):
        return None
    return Subject(tuple(sorted(names)), tuple(sorted(modules)))


def _counted(names: Iterator[str]) -> dict[str, int]:
    """Return how often each name stands there."""
    counted: dict[str, int] = {}
    for name in names:
        counted[name] = counted.get(name, 0) + 1
    return counted


def _free_names(table: symtable.SymbolTable) -> set[str]:
    """Names that a program reads and does not bind at its top level."""
    bound = {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}
    read: set[str] = set()
    tables = [table]
    while tables:
        scope = tables.pop()
        tables.extend(scope.get_children())
        for each in scope.get_symbols():
            if scope is table or each.is_global():
                read |= {each.get_name()} if each.is_referenced() else set()
                bound |= {each.get_name()} if each.is_declared_global() and each.is_assigned() else set()
    return read - bound


def _built_in_subject(tree: ast.Module, nodes: list[ast.AST], free: set[str]) -> set[str]:
    """Return the one built-in name that is tested, or nothing where that is not clear."""
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    called = {node.func.id for node in calls if isinstance(node.func, ast.Name)} & free
    handed = {
        each.id
        for node in calls
        if isinstance(node.func, ast.Name) and node.func.id in own
        for each in node.args
        if isinstance(each, ast.Name)
    } & free
    subject = handed or called
    return subject if len(subject) == 1 and not handed & called else set()


def _asserts_something(nodes: list[ast.AST], free: set[str], subject: set[str]) -> bool:
    """Return True if an `assert` can fail, and no other one but of a plain constant is settled by its form.

    One that reads only constants and built-in names is left out: it says nothing about a solution.
    """
    objects = free | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    objects -= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    objects -= {node.arg for node in nodes if isinstance(node, ast.arg)}
    something = False
    for node in (each.test for each in nodes if isinstance(each, ast.Assert)):
        if isinstance(node, ast.Constant):
            something |= not node.value  # marks a line that a test must not come to
            continue
        if _settled(node, objects) is not None:
            return False
        read = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        something |= not read <= free - subject
    return something


def _settled(node: ast.expr, objects: set[str]) -> bool | None:
    """The truth of an expression where its form decides that; `objects` are names of functions, classes, modules."""
    match node:
        case ast.Constant(value):
            return bool(value)
        case ast.Name(name):
            return True if name in objects else None
        case ast.Lambda() | ast.GeneratorExp():
            return True
        case ast.Tuple(members) | ast.List(members) | ast.Set(members) | ast.Dict(members):
            certain = any(member is not None and not isinstance(member, ast.Starred) for member in members)
            return True if certain else None if members else False
        case ast.JoinedStr(parts):
            return True if any(isinstance(part, ast.Constant) for part in parts) else None
        case ast.NamedExpr(_, value) | ast.UnaryOp(ast.USub() | ast.UAdd(), value):
            return _settled(value, objects)
        case ast.UnaryOp(ast.Not(), value):
            truth = _settled(value, objects)
            return None if truth is None else not truth
        case ast.BoolOp(operator, values):
            truths = [_settled(each, objects) for each in values]
            deciding = isinstance(operator, ast.Or)
            return deciding if deciding in truths else None if None in truths else not deciding
        case ast.IfExp(_, one, other):
            truth = _settled(one, objects)
            return truth if truth == _settled(other, objects) else None
    return None


def _unused_asserts(nodes: list[ast.AST]) -> bool:
    """Return True if an `assert` stands in a function whose name the program never uses, so that nothing reaches it."""
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if used & _BY_NAME:
        return False
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return any(
        node.name not in used
        and not node.decorator_list
        and not _SPECIAL.fullmatch(node.name)
        and any(isinstance(each, ast.Assert) for each in ast.walk(node))
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def grade(response: str, reference: str) -> Verdict:
    """Refuse to grade in this process. Raises UsageError: always."""
    raise UsageError(
        "the verifier 'code' runs a program and there is no sandbox for it in this process",
        hint="use exact, choice, math or numeric",
        code="VERIFIER_EXECUTES",
    )
