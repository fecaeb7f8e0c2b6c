"""`fedsilo grade`: judge responses, one JSON object a line in, the same line with its verdict out."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.options import require_plain_file
from fedsilo.cli.output import emit, running, write_err, write_out

if TYPE_CHECKING:
    from fedsilo.grading.worker import GradingProcess

LINE_BYTES_MAX = 8 << 20
# With the start of another grading process after it (some 2 s with sympy on a slow core) a case stays below 5 s.
CASE_SECONDS = 2.5
CODE_SECONDS = 4.9
REPORTS_MAX = 10  # of what an own verifier did wrong, in the envelope of --json
# what this command says of a line; what the line itself held under these names is left out
_OWN_FIELDS = ("correct", "code", "reward", "error")
_WHY = {
    "error": "the verifier failed",
    "timeout": f"no verdict within {CASE_SECONDS} seconds",
    "crashed": "the process that graded it ended",
}
_INTEGER_DIGITS_MAX = 400  # beyond, and with a point or an exponent, a number is written back as it came
_MARK = secrets.token_hex(16)  # nothing in a line can be taken for it
_STANDARD_INPUT = Path("-")


class _Unreadable(Exception):
    """Why a line cannot be judged."""


class _Number(str):
    """The digits of a number that Python would round, or take minutes to read."""


def grade(
    verifier: Annotated[
        str,
        typer.Option(
            "--verifier",
            help="math, choice, exact, final, numeric, format, code, an own one, or a mixture: math*0.9+format*0.1.",
        ),
    ],
    file: Annotated[Path, typer.Argument(help="JSON lines; `-` or nothing: standard input.")] = _STANDARD_INPUT,
) -> None:
    """Judge responses: each line comes back in its place with "correct" and "code" added, as soon as it is judged.

    A line holds "gold" (or "answer") and "response", or "response_parts": a list of [text, count]. A line that cannot
    be read comes back with "correct": false and "error". With --json only the counts are printed, in one envelope.
    Exit code 0 means that every line was answered, whatever the verdicts. A case takes at most 5 seconds. Where an
    own verifier fails, standard error says on which line, why, and where in its code.
    """
    from fedsilo.grading.own_verifiers import find_verifier
    from fedsilo.grading.worker import GradingProcess

    found = find_verifier(verifier)
    if file != _STANDARD_INPUT:
        require_plain_file(file, hint="a pipe goes into standard input: COMMAND | fedsilo grade --verifier math -")
    counts: Counter[str] = Counter()
    reports: list[str] = []
    rewards = 0.0
    lines = file.open("rb") if file != _STANDARD_INPUT else sys.stdin.buffer
    seconds = CODE_SECONDS if found.executes else CASE_SECONDS
    with lines, GradingProcess(verifier, deadline_seconds=seconds, runs_programs=True, reports=True) as process:
        process.wait_ready()  # a sandbox that cannot be built is told before the first line, not in each
        for number, line in _lines(lines):
            told, code, reward = _judged(process, number, line)
            counts[code] += 1
            rewards += reward
            why = process.take_report() or _WHY.get(code, "")
            if found.origin and code in _WHY:
                if not running().json_output:
                    write_err(f"line {number}: {why}\n")
                elif len(reports) < REPORTS_MAX:
                    reports.append(f"line {number}: {why}")
            if not running().json_output:
                write_out(_text(told) + "\n")
    data = {
        "verifier": found.name,
        "origin": list(found.origin),
        "cases": sum(counts.values()),
        "correct": counts["correct"],
        "codes": dict(sorted(counts.items())),
        "reward_mean": rewards / max(1, sum(counts.values())),
    }
    unread = counts["unreadable"]
    warnings = [f'{unread} lines could not be read; each has an "error" that says why'] if unread else []
    warnings += reports
    if running().json_output:
        emit(data, warnings=warnings)
        return
    for warning in warnings:
        write_err(f"warning: {warning}\n")


def _judged(process: GradingProcess, number: int, line: bytes | None) -> tuple[dict[str, Any], str, float]:
    """The line to print, the verdict's code, and the reward."""
    from fedsilo.grading import RESPONSE_CHARACTERS_MAX
    from fedsilo.grading.verdict import TOO_COSTLY

    row: dict[str, Any] = {}
    try:
        row = _row(line)
        gold, response = _gold(row), _response(row, RESPONSE_CHARACTERS_MAX)
        verdict = process.grade(response, gold) if response is not None else TOO_COSTLY
    except _Unreadable as unreadable:
        return {**(_kept(row) or {"line": number}), "correct": False, "error": str(unreadable)}, "unreadable", 0.0
    told = {**_kept(row), "correct": verdict.correct, "code": verdict.code.value}
    if verdict.reward != float(verdict.correct):
        told["reward"] = verdict.reward
    return told, verdict.code.value, verdict.reward


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _OWN_FIELDS}


def _text(told: dict[str, Any]) -> str:
    """Return one line of JSON, with numbers written as they were read."""
    return re.sub(rf'"{_MARK}([^"]*)"', r"\1", json.dumps(told, allow_nan=False))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object without repeated keys. Raises _Unreadable."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for key, many in Counter(name for name, _ in pairs).items() if many > 1)
        raise _Unreadable(f"holds the key {twice!r:.100} twice")
    return row


def _integer(digits: str) -> int | _Number:
    return int(digits) if len(digits) <= _INTEGER_DIGITS_MAX else _Number(_MARK + digits)


def _no_constant(name: str) -> None:
    raise _Unreadable(f"not JSON: {name} is no number there")


def _row(line: bytes | None) -> dict[str, Any]:
    """Parse one line. Raises _Unreadable."""
    if line is None:
        raise _Unreadable(f"longer than {LINE_BYTES_MAX} bytes")
    if not line.strip():
        raise _Unreadable("empty")
    try:
        row = json.loads(
            line,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=lambda digits: _Number(_MARK + digits),
            parse_constant=_no_constant,
        )
        json.dumps(row)
    except UnicodeDecodeError:
        raise _Unreadable("not UTF-8") from None
    except (ValueError, RecursionError):
        raise _Unreadable("not JSON") from None
    if not isinstance(row, dict):
        raise _Unreadable("not a JSON object")
    return row


def _gold(row: dict[str, Any]) -> str:
    gold = row.get("gold", row.get("answer"))
    if not isinstance(gold, str) or isinstance(gold, _Number):
        raise _Unreadable('needs the text "gold"')
    if row.get("answer", gold) != gold:
        raise _Unreadable('"gold" and "answer" differ')
    return gold


def _response(row: dict[str, Any], characters_max: int) -> str | None:
    """The response; None for one that is longer than any verifier looks at, which is never put together."""
    response, parts = row.get("response"), row.get("response_parts")
    if response is not None and parts is not None:
        raise _Unreadable('holds both "response" and "response_parts"')
    if isinstance(response, str) and not isinstance(response, _Number):
        return response
    if not isinstance(parts, list):
        raise _Unreadable('needs the text "response", or "response_parts"')
    for part in parts:
        if not (isinstance(part, list) and len(part) == 2 and type(part[0]) is str and type(part[1]) is int):
            raise _Unreadable('"response_parts" is not a list of [text, count]')
        if part[1] < 0:
            raise _Unreadable('a count in "response_parts" is negative')
    if sum(len(text) * count for text, count in parts) > characters_max:
        return None
    return "".join(text * count for text, count in parts)


def _lines(source: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """(line number, line) up to the last that is not empty; None for one that is too long to be held."""
    number, empty = 0, 0
    while line := source.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX and not line.endswith(b"\n"):
            while (rest := source.readline(1 << 16)) and not rest.endswith(b"\n"):
                pass
        if not line.strip():
            empty += 1
            continue
        yield from ((each, b"") for each in range(number - empty, number))
        empty = 0
        yield number, line if len(line) <= LINE_BYTES_MAX or line.endswith(b"\n") else None
