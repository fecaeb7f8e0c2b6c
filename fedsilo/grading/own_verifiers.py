"""Verifiers that a site brings itself: installed packages name them as entry points of the group `fedsilo.verifiers`.

    [project.entry-points."fedsilo.verifiers"]
    dosage = "our_package.dosage"          # a module or object with grade(response, reference) -> bool or Verdict
                                           # and, if it has one, check_reference(reference) -> bool

Only a name is ever configured, never a path to code (T22): what it means was decided by who installed the package. It
is looked up without being loaded; loaded and run it is in the killable grading process alone, under that process's
limits on time and memory. What this does not stop: such a verifier is code of the site and may read and send what the
grading process may; in a silo the trainer's sandbox is around it, elsewhere nothing is. One that runs programs of a
model must build a sandbox of its own.

`VerifierName` is the type of a field that names a verifier in a configuration file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import resource
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from fedsilo import grading
from fedsilo.grading import VERIFIERS, Verifier, mixture, require_verifier
from fedsilo.grading.verdict import BAD_REFERENCE, ERROR, Verdict, judged
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.strict_yaml import WrongValueError

GROUP = "fedsilo.verifiers"
SOURCE_FILES_MAX = 10_000  # of one package; beyond, the entry point names something else than a verifier
SOURCE_BYTES_MAX = 256 << 20
Grade = Callable[[str, str], Verdict]
Tell = Callable[[str], None]


def own_names() -> dict[str, str]:
    """Names that installed packages bring, with the distribution of each. FedSilo's own names cannot be taken."""
    return {name: _origin(entry) for name, entry in sorted(_entries().items())}


def find_verifier(name: str) -> Verifier:
    """A verifier of FedSilo, of an installed package, or a mixture of both. Nothing of a package is loaded.

    Raises:
        UsageError: unknown; the hint lists the names.
    """
    # packages are looked through only where a name is not ours
    is_ours = all(part.verifier in VERIFIERS for part in mixture.parse(name))
    return require_verifier(name, {} if is_ours else own_names())


def own_verifiers_sha256(names: Iterable[str]) -> str:
    """Return one digest over every part of these verifiers that a package brought; empty where all parts are FedSilo's.

    What it covers, of each: the name, the entry point, distribution and version, and the content of every file of the
    top-level package (or module) that it lies in. So two sites whose package goes by one name and says other things
    differ in it. Nothing is loaded. What it does not cover: what that package imports from others.

    Args:
        names: verifiers or mixtures.

    Raises:
        UsageError: unknown; or its files cannot be read, or are too many for a verifier.
    """
    parts = {part.verifier for name in names for part in mixture.parse(find_verifier(name).name)} - set(VERIFIERS)
    if not parts:
        return ""
    entries = _entries()
    identities = [
        {"name": name, "value": entries[name].value, "origin": _origin(entries[name]), "source": _source(entries[name])}
        for name in sorted(parts)
    ]
    return hashlib.sha256(json.dumps(identities, sort_keys=True).encode()).hexdigest()


def load_grade(name: str, run_program: Grade | None, tell: Tell = lambda report: None) -> Grade:
    """Return the grading function of that name; for the grading process only, since it loads what a package brought.

    Args:
        name: a verifier or a mixture.
        run_program: grades for `code`; None where programs may not be run.
        tell: told why a verifier of a package gave no verdict, with file and line. The message of an exception may
            quote the response or the answer: this is for its author's eyes, and never for a log.

    Raises:
        UsageError: unknown, not what a verifier must be, or it runs programs and may not.
    """
    verifier = find_verifier(name)
    parts = mixture.parse(name)
    graders: list[Grade] = []
    for part in parts:
        if part.verifier not in VERIFIERS:
            graders.append(_own(_entries()[part.verifier], tell))
        elif not VERIFIERS[part.verifier].executes:
            grading.prepare(part.verifier)
            graders.append(_built_in(part.verifier, part.form))
        elif run_program is None:
            raise UsageError(f"the verifier {verifier.name!r} runs a program", code="VERIFIER_EXECUTES")
        else:
            graders.append(run_program)

    def grade(response: str, reference: str) -> Verdict:
        return mixture.mixed(parts, [each(response, reference) for each in graders])

    return grade


def _built_in(name: str, form: str) -> Grade:
    return lambda response, reference: grading.grade(name, response, form or reference)


def _own(entry: metadata.EntryPoint, tell: Tell) -> Grade:
    try:
        brought: Any = entry.load()
    except Exception as error:
        raise UsageError(
            f"the verifier {entry.name!r} of {_origin(entry)} cannot be loaded: {type(error).__name__}: {error}"
            + _place(error, entry)
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
            judgement = grade(response, reference)
        except Exception as error:  # noqa: BLE001  # of any kind: it scores 0 and is counted
            memory_mebibytes = resource.getrlimit(resource.RLIMIT_AS)[0] >> 20
            why = f"out of memory, of {memory_mebibytes} MiB" if isinstance(error, MemoryError) else str(error)
            tell(f"the verifier {entry.name!r} raised {type(error).__name__}: {why}{_place(error, entry)}")
            return ERROR
        if isinstance(judgement, Verdict):
            return judgement
        if isinstance(judgement, bool):
            return judged(judgement)
        tell(
            f"the verifier {entry.name!r} returned {judgement!r:.100} of type {type(judgement).__name__}:"
            " not True, False or a Verdict"
        )
        return ERROR

    return graded


def _place(error: BaseException, entry: metadata.EntryPoint) -> str:
    """Return where in the verifier's own package an exception arose, else where it arose at all; empty for no place."""
    frames = traceback.extract_tb(error.__traceback__)
    top = entry.module.partition(".")[0]
    own = [frame for frame in frames if top in Path(frame.filename).with_suffix("").parts]
    frame = next(reversed(own or frames), None)
    return f", at {frame.filename}:{frame.lineno} in {frame.name}" if frame is not None else ""


def _entries() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP) if entry.name not in VERIFIERS}


def _source(entry: metadata.EntryPoint) -> str:
    """SHA-256 over the names and contents of the files of the package that an entry point leads into."""
    top = entry.module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)  # of a top-level name, so that nothing is run
    except ValueError:  # a module without a spec stands in its place
        spec = None
    if spec is None:
        raise UsageError(f"the verifier {entry.name!r} of {_origin(entry)} is in {top}, which is not installed")
    digest, files, size = hashlib.sha256(), 0, 0
    try:
        for name, path in _files([Path(each) for each in spec.submodule_search_locations or [spec.origin or top]]):
            files, size = files + 1, size + path.stat().st_size
            if files > SOURCE_FILES_MAX or size > SOURCE_BYTES_MAX:
                raise UsageError(
                    f"the verifier {entry.name!r} of {_origin(entry)} lies in {top}, which is too large to compare",
                    hint=f"a package of its own for it: {SOURCE_FILES_MAX} files, {SOURCE_BYTES_MAX >> 20} MiB at most",
                )
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    except OSError as error:
        raise UsageError(f"the files of the verifier {entry.name!r} cannot be read: {error}") from error
    return digest.hexdigest()


def _files(places: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """(name within the package, file), sorted; without what Python compiled."""
    for place in places:
        if place.is_dir():
            inside = [each for each in place.rglob("*") if each.is_file() and "__pycache__" not in each.parts]
            yield from sorted((each.relative_to(place).as_posix(), each) for each in inside)
        else:
            yield place.name, place


def _origin(entry: metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def name_in_file(value: Any, look_up: Callable[[str], object]) -> str:
    """The name that a file's value stands for.

    Args:
        value: a text, or a mapping {name: weight} whose order is kept.
        look_up: raises UsageError for a name that there is not.

    Raises:
        WrongValueError: it is none.
    """
    try:
        if isinstance(value, Mapping):
            weights = dict(value)
            if not weights or not all(isinstance(each, str) for each in weights):
                raise UsageError("a mixture is a mapping of names to weights", hint="as in: {math: 0.9, format: 0.1}")
            if any(isinstance(each, bool) or not isinstance(each, int | float) for each in weights.values()):
                raise UsageError("the weights of a mixture must be numbers", hint="as in: {math: 0.9, format: 0.1}")
            value = mixture.name_of(weights)
        if not isinstance(value, str):
            raise UsageError("must be a name or a mapping of names to weights", hint="as in: math")
        look_up(value)
    except UsageError as error:
        raise WrongValueError(error.message, error.hint) from error
    return value


# Also what packages bring (own_verifiers.py): at a silo.
AnyVerifier = Annotated[str, BeforeValidator(lambda value: name_in_file(value, find_verifier))]
# FedSilo's own parts only: where no code of a site may be loaded.
OwnPartsVerifier = Annotated[str, BeforeValidator(lambda value: name_in_file(value, require_verifier))]
