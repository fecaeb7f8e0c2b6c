"""`code`: takes the program out of a response, and tells a usable test program. Neither is ever run here.

Running them needs walls (`fedsilo.edge.code_sandbox`), so grading in this process refuses, and says so; the
coordinator refuses this verifier altogether (design 8.1). The reference is a program that must run without an error
after the solution.
"""

from __future__ import annotations

import ast
import re

from fedsilo.treaty.errors import UsageError
from fedsilo.treaty.grading.extraction import CutOff, outside_thinking
from fedsilo.treaty.grading.verdict import Verdict

REFERENCE_CHARACTERS_MAX = 200_000
_FENCE = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_DEFINES = re.compile(r"^(?:async\s+)?(?:def|class)\s", re.MULTILINE)


def extract(response: str) -> str | None:
    """The last fenced block outside thinking that is marked as Python or not marked, and defines something.

    Where no block defines a function or class the last one counts; without fences, the whole response. A block that
    is not closed was cut off, and is no answer.
    """
    try:
        said = outside_thinking(response)
    except CutOff:
        return None
    said = said.replace("\r\n", "\n")
    if "```" not in said:
        return said if said.strip() else None
    if said.count("```") % 2:
        return None
    blocks = [body for mark, body in _FENCE.findall(said) if mark.lower() in {"", "python", "py", "python3"}]
    if not blocks:
        return None
    return next((body for body in reversed(blocks) if _DEFINES.search(body)), str(blocks[-1]))


def check_reference(reference: str) -> bool:
    """Whether it is a Python program that does anything."""
    if len(reference) > REFERENCE_CHARACTERS_MAX:
        return False
    try:
        return bool(ast.parse(reference).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def grade(response: str, reference: str) -> Verdict:
    """Raises UsageError: always."""
    raise UsageError(
        "the verifier 'code' runs a program and there is no sandbox for it in this process",
        hint="use exact, choice, math or numeric",
        code="VERIFIER_EXECUTES",
    )
