"""Text in, verdict out. Deterministic and without side effects.

These functions bound what they look at, but a library they call may still hang or crash on hostile text: call them
through `fedsilo.grading.worker`, which can be killed. Modules are imported on first use, because `math` takes
a second to load.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, cast

from fedsilo.grading import mixture
from fedsilo.grading.verdict import Verdict, VerdictCode
from fedsilo.protocol.errors import UsageError

RESPONSE_CHARACTERS_MAX = 1_000_000


@dataclass(frozen=True)
class Verifier:
    """A way to check an answer.

    Attributes:
        name: as configured; what hello, log and run record tell.
        executes: it runs programs, so that a sandbox is needed and the coordinator refuses it.
        origin: the distributions that brought its own parts, "PACKAGE VERSION"; empty where all are FedSilo's.
    """

    name: str
    executes: bool = False
    origin: tuple[str, ...] = ()


class _Module(Protocol):
    def grade(self, response: str, reference: str) -> Verdict: ...
    def check_reference(self, reference: str) -> bool: ...


VERIFIERS: dict[str, Verifier] = {
    "math": Verifier("math"),
    "choice": Verifier("choice"),
    "exact": Verifier("exact"),
    "final": Verifier("final"),
    "numeric": Verifier("numeric"),
    "format": Verifier("format"),
    "code": Verifier("code", executes=True),
}

__all__ = ["VERIFIERS", "Verdict", "VerdictCode", "Verifier", "check_reference", "grade", "prepare", "require_verifier"]


def require_verifier(name: str, brought: Mapping[str, str] = MappingProxyType({})) -> Verifier:
    """The verifier of that name, or the mixture of such (mixture.py).

    Args:
        name: of one, or a mixture.
        brought: further names that count, with the distribution of each.

    Raises:
        UsageError: there is no such verifier here. One that a site brought itself is found by
            `fedsilo.grading.own_verifiers`, not here.
    """
    parts = mixture.parse(name)
    for part in parts:
        if part.verifier not in VERIFIERS and part.verifier not in brought:
            raise UsageError(
                f"unknown verifier {part.verifier!r}",
                hint=f"one of {', '.join([*VERIFIERS, *brought])}; at a silo, a package brings its own as an entry "
                "point of the group fedsilo.verifiers",
            )
    executes = any(part.verifier in VERIFIERS and VERIFIERS[part.verifier].executes for part in parts)
    return Verifier(name, executes, tuple(brought[each.verifier] for each in parts if each.verifier not in VERIFIERS))


def grade(verifier: str, response: str, reference: str) -> Verdict:
    """Judge one response.

    Raises:
        UsageError: unknown verifier, or one that would run a program.
    """
    require_verifier(verifier)
    if len(response) > RESPONSE_CHARACTERS_MAX:
        return Verdict(False, VerdictCode.TOO_COSTLY)
    parts = mixture.parse(verifier)
    return mixture.mixed(parts, [_module(part.verifier).grade(response, part.form or reference) for part in parts])


def check_reference(verifier: str, reference: str) -> bool:
    """Return whether a reference answer can be compared with at all; a prompt whose cannot is dropped.

    Raises:
        UsageError: unknown verifier.
    """
    require_verifier(verifier)
    return all(_module(part.verifier).check_reference(part.form or reference) for part in mixture.parse(verifier))


def prepare(verifier: str) -> None:
    """Load what the verifier needs, so that the first item does not pay for it.

    Raises:
        UsageError: unknown verifier.
    """
    require_verifier(verifier)
    for part in mixture.parse(verifier):
        _module(part.verifier)
        if part.verifier == "math":
            # the parser and sympy load when two expressions are compared for the first time
            grade("math", "\\boxed{x+1}", "1+x")


def _module(verifier: str) -> _Module:
    return cast(_Module, importlib.import_module(f"{__name__}.{VERIFIERS[verifier].name}"))  # noqa: TID251
