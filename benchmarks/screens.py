"""What the text screens cost and catch: `python -m benchmarks.screens --json [--records N]`.

    build_seconds, index_bytes     index of the private corpus: 100,000 synthetic records of 100 words
    open_seconds                   the guard reads it and checks its digest and order
    false_positive_rate            n-grams without a word of the corpus that match all the same, of `probes`; beside it
                                   what was asked for, what the width of a fingerprint gives, and all three once more
                                   for a rate that is large enough to be measured
    met_by_chance                  n-grams of other texts of the same words that match: eight frequent words that stand
                                   together in some record too, in whatever order; no fault of the filter
    screen_seconds                 256 answers of 2,000 characters through all four screens; best of `repeats`, with
                                   the time of one processor core beside it (`screen_core_seconds`) and that of each
                                   screen alone; target 0.5
    recall                         of tests/vectors/evasion.jsonl, by screen

Records are drawn from 20,000 made-up words by Zipf's law. Answers are rows of examples/data in random order, so that
numbers, Greek letters and line breaks are in them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from policies.model import ScreenName
from policies.screens import Material, screen_texts
from policies.screens.overlap import OverlapIndex, build_index
from tests.policies.evasion import EVERYTHING, cases, missed

KEY = bytes(range(32))
GRAM_WORDS = 8
RATE = 1e-9
COARSE_RATE = 1e-3
RECORDS, WORDS, VOCABULARY = 100_000, 100, 20_000
ANSWERS, CHARACTERS = 256, 2_000
CANARIES = 200
SCREEN_SECONDS_MAX = 0.5
DATA = Path(__file__).resolve().parents[1] / "examples" / "data"
NAMES: tuple[ScreenName, ...] = ("pii_basic", "overlap", "canary", "charset")


def records(count: int, seed: int) -> list[str]:
    """Synthetic texts; another seed gives other texts of the same words."""
    letters = random.Random(1)  # noqa: S311 - a fixed corpus
    vocabulary = [
        "".join(letters.choices("etaoinshrdlucmfwypvbgk", k=letters.randint(3, 9))) for _ in range(VOCABULARY)
    ]
    weights = 1 / np.arange(1, VOCABULARY + 1)
    drawn = np.random.default_rng(seed).choice(VOCABULARY, size=(count, WORDS), p=weights / weights.sum())
    return [" ".join(map(vocabulary.__getitem__, row)) for row in drawn.tolist()]


def answers() -> list[str]:
    rows = [json.loads(line)["prompt"] for path in sorted(DATA.glob("*.jsonl")) for line in path.open()]
    drawn = random.Random(2)  # noqa: S311 - fixed texts
    texts = []
    for _ in range(ANSWERS):
        text = ""
        while len(text) < CHARACTERS:
            text += drawn.choice(rows) + "\n"
        texts.append(text[:CHARACTERS])
    return texts


def canaries() -> tuple[str, ...]:
    drawn = random.Random(3)  # noqa: S311 - fixed ones
    return tuple("".join(drawn.choices("abcdefghjkmnpqrstuvwxyz0123456789", k=24)) for _ in range(CANARIES))


def screening(index: OverlapIndex, names: Sequence[ScreenName] = NAMES, repeats: int = 5) -> tuple[float, float]:
    """Wall time and time of one core of one message's screening; the best of several."""
    material, texts = Material(index, canaries()), answers()
    wall, core = [], []
    for _ in range(repeats):
        began, used = time.perf_counter(), time.process_time()
        screen_texts(EVERYTHING, names, material, texts)
        wall.append(time.perf_counter() - began)
        core.append(time.process_time() - used)
    return min(wall), min(core)


def _built(texts: Sequence[str], rate: float) -> bytes:
    return build_index(texts, key=KEY, n=GRAM_WORDS, false_positive_rate=rate)


def measured_rates(index: OverlapIndex, count: int) -> tuple[float, float, int]:
    """Of n-grams of other texts: the share that matches although none of their words is in the corpus, the share that
    matches when words are the corpus's own, so that eight frequent ones may meet by chance, and how many were asked."""
    strange = common = asked = 0
    for first in range(0, count, 1000):
        texts = [text.split() for text in records(min(1000, count - first), seed=10_000 + first)]
        for number, view in enumerate((_no_word_of_the_corpus, _as_it_is)):
            matched = int(index.matching(texts, [view])[0].within.sum())
            strange, common = (strange + matched, common) if number == 0 else (strange, common + matched)
        asked += sum(len(text) - GRAM_WORDS + 1 for text in texts)
    return strange / asked, common / asked, asked


def _as_it_is(word: str) -> str:
    return word


def _no_word_of_the_corpus(word: str) -> str:
    return f"x{word}x"


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = work()
    return result, round(time.perf_counter() - began, 3)


def report(count: int) -> dict[str, Any]:
    corpus = records(count, seed=1)
    data, build_seconds = _timed(lambda: _built(corpus, RATE))
    index, open_seconds = _timed(lambda: OverlapIndex.from_bytes(data, key=KEY))
    coarse = OverlapIndex.from_bytes(_built(corpus[: max(1, count // 10)], COARSE_RATE), key=KEY)
    strange, common, probes = measured_rates(index, 10_000)
    coarse_strange, _, _ = measured_rates(coarse, 10_000)
    wall, core = screening(index)
    every = cases()
    lost = missed(every)
    return {
        "build_seconds": build_seconds,
        "index_bytes": len(data),
        "bytes_per_record": round(len(data) / count, 1),
        "ngrams": index.grams,
        "open_seconds": open_seconds,
        "false_positive_rate": {"asked": RATE, "by_width": index.chance, "measured": strange, "probes": probes},
        "false_positive_rate_coarse": {"asked": COARSE_RATE, "by_width": coarse.chance, "measured": coarse_strange},
        "met_by_chance": common,
        "screen_seconds": round(wall, 3),
        "screen_core_seconds": round(core, 3),
        "screen_core_seconds_each": {name: round(screening(index, (name,), 2)[1], 3) for name in NAMES},
        "within_target": wall < SCREEN_SECONDS_MAX,
        "recall": {
            name: {
                "cases": sum(case.screen == name for case in every),
                "missed": sorted({case.trick for case in lost if case.screen == name}),
            }
            for name in NAMES
        },
        "recall_all": round(1 - len(lost) / len(every), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--records", type=int, default=RECORDS)
    options = parser.parse_args()
    figures = report(options.records)
    conditions = {
        "records": options.records,
        "words_per_record": WORDS,
        "n": GRAM_WORDS,
        "answers": ANSWERS,
        "characters": CHARACTERS,
        "canaries": CANARIES,
        "settings": EVERYTHING.model_dump(mode="json"),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    sys.stdout.write(json.dumps({"name": "screens", "figures": figures, "conditions": conditions}) + "\n")
    return 0 if figures["within_target"] else 1


if __name__ == "__main__":
    sys.exit(main())
