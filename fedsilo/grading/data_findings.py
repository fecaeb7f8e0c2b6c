"""Finds prompts where they should not be: twice in the private files, or also in the public or the held-out set.

A private prompt that is also in the held-out set is trained on and then measured, so the measure is too good. Rows are
compared twice: `same` as the `exact` verifier compares answers, and `alike` by their words alone. In an alike pair
punctuation, markup and white space may differ, and from `NUMBERS_ASIDE_WORDS` words on the numbers too. In shorter
prompts numbers count: "what is 3 + 4" and "what is 5 + 6" are two tasks.

What this does not find: the same question in other words, in another language, or as a part of a longer prompt; a leak
from what the base model was trained on; the private files of other sites.

A finding carries ids and places of rows, never a text. Ids may be names of patients, so they are for this site's
terminal; `Finding.words` without ids is for its logs. Time and memory are linear in the rows (100,000 of 100 words take
some 4 s and 30 MiB): of each prompt two keys of 8 bytes are kept, so that in one of 10^9 such files two meet by chance.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsilo.files.task_files import Task, TaskFile
from fedsilo.grading.exact import normalise

EXAMPLES_MAX = 5
NUMBERS_ASIDE_WORDS = 20
PRIVATE, PUBLIC, HELD_OUT = "private", "public", "held_out"
_NAMES = {PRIVATE: "private files", PUBLIC: "public set", HELD_OUT: "held-out set"}
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Example:
    """A row and one that it repeats: id, file and place of each."""

    id: str
    path: Path
    line: int
    other_id: str
    other_path: Path
    other_line: int


@dataclass(frozen=True)
class Finding:
    """Rows of `where` that repeat a row of `also`, alike or the same; (private, private) are duplicates.

    `rows` counts rows of `where`; `examples` are the first of them.
    """

    where: str
    also: str
    alike: bool
    rows: int
    examples: tuple[Example, ...]

    def words(self, *, ids: bool) -> str:
        """One sentence. ids: also the first rows by id and place; else by place alone."""
        many = "prompt is" if self.rows == 1 else "prompts are"
        kind = "all but the same as another" if self.alike else "the same as another"
        if self.where == self.also:
            sentence = f"{self.rows} {many} {kind} in the {_NAMES[self.where]}"
        else:
            sentence = f"{self.rows} {many} {kind.replace('another', 'one')} in the {_NAMES[self.also]}"
            sentence = f"{_NAMES[self.where]}: {sentence}"
        shown = "; ".join(
            f"{_quoted(each.id) if ids else ''}{each.path.name}:{each.line} = "
            f"{_quoted(each.other_id) if ids else ''}{each.other_path.name}:{each.other_line}"
            for each in self.examples
        )
        return f"{sentence}: {shown}{'; ...' if self.rows > len(self.examples) else ''}"


def _quoted(text: str) -> str:
    return f"{text[:40]!r} "


def find(private: Sequence[TaskFile], public: TaskFile, held_out: TaskFile) -> list[Finding]:
    """Duplicates within each set, and leaks between every two; those that are merely alike after those that are the
    same. A row counts once per pair of sets: as the same, else as alike."""
    sets = {PRIVATE: tuple(private), PUBLIC: (public,), HELD_OUT: (held_out,)}
    keys = {
        name: [(file, task, *_keys_of(task.prompt)) for file in files for task in file.rows]
        for name, files in sets.items()
    }
    findings: list[Finding] = []
    for where, also in (
        (PRIVATE, HELD_OUT),
        (PRIVATE, PUBLIC),
        (PUBLIC, HELD_OUT),
        (PRIVATE, PRIVATE),
        (PUBLIC, PUBLIC),
        (HELD_OUT, HELD_OUT),
    ):
        findings += _compare(where, keys[where], also, keys[also])
    return sorted(findings, key=lambda each: each.alike)


_Keyed = tuple[TaskFile, Task, int, int]


def _compare(where: str, rows: Sequence[_Keyed], also: str, others: Sequence[_Keyed]) -> Iterator[Finding]:
    within = where == also
    first: tuple[dict[int, _Keyed], dict[int, _Keyed]] = ({}, {})
    if not within:
        for other in others:
            first[0].setdefault(other[2], other)
            first[1].setdefault(other[3], other)
    counts, examples = [0, 0], (list[Example](), list[Example]())
    for row in rows:
        hits = [first[0].get(row[2]), first[1].get(row[3])]
        if within:
            first[0].setdefault(row[2], row)
            first[1].setdefault(row[3], row)
        alike = 0 if hits[0] is not None else 1
        hit = hits[alike]
        if hit is None:
            continue
        counts[alike] += 1
        if len(examples[alike]) < EXAMPLES_MAX:
            examples[alike].append(Example(row[1].id, row[0].path, row[1].line, hit[1].id, hit[0].path, hit[1].line))
    for alike in (0, 1):
        if counts[alike]:
            yield Finding(where, also, bool(alike), counts[alike], tuple(examples[alike]))


def _keys_of(prompt: str) -> tuple[int, int]:
    same = normalise(prompt)
    words = _WORD.findall(same)
    if len(words) >= NUMBERS_ASIDE_WORDS:
        words = ["0" if word.isdigit() else word for word in words]
    # A prompt of signs alone has no words, and is alike to nothing but itself.
    return _digest(same), _digest(" ".join(words) if words else same)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")
