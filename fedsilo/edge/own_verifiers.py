"""Verifiers that a site brings itself: installed packages name them as entry points of the group `fedsilo.verifiers`.

    [project.entry-points."fedsilo.verifiers"]
    dosage = "our_package.dosage"          # a module or object with grade(response, reference) -> bool or Verdict
                                           # and, if it has one, check_reference(reference) -> bool

Only a name is ever configured, never a path to code (T22): what it means was decided by who installed the package. It
is looked up without being loaded; loaded and run it is in the killable grading process alone, under that process's
limits on time and memory. What this does not stop: such a verifier is code of the site and may read and send what the
grading process may; in a silo the trainer's walls are around it, elsewhere nothing is. One that runs programs of a
model must build walls of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from fedsilo.treaty import grading
from fedsilo.treaty.errors import UsageError
from fedsilo.treaty.grading import VERIFIERS, mixture
from fedsilo.treaty.grading.verdict import BAD_REFERENCE, ERROR, Verdict, judged

GROUP = "fedsilo.verifiers"
Grade = Callable[[str, str], Verdict]


@dataclass(frozen=True)
class Found:
    """A verifier by name.

    Attributes:
        name: as configured; what hello, log and run record tell.
        executes: it runs programs, so that a sandbox is needed and the coordinator refuses it.
        origin: the distributions that brought its own parts, "PACKAGE VERSION"; empty where all are FedSilo's.
    """

    name: str
    executes: bool = False
    origin: tuple[str, ...] = ()


def own_names() -> dict[str, str]:
    """Names that installed packages bring, with the distribution of each. FedSilo's own names cannot be taken."""
    return {name: _origin(entry) for name, entry in sorted(_entries().items())}


def find_verifier(name: str) -> Found:
    """A verifier of FedSilo, of an installed package, or a mixture of both. Nothing of a package is loaded.

    Raises:
        UsageError: unknown; the hint lists the names.
    """
    parts, executes, origin = mixture.parse(name), False, []
    # packages are looked through only where a name is not ours
    entries = _entries() if any(part.verifier not in VERIFIERS for part in parts) else {}
    for part in parts:
        if part.verifier in VERIFIERS:
            executes |= VERIFIERS[part.verifier].executes
        elif part.verifier in entries:
            origin.append(_origin(entries[part.verifier]))
        else:
            known = ", ".join([*VERIFIERS, *sorted(entries)])
            raise UsageError(
                f"unknown verifier {part.verifier!r}",
                hint=f"one of {known}; a package brings its own as an entry point of the group {GROUP}",
            )
    return Found(name, executes, tuple(origin))


def load_grade(name: str, run_program: Grade | None) -> Grade:
    """What grades by that name; for the grading process only, since it loads what a package brought.

    Args:
        name: a verifier or a mixture.
        run_program: grades for `code`; None where programs may not be run.

    Raises:
        UsageError: unknown, not what a verifier must be, or it runs programs and may not.
    """
    found = find_verifier(name)
    parts = mixture.parse(name)
    graders: list[Grade] = []
    for part in parts:
        if part.verifier not in VERIFIERS:
            graders.append(_own(_entries()[part.verifier]))
        elif not VERIFIERS[part.verifier].executes:
            grading.prepare(part.verifier)
            graders.append(_built_in(part.verifier, part.form))
        elif run_program is None:
            raise UsageError(f"the verifier {found.name!r} runs a program", code="VERIFIER_EXECUTES")
        else:
            graders.append(run_program)

    def grade(response: str, reference: str) -> Verdict:
        return mixture.mixed(parts, [each(response, reference) for each in graders])

    return grade


def _built_in(name: str, form: str) -> Grade:
    return lambda response, reference: grading.grade(name, response, form or reference)


def _own(entry: metadata.EntryPoint) -> Grade:
    try:
        brought: Any = entry.load()
    except Exception as error:
        raise UsageError(
            f"the verifier {entry.name!r} of {_origin(entry)} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    grade = getattr(brought, "grade", None)
    if not callable(grade):
        raise UsageError(
            f"the verifier {entry.name!r} of {_origin(entry)} ({entry.value}) has no grade(response, reference)"
        )
    check = getattr(brought, "check_reference", None)

    def graded(response: str, reference: str) -> Verdict:
        try:
            if callable(check) and not check(reference):
                return BAD_REFERENCE
            said = grade(response, reference)
        except Exception:  # noqa: BLE001  # of any kind: an exception of a verifier scores 0 and is counted (methods 1.2)
            return ERROR
        if isinstance(said, Verdict):
            return said
        return judged(said) if isinstance(said, bool) else ERROR

    return graded


def _entries() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP) if entry.name not in VERIFIERS}


def _origin(entry: metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
