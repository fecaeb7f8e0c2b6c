"""`fedsilo grade`: judge responses, one JSON object a line in, the same line with its verdict out."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.launch.output import JsonOption, emit, guarded
from fedsilo.launch.standard_streams import write_err, write_out

if TYPE_CHECKING:
    from fedsilo.edge.grading_process import GradingProcess

LINE_BYTES_MAX = 8 << 20
# With the start of another grading process after it (some 2 s with sympy on a slow core) a case stays below 5 s.
CASE_SECONDS = 2.5
CODE_SECONDS = 4.9
_STANDARD_INPUT = Path("-")


class _Unreadable(Exception):
    """Why a line cannot be judged."""


@guarded("grade")
def grade(
    verifier: Annotated[
        str,
        typer.Option(
            "--verifier",
            help="math, choice, exact, numeric, format, code, an own one, or a mixture: math*0.9+format*0.1.",
        ),
    ],
    file: Annotated[Path, typer.Argument(help="JSON lines; `-` or nothing: standard input.")] = _STANDARD_INPUT,
    json_output: JsonOption = False,
) -> None:
    """Judge responses: each line comes back in its place with "correct" and "code" added, as soon as it is judged.

    A line holds "gold" (or "answer") and "response", or "response_parts": a list of [text, count]. A line that cannot
    be read comes back with "correct": false and "error". With --json only the counts are printed, in one envelope.
    Exit code 0 means that every line was answered, whatever the verdicts. A case takes at most 5 seconds.
    """
    from fedsilo.edge.grading_process import GradingProcess
    from fedsilo.edge.own_verifiers import find_verifier
    from fedsilo.launch.input_files import require_plain_file

    found = find_verifier(verifier)
    if file != _STANDARD_INPUT:
        require_plain_file(file, hint="a pipe goes into standard input: COMMAND | fedsilo grade --verifier math -")
    counts: Counter[str] = Counter()
    rewards = 0.0
    lines = file.open("rb") if file != _STANDARD_INPUT else sys.stdin.buffer
    seconds = CODE_SECONDS if found.executes else CASE_SECONDS
    with lines, GradingProcess(verifier, deadline_seconds=seconds, runs_programs=True) as process:
        process.wait_ready()  # a sandbox that cannot be built is told before the first line, not in each
        for number, line in _lines(lines):
            told, code, reward = _judged(process, number, line)
            counts[code] += 1
            rewards += reward
            if not json_output:
                write_out(json.dumps(told) + "\n")
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
    if json_output:
        emit("grade", data, json_output=True, text="", warnings=warnings)
        return
    for warning in warnings:
        write_err(f"warning: {warning}\n")


def _judged(process: GradingProcess, number: int, line: bytes | None) -> tuple[dict[str, Any], str, float]:
    """The line to print, the verdict's code, and the reward."""
    from fedsilo.treaty.grading import RESPONSE_CHARACTERS_MAX
    from fedsilo.treaty.grading.verdict import TOO_COSTLY

    row: dict[str, Any] = {}
    try:
        row = _row(line)
        gold, response = _gold(row), _response(row, RESPONSE_CHARACTERS_MAX)
        verdict = process.grade(response, gold) if response is not None else TOO_COSTLY
    except _Unreadable as unreadable:
        return {**(row or {"line": number}), "correct": False, "error": str(unreadable)}, "unreadable", 0.0
    told = {**row, "correct": verdict.correct, "code": verdict.code.value}
    if verdict.reward != float(verdict.correct):
        told["reward"] = verdict.reward
    return told, verdict.code.value, verdict.reward


def _row(line: bytes | None) -> dict[str, Any]:
    """Raises _Unreadable."""
    if line is None:
        raise _Unreadable(f"longer than {LINE_BYTES_MAX} bytes")
    try:
        row = json.loads(line)
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
    if not isinstance(gold, str):
        raise _Unreadable('needs the text "gold"')
    return gold


def _response(row: dict[str, Any], characters_max: int) -> str | None:
    """The response; None for one that is longer than any verifier looks at, which is never put together."""
    if isinstance(row.get("response"), str):
        return str(row["response"])
    parts = row.get("response_parts")
    if not isinstance(parts, list):
        raise _Unreadable('needs the text "response", or "response_parts"')
    for part in parts:
        if not (isinstance(part, list) and len(part) == 2 and isinstance(part[0], str) and type(part[1]) is int):
            raise _Unreadable('"response_parts" is not a list of [text, count]')
        if part[1] < 0:
            raise _Unreadable('a count in "response_parts" is negative')
    if sum(len(text) * count for text, count in parts) > characters_max:
        return None
    return "".join(text * count for text, count in parts)


def _lines(source: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """(line number, line) without empty lines; None for one that is too long to be held."""
    number = 0
    while line := source.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX and not line.endswith(b"\n"):
            while (rest := source.readline(1 << 16)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line
