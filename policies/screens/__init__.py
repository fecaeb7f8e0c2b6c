"""Text screens: tripwires for private text in what a party sends or lets in (threats T14 to T17, T21). Pure.

    patterns.py   pii_basic   what looks like personal data, and a site's own patterns
    overlap.py    overlap     passages of the private corpus, against a keyed index
    canary.py     canary      planted strings, within some edits
    charset.py    charset     the alphabet, and runs of signs
    normalise.py  how all of them but charset read a text: one spelling for many, decoded where it decodes

`screen_texts` runs every screen it is asked for over every text, whatever another one found, so that what it takes
says little about the private corpus (T18). A hit names a text by its position and what was found by a code of a
closed list; it never holds what matched.

What screens do not stop (N3): meaning. Whoever rewrites a passage passes all of them; tests/vectors/evasion.jsonl
lists what is known to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedsilo.protocol.errors import OperationError, UsageError
from policies.model import ScreenName, TextScreens
from policies.screens.canary import count_canaries
from policies.screens.charset import count_characters
from policies.screens.normalise import Reading, readings, rotated, words
from policies.screens.overlap import OverlapIndex
from policies.screens.patterns import count_patterns

__all__ = ["Hit", "Material", "OverlapIndex", "ScreenFailed", "never", "screen_texts"]


class ScreenFailed(OperationError):
    """A screen could not run, so nothing is known of any text; whoever asked must let none of them pass."""

    default_code = "SCREEN_FAILED"


@dataclass(frozen=True)
class Hit:
    """What a screen found in one text.

    Attributes:
        text: position in the texts that were screened.
        screen: its name in the policy.
        code: what was found and how it was read, such as "email", "ngram/reversed" or "canary/base64".
        count: how often: patterns, n-grams, canaries, characters.
    """

    text: int
    screen: ScreenName
    code: str
    count: int


@dataclass(frozen=True)
class Material:
    """What a party read from its own files: the index of its private corpus, and its planted strings."""

    overlap: OverlapIndex | None = None
    canaries: tuple[str, ...] = ()


def never() -> bool:
    return False


def screen_texts(
    definitions: TextScreens,
    names: Sequence[ScreenName],
    material: Material,
    texts: Sequence[str],
    time_is_over: Callable[[], bool] = never,
) -> list[Hit]:
    """Hits of every named screen in every text, by screen in the order of the names and by text.

    Args:
        definitions: the policy's.
        names: of the screens.
        material: this party's own files, as far as it has them.
        texts: of one message.
        time_is_over: asked before each text is read, each screen runs and each own pattern is looked for (B5: too slow
            is a failure).

    Raises:
        ScreenFailed: a screen is not defined, or lacks its material, or its material does not fit its definition, or
            the time was over before the last one had run.
    """
    read: list[list[Reading]] = []
    for text in texts if set(names) - {"charset"} else ():
        _in_time(time_is_over)
        read.append(readings(text))
    hits: list[Hit] = []

    def in_time() -> None:
        _in_time(time_is_over)

    for name in names:
        _in_time(time_is_over)
        for number, found in enumerate(_counts(definitions, name, material, texts, read, in_time)):
            hits += [Hit(number, name, code, count) for code, count in sorted(found.items())]
    return hits


def _in_time(time_is_over: Callable[[], bool]) -> None:
    if time_is_over():
        raise ScreenFailed("the screens took longer than they may")


def _counts(
    definitions: TextScreens,
    name: ScreenName,
    material: Material,
    texts: Sequence[str],
    read: list[list[Reading]],
    in_time: Callable[[], None],
) -> list[dict[str, int]]:
    """Codes and counts of one screen for each text."""
    match name:
        case "pii_basic" if (block := definitions.pii_basic) is not None:
            own = block.custom_file.patterns if block.custom_file is not None else ()
            return [count_patterns(block.patterns, reading, own, in_time) for reading in read]
        case "overlap" if (settings := definitions.overlap) is not None:
            index = material.overlap
            if index is None:
                raise ScreenFailed("screen overlap has no index of the private corpus")
            if index.n != settings.n:
                raise ScreenFailed(f"screen overlap wants n-grams of {settings.n} words and its index has {index.n}")
            return _overlaps(index, settings.max_matching_ngrams, read)
        case "canary" if (wanted := definitions.canary) is not None:
            if not material.canaries:
                raise ScreenFailed("screen canary has no canaries")
            try:
                return count_canaries(material.canaries, wanted.max_edit_distance, wanted.decode, read)
            except UsageError as error:
                raise ScreenFailed(f"screen canary cannot run: {error.message}", hint=error.hint) from error
        case "charset" if (allowed := definitions.charset) is not None:
            return [count_characters(allowed.allow, allowed.max_run_nonword, text) for text in texts]
    raise ScreenFailed(f"text_screens does not define the screen {name}")


def _overlaps(index: OverlapIndex, most: int, read: list[list[Reading]]) -> list[dict[str, int]]:
    """N-grams of each text that the index has, where they are more than `most`.

    All texts as written are compared as one sequence, so that a passage split over two answers is seen. Each reading
    is compared in four spellings of every word: as it is, reversed, by rot13, and by both. The order of words is no
    part of an n-gram, so reversed words are the whole of reversed text.
    """
    found: list[dict[str, int]] = [{} for _ in read]
    for decoder in sorted({reading.decoder for text in read for reading in text}):
        parts = [
            (number, words(reading.text))
            for number, text in enumerate(read)
            for reading in text
            if reading.decoder == decoder
        ]
        matches = index.matching([part for _, part in parts], [spelling for _, spelling in _SPELLINGS])
        for (way, _), counted in zip(_SPELLINGS, matches, strict=True):
            code = f"ngram/{decoder or way}" if decoder or way else "ngram"
            for (number, _), within, split in zip(parts, counted.within, counted.split, strict=True):
                over = 0 if decoder else int(split)  # decoded passages have no order among each other
                if within + over > most:
                    for name, count in ((code, int(within)), ("ngram/split", over)):
                        if count:
                            found[number][name] = found[number].get(name, 0) + count
    return found


def _as_it_is(word: str) -> str:
    return word


def _reversed(word: str) -> str:
    return word[::-1]


def _rotated_backwards(word: str) -> str:
    return rotated(word)[::-1]


_SPELLINGS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("", _as_it_is),
    ("reversed", _reversed),
    ("rot13", rotated),
    ("rot13", _rotated_backwards),
)
