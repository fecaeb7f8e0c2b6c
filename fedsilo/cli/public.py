"""`fedsilo public`: the public set, before a site agrees to it."""

from __future__ import annotations

import json
import re
import secrets
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsilo.cli.output import command, emit, table
from fedsilo.files.durable import read_regular
from fedsilo.protocol.errors import OperationError, UsageError

if TYPE_CHECKING:
    from policies.model import ScreenName, TextScreens
    from policies.screens import Material


# ---- the lint --------------------------------------------------------------------------------------------------------


PROMPT_CHARACTERS_MAX = 16_384
ROWS_MAX = 1_000_000
FALSE_POSITIVE_RATE = 1e-6

# A prompt asks a question; these address whoever answers as a machine that holds other texts than this one.
_INSTRUCTIONS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\b(ignore|disregard|forget|override)\b.{0,40}\b(above|previous|prior|earlier|all|your|these|the)\b.{0,40}"
        r"\b(instructions?|rules?|prompts?|messages?|context|guidelines?)\b",
        r"\b(system|developer)\s+(prompt|message)\b",
        r"\byou\s+are\s+(now|no\s+longer)\b",
        r"\b(repeat|recite|reproduce|output|print|reveal|disclose|quote|list|dump|continue)\b.{0,60}"
        r"\b(training\s+(data|examples?|set|texts?)|memori[sz]ed|verbatim|word\s+for\s+word|other\s+(patients?|prompts?"
        r"|questions?|records?)|private|confidential|medical\s+records?|patient\s+(records?|notes?|data))\b",
        r"\b(patients?|customers?|clients?)\b.{0,40}\b(names?|addresses|dates?\s+of\s+birth|phone\s+numbers?)\b.{0,40}"
        r"\b(you|your|seen|know|remember)\b",
        r"\b(act|behave|respond)\s+as\s+(if|though|an?\s+(unrestricted|different|evil))\b",
        r"\b(do\s+not|don't|never)\s+(refuse|mention|tell|reveal\s+that)\b",
        r"<\|[a-z_]{1,32}\|>|\[/?INST\]|<</?SYS>>|^\s*(system|assistant)\s*:",
    )
)
# Marks that reorder or hide what a person sees: bidirectional controls, zero-width characters, tags.
_HIDING = frozenset(
    "\u061c\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"
)
_PLAIN_CONTROLS = frozenset("\n\t")


@dataclass(frozen=True)
class Finding:
    """line: of the file, from 1; 0 is the whole file. count: how often, or how large."""

    line: int
    code: str
    count: int


MEANINGS = {
    "malformed": "no task of the form id, prompt, answer, topic",
    "instruction": "text that gives a model orders instead of a task",
    "overlap": "passages of n words that stand in the private records",
    "canary": "canaries of this site",
    "control": "control characters",
    "hidden": "characters that hide or reorder text",
    "duplicate": "the same prompt as in an earlier line",
    "size": "characters of a prompt, or rows, beyond what a public set has",
}


def lint_set(file: Path, *, private: Sequence[Path], canaries: Sequence[str], n: int) -> list[Finding]:
    """Read a public set and list what is wrong with it, by line. `n` is the words of a passage that counts as overlap.

    Raises:
        NotFoundError, UsageError: a file is missing or cannot be read.
    """
    rows = list(_rows(file))
    findings = [finding for row in rows for finding in _of_characters(row)]
    findings += _duplicates(rows)
    if len(rows) > ROWS_MAX:
        findings.append(Finding(0, "size", len(rows)))
    findings += _screened(rows, _material(private, canaries, n), n)
    return sorted(findings, key=lambda finding: (finding.line, finding.code))


@dataclass(frozen=True)
class _Row:
    """prompt: None for a line that is no task; then `texts` is the line itself."""

    line: int
    prompt: str | None
    texts: tuple[str, ...]


def _rows(file: Path) -> Iterator[_Row]:
    from fedsilo.files.task_files import LINE_BYTES_MAX

    for number, line in enumerate(read_regular(file).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line) if len(line) <= LINE_BYTES_MAX else None
        except (ValueError, RecursionError):
            value = None
        task = value if isinstance(value, dict) else {}
        texts = [task.get(name) for name in ("id", "prompt", "answer", "topic")]
        if all(isinstance(text, str) for text in texts):
            yield _Row(number, str(task["prompt"]), tuple(str(text) for text in texts))
        else:
            yield _Row(number, None, (line[:LINE_BYTES_MAX].decode("utf-8", "replace"),))


def _of_characters(row: _Row) -> Iterator[Finding]:
    """Yield the findings about one row by itself."""
    counts = {
        "malformed": int(row.prompt is None),
        "instruction": sum(bool(pattern.search(text)) for text in row.texts for pattern in _INSTRUCTIONS),
        "control": sum(_is_control(mark) for text in row.texts for mark in text),
        "hidden": sum(mark in _HIDING or "\U000e0000" <= mark <= "\U000e007f" for text in row.texts for mark in text),
        "size": len(row.prompt) if row.prompt is not None and len(row.prompt) > PROMPT_CHARACTERS_MAX else 0,
    }
    return (Finding(row.line, code, count) for code, count in counts.items() if count)


def _is_control(mark: str) -> bool:
    return unicodedata.category(mark) == "Cc" and mark not in _PLAIN_CONTROLS


def _duplicates(rows: Sequence[_Row]) -> Iterator[Finding]:
    from fedsilo.grading.exact import normalise

    seen: set[str] = set()
    for row in rows:
        if row.prompt is None:
            continue
        prompt = normalise(row.prompt)
        if prompt in seen:
            yield Finding(row.line, "duplicate", 1)
        seen.add(prompt)


def _material(private: Sequence[Path], canaries: Sequence[str], n: int) -> Material:
    """Return what the screens compare with. The index exists for this one command, under a key of its own."""

    from fedsilo.files.task_files import read_tasks
    from policies.screens import Material
    from policies.screens.overlap import OverlapIndex, build_index

    if not private:
        return Material(canaries=tuple(canaries))
    key = secrets.token_bytes(32)
    records = (text for path in private for task in read_tasks(path).rows for text in (task.prompt, task.answer))
    data = build_index(records, key=key, n=n, false_positive_rate=FALSE_POSITIVE_RATE)
    return Material(overlap=OverlapIndex.from_bytes(data, key=key), canaries=tuple(canaries))


def _screened(rows: Sequence[_Row], material: Material, n: int) -> Iterator[Finding]:
    """Hits of the overlap and canary screens, by line."""

    from policies.screens import screen_texts

    wanted: list[tuple[ScreenName, object]] = [("overlap", material.overlap), ("canary", material.canaries)]
    names = [name for name, compared_with in wanted if compared_with]
    if not names:
        return
    lines = [row.line for row in rows for _ in row.texts]
    found: Counter[tuple[int, str]] = Counter()
    for hit in screen_texts(_definitions(n), names, material, [text for row in rows for text in row.texts]):
        found[lines[hit.text], hit.screen] += hit.count
    for (line, screen), count in found.items():
        yield Finding(line, screen, count)


def _definitions(n: int) -> TextScreens:
    from policies.model import TextScreens

    return TextScreens.model_validate(
        {
            "overlap": {
                "unit": "word",
                "n": n,
                "max_matching_ngrams": 0,
                "background_set": None,
                "false_positive_rate": FALSE_POSITIVE_RATE,
            },
            "canary": {"max_edit_distance": 2, "decode": ["base64", "hex", "reversed"]},
        }
    )


# ---- `fedsilo public` ------------------------------------------------------------------------------------------------


app = typer.Typer(no_args_is_help=True, help="The public set, before a site agrees to it.")

_SHOWN_MAX = 50
_N_MIN, _N_MAX = 3, 64


@app.callback()
def _public() -> None:
    """The public set, before a site agrees to it."""


@command(app, "public lint")
def lint(
    file: Annotated[Path, typer.Argument(help="The public set, JSONL.")],
    private: Annotated[
        list[Path] | None, typer.Option("--private", help="Task file of this site to compare with; may be repeated.")
    ] = None,
    canaries: Annotated[
        Path | None, typer.Option("--canaries", help="Texts that must never leave, one a line; mode 0600.")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Words in a row that count as overlap with a private record.")] = 8,
) -> None:
    """Look for orders to a model, passages of private records, canaries, hidden characters, duplicates and size.

    Exit code 1 where anything is found. Findings are lines, codes and counts; the text itself is not shown.
    """
    from silo.guard.screens import read_canaries

    if not _N_MIN <= n <= _N_MAX:
        raise UsageError(f"--n {n} is not {_N_MIN} to {_N_MAX}")
    known = read_canaries(canaries) if canaries is not None else ()
    findings = lint_set(file, private=private or [], canaries=known, n=n)
    rows = [{"line": finding.line, "code": finding.code, "count": finding.count} for finding in findings]
    data = {
        "file": str(file),
        "compared_with": [str(path) for path in private or []],
        "canaries": len(known),
        "findings": rows,
    }
    error = None
    if findings:
        error = OperationError(
            f"{file}: {len(findings)} findings in {len({finding.line for finding in findings})} lines",
            hint="look at these lines with a viewer that shows control characters; change the set, not the policy",
            code="LINT_FINDINGS",
        )
    shown = [(f"{file}:{row['line']}", row["code"], row["count"], MEANINGS[str(row["code"])]) for row in rows]
    left = f"\n... and {len(shown) - _SHOWN_MAX} more (--json has them all)" if len(shown) > _SHOWN_MAX else ""
    emit(
        data,
        lambda: table(("where", "code", "count", "what"), shown[:_SHOWN_MAX]) + left if shown else "nothing found",
        error=error,
    )
