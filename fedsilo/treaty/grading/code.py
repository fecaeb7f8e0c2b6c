"""`code`: takes the program out of a response. It is never run here.

Running it needs a sandbox of its own, so grading refuses, and says so; the coordinator refuses this verifier
altogether (design 8.1).
"""

from __future__ import annotations

import re

from fedsilo.treaty.errors import UsageError
from fedsilo.treaty.grading.verdict import Verdict

_FENCE = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[ \t]*\r?\n(.*?)```", re.DOTALL)


def extract(response: str) -> str | None:
    """The last fenced block that is marked as Python or not marked at all; without fences, the whole response."""
    blocks = [body for mark, body in _FENCE.findall(response) if mark.lower() in {"", "python", "py", "python3"}]
    if blocks:
        return str(blocks[-1])
    return response if "```" not in response and response.strip() else None


def check_reference(reference: str) -> bool:
    return bool(reference.strip())


def grade(response: str, reference: str) -> Verdict:
    """Raises UsageError: always."""
    raise UsageError(
        "the verifier 'code' runs a program and there is no sandbox for it here",
        hint="use exact, choice, math or numeric",
        code="VERIFIER_EXECUTES",
    )
