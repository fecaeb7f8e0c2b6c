"""Text in, verdict out. Deterministic and without side effects (methods 1.2).

These functions bound what they look at, but a library they call may still hang or crash on hostile text: call them
through `fedsilo.edge.grading_process`, which can be killed. Modules are imported on first use, because `math` takes
a second to load.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from fedsilo.treaty.errors import UsageError
from fedsilo.treaty.grading.verdict import Verdict, VerdictCode

RESPONSE_CHARACTERS_MAX = 1_000_000


@dataclass(frozen=True)
class Verifier:
    """One way to check an answer; `executes` marks the one that would run a program."""

    name: str
    executes: bool = False


class _Module(Protocol):
    def grade(self, response: str, reference: str) -> Verdict: ...
    def check_reference(self, reference: str) -> bool: ...


VERIFIERS: dict[str, Verifier] = {
    "math": Verifier("math"),
    "choice": Verifier("choice"),
    "exact": Verifier("exact"),
    "numeric": Verifier("numeric"),
    "format": Verifier("format"),
    "code": Verifier("code", executes=True),
}

__all__ = ["VERIFIERS", "Verdict", "VerdictCode", "Verifier", "check_reference", "grade", "prepare", "require_verifier"]


def require_verifier(name: str) -> Verifier:
    """Raises UsageError: there is no such verifier."""
    if name not in VERIFIERS:
        raise UsageError(f"unknown verifier {name!r}", hint=f"one of {', '.join(VERIFIERS)}")
    return VERIFIERS[name]


def grade(verifier: str, response: str, reference: str) -> Verdict:
    """Judge one response.

    Raises:
        UsageError: unknown verifier, or one that would run a program.
    """
    if len(response) > RESPONSE_CHARACTERS_MAX:
        return Verdict(False, VerdictCode.TOO_COSTLY)
    return _module(verifier).grade(response, reference)


def check_reference(verifier: str, reference: str) -> bool:
    """Whether a reference answer can be compared with at all; a prompt whose cannot is dropped (methods 1.2).

    Raises:
        UsageError: unknown verifier.
    """
    return _module(verifier).check_reference(reference)


def prepare(verifier: str) -> None:
    """Load what the verifier needs, so that the first item does not pay for it.

    Raises:
        UsageError: unknown verifier.
    """
    check_reference(verifier, "x+1")


def _module(verifier: str) -> _Module:
    name = require_verifier(verifier).name  # one of VERIFIERS
    return cast(_Module, importlib.import_module(f"{__name__}.{name}"))  # noqa: TID251
