"""Screen for the site's planted strings, exact or nearly so (threats T15, T16). Pure.

Canaries and texts are compared as letters and digits only, in the one reading of `normalise.squash`, so capitals,
spaces, signs, look-alikes and digits for letters make no difference. A canary within k edits of a passage has one of
its k + 1 pieces in it unchanged: one automaton finds the pieces, and a bit-parallel edit distance decides around each.
Reversed and rot13 canaries are pieces of the same automaton. Texts of one message are read one after another without
a gap, so a canary that is split over neighbouring answers is found, and named so.

What this does not stop (N3): a canary in more edits than allowed, for example with a filler after every fifth letter;
split over answers with other words between the halves; paraphrased, which a canary of random letters cannot be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import ahocorasick

from fedsilo.protocol.errors import UsageError
from policies.model import Decoder
from policies.screens.normalise import Reading, fold, rotated, spelled, squash

LETTERS_OF_A_PIECE_MIN = 4  # a shorter piece occurs in every text
_DIGITS_MIN = 2  # written as words one after another: a single one is a word like any other


@dataclass(frozen=True)
class _Form:
    """A canary in one of its spellings, with the bit masks of its letters for the edit distance."""

    canary: int
    decoder: str
    letters: str
    masks: dict[str, int]


class _Scanner:
    def __init__(self, forms: list[_Form], pieces: dict[str, list[tuple[int, int]]], edits: int) -> None:
        self._forms, self._edits = forms, edits
        self._automaton = ahocorasick.Automaton()
        for piece, places in pieces.items():
            self._automaton.add_word(piece, places)
        self._automaton.make_automaton()

    def passages(self, text: str) -> Iterator[tuple[_Form, int, int]]:
        """Every form with the place, from and to, of each passage that is at most `edits` away from it."""
        stretches: dict[int, list[tuple[int, int]]] = {}
        for last, places in self._automaton.iter(text):
            for number, behind in places:
                begin = max(0, last + 1 - behind - self._edits)
                end = begin + len(self._forms[number].letters) + 2 * self._edits
                before = stretches.setdefault(number, [])
                # a piece that recurs is looked at once, so that a text made of pieces takes no longer than any other
                if before and begin <= before[-1][1]:
                    before[-1] = (min(begin, before[-1][0]), max(end, before[-1][1]))
                else:
                    before.append((begin, end))
        for number, several in stretches.items():
            form = self._forms[number]
            for begin, end in several:
                for stop in _ends_within(form, text[begin:end], self._edits):
                    yield form, max(0, begin + stop - len(form.letters)), begin + stop


def _ends_within(form: _Form, text: str, edits: int) -> Iterator[int]:
    """Yield where in `text` a passage within `edits` of the form ends. Myers (1999), section 4."""
    length = len(form.letters)
    top, full = 1 << (length - 1), (1 << length) - 1
    plus, minus, distance = full, 0, length
    for place, letter in enumerate(text):
        equal = form.masks.get(letter, 0)
        diagonal = (((equal & plus) + plus) ^ plus) | equal | minus
        up, down = (minus | ~(diagonal | plus)) & full, plus & diagonal
        distance += bool(up & top) - bool(down & top)
        # a passage may begin anywhere, so no bit enters from below
        up, down = (up << 1) & full, (down << 1) & full
        plus, minus = (down | ~(diagonal | up)) & full, up & diagonal
        if distance <= edits:
            yield place + 1


@lru_cache(maxsize=4)
def scanner(canaries: tuple[str, ...], edits: int, decoders: tuple[Decoder, ...]) -> _Scanner:
    """Return a scanner for canaries. Raises UsageError for a canary that is too short to be told from other text with
    so many edits."""
    shortest = LETTERS_OF_A_PIECE_MIN * (edits + 1)
    forms: list[_Form] = []
    pieces: dict[str, list[tuple[int, int]]] = {}
    for number, canary in enumerate(canaries):
        spellings = list(_spellings(canary, decoders))
        length = len(spellings[0][1])
        if length < shortest:
            raise UsageError(
                f"canary {number + 1} has {length} letters and digits; {edits} edits need {shortest}",
                hint="make it longer, or lower max_edit_distance",
                code="SCREEN_CANARY",
            )
        for decoder, letters in spellings:
            masks: dict[str, int] = {}
            for place, letter in enumerate(letters):
                masks[letter] = masks.get(letter, 0) | 1 << place
            cuts = [len(letters) * part // (edits + 1) for part in range(edits + 2)]
            for begin, end in pairwise(cuts):
                pieces.setdefault(letters[begin:end], []).append((len(forms), end))
            forms.append(_Form(number, decoder, letters, masks))
    return _Scanner(forms, pieces, edits)


def _spellings(canary: str, decoders: tuple[Decoder, ...]) -> Iterator[tuple[str, str]]:
    """(decoder, letters) of every way to write a canary that changes no length, as it is first."""
    yield "", squash(spelled(fold(canary), _DIGITS_MIN))
    turned = [canary[::-1]]
    if len(parts := canary.split()) > 1:
        turned += [" ".join(parts[::-1]), " ".join(part[::-1] for part in parts)]
    if "reversed" in decoders:
        yield from (("reversed", squash(fold(text))) for text in turned)
    if "rot13" in decoders:
        yield from (("rot13", squash(fold(rotated(text)))) for text in (canary, *turned))


def count_canaries(
    canaries: tuple[str, ...], edits: int, decoders: tuple[Decoder, ...], texts: Sequence[Sequence[Reading]]
) -> list[dict[str, int]]:
    """Count, for each text given as its readings, how many canaries it holds, by code: "canary", "canary/base64",
    ..."""
    look = scanner(canaries, edits, tuple(sorted(set(decoders))))
    numbers_found: list[dict[str, set[int]]] = [{} for _ in texts]
    parts: list[tuple[int, str, str]] = []  # text, decoder, letters
    for number, text in enumerate(texts):
        for reading in text:
            if reading.decoder in ("", *decoders):
                parts.append((number, reading.decoder, squash(reading.text)))
                if (as_digits := spelled(reading.text, _DIGITS_MIN)) != reading.text:
                    parts.append((number, reading.decoder or "spelled", squash(as_digits)))
    # Texts as written follow one another without a gap, so that a split canary is whole; other readings do not.
    for gap, chosen in (("", [part for part in parts if not part[1]]), (" ", [part for part in parts if part[1]])):
        begins = list(accumulate((len(part[2]) + len(gap) for part in chosen), initial=0))
        for form, begin, end in look.passages(gap.join(part[2] for part in chosen)):
            first, last = (bisect_right(begins, place) - 1 for place in (begin, max(begin, end - 1)))
            # at either end of a passage as many letters as there may be edits can be those of a neighbour
            holding = [
                part for part in range(first, last + 1) if min(end, begins[part + 1]) - max(begin, begins[part]) > edits
            ]
            for number, decoder, _ in (chosen[part] for part in holding):
                name = decoder or form.decoder or ("split" if len(holding) > 1 else "")
                numbers_found[number].setdefault(f"canary/{name}" if name else "canary", set()).add(form.canary)
    return [{code: len(numbers) for code, numbers in text.items()} for text in numbers_found]
