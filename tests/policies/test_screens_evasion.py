"""The evasion corpus (T16) and the benign one: what the screens catch, what they miss, and what they stop for nothing.

A miss stands in the corpus as one, so nobody can claim more than is true: a screen that begins to catch it fails here
until the line says so.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from policies.model import ScreenName
from policies.screens import Material, OverlapIndex, screen_texts
from policies.screens.overlap import build_index
from tests.policies.evasion import EVERYTHING, KEY, Case, cases, hits, material, missed

SAMPLES = Path(__file__).resolve().parents[2] / "examples" / "data"
PAGE = SAMPLES.parents[1] / "docs" / "how-to" / "screen-answers.md"
WHOLE_SETS = os.environ.get("FEDSILO_DATA", "")
# Known ways past the screens that must stand in the corpus, and stand there as misses.
N3 = ("paraphrase", "synonyms", "translated to French", "pig latin", "acrostic", "base32", "words run together")


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.id} {case.trick}")
def test_T16_what_the_corpus_says_is_caught_is_caught_and_what_it_says_is_missed_is_missed(case: Case) -> None:
    assert bool(hits(case)) == case.caught


def test_T16_recall_is_what_the_documents_say(record_property: pytest.RecordProperty) -> None:
    """Read with -s; the same figures come from `python -m benchmarks.screens --json`."""
    every, lost = cases(), missed(cases())
    screens = Counter(case.screen for case in every)
    for screen, count in sorted(screens.items()):
        tricks = sorted({case.trick for case in lost if case.screen == screen})
        caught = count - sum(case.screen == screen for case in lost)
        print(f"{screen}: {caught} of {count} caught; missed: {', '.join(tricks)}")
        assert f"| `{screen}` | {caught} of {count} | {', '.join(tricks)} |" in PAGE.read_text()
        record_property(f"recall_{screen}", caught / count)
    assert len(every) >= 120 and len({case.id for case in every}) == len(every)
    tricks = {(case.trick, case.screen, case.pattern, case.planted) for case in every}
    assert len(tricks) == len(every)  # no case twice
    assert set(N3) <= {case.trick for case in lost}
    # every trick that T16 lists: all of them are caught by the screens that read passages
    listed = ("capitals", "cyrillic look-alikes", "zero-width space", "base64", "hex", "reversed")
    for trick in listed:
        for screen in ("overlap", "canary"):
            assert [case.caught for case in every if (case.trick, case.screen) == (trick, screen)] == [True]
    assert all(case.caught for case in every if case.trick == "spelled digits")


def test_T15_disguise_is_what_is_caught_not_the_frame_around_it() -> None:
    """The same sentences with something harmless in the place of what was planted."""
    harmless = "the patient has a cough"
    for case in cases():
        if case.screen == "charset" or not any(case.planted in answer for answer in case.answers):
            continue
        framed = [answer.replace(case.planted, harmless) for answer in case.answers]
        assert screen_texts(EVERYTHING, [case.screen], material(), framed) == []


def benign(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:  # splitlines would break a row at a line separator inside it
            for row in map(json.loads, lines):
                yield row.get("prompt") or row.get("solution") or ""


def stopped(texts: list[str]) -> Counter[str]:
    """Number of texts with a hit, by screen; corpus and canaries are those of the evasion cases."""
    found: Counter[str] = Counter()
    names: tuple[ScreenName, ...] = ("pii_basic", "overlap", "canary", "charset")
    for name in names:
        found[name] = len({hit.text for hit in screen_texts(EVERYTHING, [name], material(), texts)})
    return found


def test_T15_precision_on_the_sample_questions() -> None:
    """172 questions of mathematics and medicine, and no screen stops one."""
    texts = list(benign(SAMPLES))
    assert len(texts) == 172
    assert stopped(texts) == {"pii_basic": 0, "overlap": 0, "canary": 0, "charset": 0}


def test_T15_precision_of_overlap_where_corpus_and_answers_are_of_one_kind() -> None:
    """Half of the medical samples as private corpus: what the other half shares with it is the examiner's phrases."""
    questions = [json.loads(line)["prompt"] for line in (SAMPLES / "medqa.jsonl").read_text().splitlines()]
    private, public = questions[::2], questions[1::2]

    def shared(background: list[str]) -> int:
        data = build_index(private, key=KEY, n=8, false_positive_rate=1e-9, background=background)
        index = Material(OverlapIndex.from_bytes(data, key=KEY))
        return len({hit.text for hit in screen_texts(EVERYTHING, ["overlap"], index, public)})

    phrases = shared([])
    assert phrases == 7  # of 24
    assert shared(public) == 0  # the public set as background: what it shares with the corpus is public
    data = build_index(private, key=KEY, n=8, false_positive_rate=1e-9, background=public)
    index = Material(OverlapIndex.from_bytes(data, key=KEY))
    assert len({hit.text for hit in screen_texts(EVERYTHING, ["overlap"], index, private)}) == len(private)


@pytest.mark.skipif(not WHOLE_SETS, reason="FEDSILO_DATA names no folder of whole data sets")
def test_T15_precision_on_whole_data_sets() -> None:
    """Some 44,000 questions when all sets are there; at most two in a thousand are stopped as personal data."""
    texts = list(benign(Path(WHOLE_SETS)))
    found = stopped(texts)
    print(len(texts), dict(found))
    assert found["pii_basic"] <= 0.002 * len(texts) and found["overlap"] == found["canary"] == 0
    assert found["charset"] <= 0.01 * len(texts)
