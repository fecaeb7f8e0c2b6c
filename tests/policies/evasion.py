"""The evasion corpus (threat T16): private text in disguise, and what the screens make of it.

Each line of tests/vectors/evasion.jsonl: what was planted, the trick, the answers a trainer would offer, the screen
(and the pattern of pii_basic) that should notice, and whether it does. The private corpus is what the lines of
`overlap` plant, the canaries what those of `canary` plant.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from policies.model import Alphabet, Decoder, PatternName, ScreenName, TextScreens
from policies.screens import Hit, Material, screen_texts
from policies.screens.overlap import OverlapIndex, build_index

CORPUS = Path(__file__).resolve().parents[1] / "vectors" / "evasion.jsonl"
KEY = bytes(range(32))
ALLOWED: tuple[Alphabet, ...] = ("latin", "greek", "digits", "punctuation", "math")
# All four screens with everything they can look for.
EVERYTHING = TextScreens.model_validate(
    {
        "pii_basic": {"patterns": get_args(PatternName)},
        "overlap": {"unit": "word", "n": 8, "max_matching_ngrams": 0, "false_positive_rate": 1e-9},
        "canary": {"max_edit_distance": 2, "decode": get_args(Decoder)},
        "charset": {"allow": ALLOWED, "max_run_nonword": 40},
    }
)


@dataclass(frozen=True)
class Case:
    id: str
    trick: str
    screen: ScreenName
    planted: str
    answers: tuple[str, ...]
    caught: bool
    pattern: str = ""


@functools.cache
def cases() -> tuple[Case, ...]:
    rows = [json.loads(line) for line in CORPUS.read_text().splitlines()]
    return tuple(Case(**{**row, "answers": tuple(row["answers"])}) for row in rows)


@functools.cache
def material() -> Material:
    passages = sorted({case.planted for case in cases() if case.screen == "overlap"})
    index = build_index(passages, key=KEY, n=8, false_positive_rate=1e-9)
    planted = sorted({case.planted for case in cases() if case.screen == "canary"})
    return Material(OverlapIndex.from_bytes(index, key=KEY), tuple(planted))


def hits(case: Case) -> list[Hit]:
    """What the case's own screen says of its answers; of pii_basic, the case's own pattern."""
    found = screen_texts(EVERYTHING, [case.screen], material(), case.answers)
    return [hit for hit in found if not case.pattern or hit.code.partition("/")[0] == case.pattern]


def missed(some: Sequence[Case]) -> list[Case]:
    return [case for case in some if not hits(case)]
