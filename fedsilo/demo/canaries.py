"""Canaries: unique texts planted where a site keeps what must not leave, and the search for them in what did leave.

A canary is found in any of five forms: as it is, normalised (NFKC, letters and digits only, case folded), reversed,
as base64 at any of its three alignments, as hexadecimal digits (threat X1).
What the search does not find: a canary that was encrypted, compressed, paraphrased or spread over several values (N1).
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import ahocorasick
import numpy as np

from fedsilo.demo import digit_tasks
from fedsilo.protocol.randomness import generator, seed_of

COUNT = 200
Place = Literal["prompt", "id", "config", "environment", "exception"]
SHARE_MIN = 12  # of one silo: something in every place
CONFIG = 6  # each goes into a place of its own
FORMS = ("raw", "normalised", "reversed", "base64", "hex")
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")
_WHITE_SPACE = b" \t\r\n"
# Not a hexadecimal digit, so that no digest holds such a question by chance.
_LETTERS = "utsro"
_DIGITS = 6


@dataclass(frozen=True)
class Canary:
    """One planted text. `silo`: where; `place`: in what."""

    text: str
    silo: str
    place: Place


@dataclass(frozen=True)
class Finding:
    """A canary that was found, and in which form."""

    canary: Canary
    form: str


def make_canaries(seed: int, silos: Sequence[str], *, tokenizer: str, count: int = COUNT) -> tuple[Canary, ...]:
    """`count` distinct canaries, shared out evenly.

    Args:
        seed: they follow from it, so that a demo can be repeated.
        silos: names, at least one.
        tokenizer: `digits` or `bytes`; what the model can read, since the prompts among them are trained on.
        count: of all silos together.

    Raises:
        ValueError: too few for something in every place of every silo.
    """
    if count // len(silos) < SHARE_MIN:
        raise ValueError(f"{count} canaries are too few for {len(silos)} silos")
    draws = generator(seed_of(seed, "canaries"))
    made: dict[str, Canary] = {}
    for number, silo in enumerate(silos):
        share = count // len(silos) + (number < count % len(silos))
        some = min(6, share // 8)
        counts: dict[Place, int] = {"id": some, "config": CONFIG, "environment": some, "exception": min(4, some)}
        places: list[Place] = [place for place, many in counts.items() for _ in range(many)]
        places += ["prompt"] * (share - len(places))
        for place in places:
            text = _text(draws, place, tokenizer)
            while text in made:
                text = _text(draws, place, tokenizer)
            made[text] = Canary(text, silo, place)
    return tuple(made.values())


def control_text(seed: int) -> str:
    """The positive control, part of a name that is allowed to leave: a search that does not find it finds nothing."""
    return "control" + _hex(generator(seed_of(seed, "canary-control")))


def _text(draws: np.random.Generator, place: Place, tokenizer: str) -> str:
    if place == "prompt" and tokenizer == "digits":
        letter = _LETTERS[int(draws.integers(len(_LETTERS)))]
        return f"{letter}{draws.integers(10**_DIGITS):0{_DIGITS}d}="
    if place == "prompt":
        return f"Patient {_hex(draws)}: which dose of {_hex(draws)}?"
    return f"canary-{_hex(draws)}"


def _hex(draws: np.random.Generator) -> str:
    return draws.bytes(8).hex()


def rows_of(canaries: Iterable[Canary], *, topic: str, verifier: str) -> list[dict[str, str]]:
    """Private task rows that carry the prompt and id canaries; each is a question that can be trained on."""
    rows = []
    for number, canary in enumerate(canaries):
        if canary.place == "prompt":
            rows.append({"id": f"planted-{number}", "prompt": canary.text, "answer": _answer(canary.text, verifier)})
        elif canary.place == "id":
            ordinary = digit_tasks.question("reverse", f"{number:04d}")
            rows.append({"id": canary.text, "prompt": ordinary, "answer": _answer(ordinary, verifier)})
    return [{**row, "topic": topic} for row in rows]


def _answer(prompt: str, verifier: str) -> str:
    for topic, operation in digit_tasks.OPERATIONS.items():
        if verifier == "exact" and re.fullmatch(rf"{operation.letter}\d+=", prompt):
            return digit_tasks.answer(topic, prompt[1:-1])
    return "A" if verifier == "choice" else "4"


class Search:
    """Finds every form of every canary in one pass per view of the bytes (Aho and Corasick 1975).

    Args:
        canaries: at least one.
    """

    def __init__(self, canaries: Iterable[Canary]) -> None:
        self._views = {name: ahocorasick.Automaton() for name in ("raw", "normalised", "compact", "lower")}
        for canary in canaries:
            for view, form, needle in _needles(canary.text):
                # one text may be a form of two canaries; both are reported
                found: list[Finding] = self._views[view].get(needle, [])
                self._views[view].add_word(needle, [*found, Finding(canary, form)])
        for automaton in self._views.values():
            automaton.make_automaton()

    def find(self, data: bytes, *, text: bool = True) -> set[Finding]:
        """Every canary in `data`.

        Args:
            data: any bytes.
            text: False for bytes of numbers: what is left of millions of them when all but letters and digits are
                dropped spells a short question by chance, so they are not normalised.
        """
        compact = data.translate(None, _WHITE_SPACE)
        seen = {
            "raw": data.decode("latin-1"),
            "compact": compact.decode("latin-1"),
            "lower": compact.lower().decode("latin-1"),
        }
        if text:
            seen["normalised"] = normalised(data.decode("utf-8", "ignore"))
        return {
            finding
            for name, view in seen.items()
            for _, findings in self._views[name].iter(view)
            for finding in findings
        }


def normalised(text: str) -> str:
    """NFKC, case folded, nothing but letters and digits."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return _NOT_ALPHANUMERIC.sub("", folded)


def _needles(text: str) -> Iterable[tuple[str, str, str]]:
    """(view, form, what to look for there). The bytes of a view are compared as Latin-1 text."""
    data = text.encode()
    plain = normalised(text)
    yield "raw", "raw", data.decode("latin-1")
    yield "raw", "reversed", text[::-1].encode().decode("latin-1")
    yield "normalised", "normalised", plain
    yield "normalised", "reversed", plain[::-1]
    yield "lower", "hex", data.hex()
    for alignment in range(3):
        for encoded in (base64.b64encode(bytes(alignment) + data), base64.urlsafe_b64encode(bytes(alignment) + data)):
            # characters that hold bits of a neighbour differ with it: only those of the canary alone are looked for
            first = -(-alignment * 8 // 6)
            last = (alignment + len(data)) * 8 // 6
            yield "compact", "base64", encoded[first:last].decode("ascii")
