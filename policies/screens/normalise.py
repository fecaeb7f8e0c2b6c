"""Text as the screens read it: one spelling for many, and what an encoded passage says (threats T15, T16). Pure.

`fold` gives the one spelling: HTML entities, percent and backslash escapes are resolved, then NFKD, characters that do
not show (format, control, combining marks) are removed, look-alikes become the Latin letter they look like, digits of
every script become ASCII, and case is folded. `readings` adds what can be decoded from the text. `words` and `squash`
are the two forms in which corpus and canaries are compared, after spaced and hyphenated letters are joined and digits
inside words are read as letters.

What this does not stop (N3): a paraphrase, a translation, a cipher other than rot13, two encodings of
which one is not known here, base32, Morse, text as an acrostic; a look-alike that is missing from the table below.
"""

from __future__ import annotations

import binascii
import html
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

# A passage encoded more often than this keeps its innermost layers.
_NESTING_MAX = 3
_ENCODED_CHARACTERS_MIN = 16  # 12 bytes of base64, 8 of hex: a shorter secret is no passage
_PLAIN_CHARACTERS_MIN = 8
_REPLACED_ONE_BY_ONE_MAX = 40
_PRINTABLE_MIN = 0.9  # of the decoded characters; random bytes decode to about 0.37

# Letters of other scripts that look like a Latin one, as code points of their small form, from Unicode's
# confusables.txt (UTS 39, version 15.1) and eight Cyrillic ones that people use though the standard does not list them.
_LOOK_ALIKES = {
    "a": "251 3b1 430 13aa 15c5 a4ee 102a0 16f40",
    "b": "185 3b2 432 44c 13cf 13f4 1472 15af 15f7 a4d0 a7b5 10282 102a1 10301",
    "c": "441 13df 1d04 2ca5 a4da 102a2 10302 1043d 1051c",
    "d": "501 13a0 13e7 146f 15de 15ea a4d2 a4d3",
    "e": "3b5 435 44d 454 4bd 13ac 2d39 a4f0 ab32 10286 118c6 118ce",
    "f": "3dd 584 15b4 1e9d a4dd a799 ab35 10287 102a5 10525 118c2",
    "g": "18d 261 50d 581 13c0 13f3 1d83 a4d6",
    "h": "397 43d 4bb 570 13bb 13c2 157c 2c8f a4e7 102cf",
    "i": "131 269 26a 3b9 456 13a5 a647 118c3",
    "j": "29d 3f3 458 13ab 148d a4d9",
    "k": "3ba 43a 13e6 16d5 2c95 a4d7 10518",
    "l": "1c0 4cf 13de 14aa 16c1 2c93 2cd1 2d4f a4e1 a4f2 1028a 10309 10443 10526 118d2 16f16 16f28",
    "m": "3bc 3fb 43c 13b7 15f0 16d6 2c99 a4df 102b0 10311",
    "n": "39d 3b7 438 43f 578 57c 2c9b a4e0 10513",
    "o": "3bf 3c3 43e 585 b20 d20 101d 10ff 12d0 1d0f 1d11 2c9f 2d54 a4f3 ab3d 10292 102ab 1042c 104ea 10516 118c8",
    "p": "3c1 440 13e2 146d 2ca3 a4d1 10295",
    "q": "51b 563 566 2d55",
    "r": "280 433 44f 13a1 13b1 13d2 1587 1d26 2c85 a4e3 ab47 ab48 104dc 16f35",
    "s": "1bd 455 57f 13d5 13da a4e2 a731 10296 10448 118c1 16f3a",
    "t": "3c4 442 13a2 2ca7 a4d4 10297 102b1 10315 118dc 16f0a",
    "u": "28b 3c5 446 57d 1200 144c 1d1c a4f4 a79f ab4e ab52 104f6 118d8 16f42",
    "v": "3bd 475 13d9 142f 1d20 2d38 a4e6 a6df 1051d 11706 118c0 16f08",
    "w": "26f 3c9 448 449 461 51d 561 13b3 13d4 1d21 a4ea 1170a 1170e 1170f",
    "x": "3c7 445 1541 157d 16b7 2cad 2d5d a4eb ab53 10290 102b4 10317 10527",
    "y": "263 28f 3a5 3b3 443 4af 10e7 13a9 13bd 1d8c 1eff 2ca9 a4ec ab5a 102b2 118c4 16f43",
    "z": "3b6 13c3 1d22 a4dc 118c9",
}
_LATIN = {chr(int(code, 16)): letter for letter, codes in _LOOK_ALIKES.items() for code in codes.split()}
_MARKS = {"Pd": "-", "Pi": "'", "Pf": "'", "Zs": " ", "Zl": "\n", "Zp": "\n"}
_UNSEEN = ("Cf", "Mn", "Me", "Cc", "Cn", "Co")


class _Shown(dict[int, "int | str | None"]):
    """Code point -> what it is read as; None removes it. Filled as characters turn up, so at most Unicode long."""

    def __missing__(self, code: int) -> int | str | None:
        character = chr(code)
        read: int | str | None = code
        if unicodedata.category(character) in _UNSEEN and character not in "\t\n\r":
            read = None
        elif (digit := unicodedata.decimal(character, None)) is not None:
            read = str(digit)
        elif code > 127:
            # Capitals that look like another letter than their small form stand in the table themselves.
            read = (
                _LATIN.get(character)
                or _LATIN.get(character.casefold())
                or _MARKS.get(unicodedata.category(character), code)
            )
        self[code] = read
        return read


class _Letters(dict[int, "int | str | None"]):
    """Letters and digits as they are, or as `read` says; anything else as `other`."""

    def __init__(self, read: dict[str, str], other: str | None) -> None:
        self._read, self._other = read, other

    def __missing__(self, code: int) -> int | str | None:
        character = chr(code)
        self[code] = self._read.get(character, character if character.isalnum() else self._other)
        return self[code]


# One reading for what looks alike in both directions, so i and l are one letter, and 6 and 9 are.
_LEET = {
    "0": "o",
    "1": "i",
    "2": "z",
    "3": "e",
    "4": "a",
    "5": "s",
    "6": "g",
    "7": "t",
    "8": "b",
    "9": "g",
    "l": "i",
    "|": "i",
    "@": "a",
    "$": "s",
}
_LEET_WORD = str.maketrans(_LEET)
_STANDS_FOR_A_LETTER = "@$|"
_INSIDE_WORDS = "-'."  # left out, so that a hyphenated word is one word
_ALONE = " .*_-"  # what may stand between the letters of one spaced word

_SHOWN, _SQUASHED = _Shown(), _Letters(_LEET, None)
_SPACED_OUT = _Letters(
    {character: character for character in _STANDS_FOR_A_LETTER} | dict.fromkeys(_INSIDE_WORDS, ""), " "
)


def _ascii_table(letters: _Letters) -> tuple[bytes, bytes]:
    """Return the same for bytes.translate, which is thirty times as fast: (what each byte becomes, which bytes go)."""
    read = [letters[code] for code in range(128)]
    kept = bytes(ord(one) if isinstance(one, str) and one else 0 for one in read)
    return kept + bytes(128), bytes(code for code, one in enumerate(read) if not one)


_DIGIT_WORDS = {
    "zero": "0",
    "oh": "0",
    "nought": "0",
    "one": "1",
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
}
_TIMES = {"double": 2, "triple": 3}
NUMBER_DIGITS_MIN = 7  # the shortest number that a pattern looks for
_DIGIT_WORD = re.compile("|".join([*_DIGIT_WORDS, *_TIMES]))
_SPELLED = re.compile(rf"\b(?:(?:{_DIGIT_WORD.pattern})\b[ ,.\n-]{{0,3}}){{2,}}")

_SQUASHED_ASCII, _SPACED_OUT_ASCII = _ascii_table(_SQUASHED), _ascii_table(_SPACED_OUT)
_HIDDEN_ASCII = bytes(code for code in (*range(32), 127) if chr(code) not in "\t\n\r")


def classes(**members: str) -> bytes:
    """Return each byte as the letter of its class, "!" for the others: a run of a class is then a plain substring."""
    table = bytearray(b"!" * 256)
    for name, characters in members.items():
        for character in characters:
            table[ord(character)] = ord(name) if name != "_" else ord(" ")
    return bytes(table)


_ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_IN_BASE64 = classes(b=_ALNUM + "+/_-")
_IN_HEX = classes(h="0123456789abcdefABCDEF", _=" :,-")
_IN_SPACED = classes(a=_ALNUM, _=_ALONE)
_ROT13 = str.maketrans(_ALNUM[:52], _ALNUM[13:26] + _ALNUM[:13] + _ALNUM[39:52] + _ALNUM[26:39])
_PERCENT = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
_BACKSLASH = re.compile(r"\\u\{?([0-9A-Fa-f]{4})\}?|\\x([0-9A-Fa-f]{2})")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,}")
_HEX = re.compile(r"(?:[0-9A-Fa-f]{2}[ :,-]?){7,}[0-9A-Fa-f]{2}")
_SPACED = re.compile(rf"(?<![^\W_])[^\W_]([{_ALONE}])(?:[^\W_]\1)*[^\W_](?![^\W_])")
_BETWEEN = str.maketrans("", "", _ALONE)


@dataclass(frozen=True)
class Reading:
    """A reading of a text: as written (decoder "") or as something in it decodes; folded."""

    decoder: str
    text: str


def fold(text: str) -> str:
    """Return the one spelling of a text."""
    return _shown(text).casefold()


def _shown(text: str) -> str:
    """Return what a reader sees, in Latin letters where it looks like them, but with capitals: base64 needs them."""
    if "&" in text:
        text = html.unescape(text)
    if "%" in text:
        text = _PERCENT.sub(_percent, text)
    if "\\" in text:
        text = _BACKSLASH.sub(lambda found: chr(int(found[1] or found[2], 16)), text)
    if text.isascii():
        return text.encode("ascii").translate(None, _HIDDEN_ASCII).decode("ascii")
    return _read_by(_SHOWN, unicodedata.normalize("NFKD", text))


def _read_by(table: dict[int, int | str | None], text: str) -> str:
    """Return what is no printable ASCII as the table reads it. Few different characters: a replacement for each is
    faster."""
    others = [character for character in set(text) if not " " <= character <= "~"]
    if len(others) > _REPLACED_ONE_BY_ONE_MAX:
        return text.translate(table)
    for character in others:
        text = text.replace(character, character.translate(table))
    return text


def _percent(match: re.Match[str]) -> str:
    # urllib opens sockets too, so it may not be imported here
    return binascii.unhexlify(match[0].replace("%", "")).decode("utf-8", "replace")


def readings(text: str) -> list[Reading]:
    """The text as written and, for each of base64 and hex that yields something, all it yields on lines of its own.

    A reading decoded from another one bears the name of the outer decoder. Reversal and rot13 change no length and
    are read by the screens themselves, on every reading.
    """
    shown = _shown(text)
    result = [Reading("", shown.casefold())]
    for decoder in ("base64", "hex"):
        if parts := list(_decoded(shown, decoder, _NESTING_MAX)):
            result.append(Reading(decoder, fold("\n".join(parts))))
    return result


def _decoded(text: str, decoder: str, layers: int) -> Iterator[str]:
    for part in _from_base64(text) if decoder == "base64" else _from_hex(text):
        yield part
        if layers > 1:
            for inner in ("base64", "hex"):
                yield from _decoded(part, inner, layers - 1)


def holds(text: str, classes: bytes, *runs: bytes) -> bool:
    """Return whether the classes of the text's characters contain one of the runs."""
    classified = text.encode("ascii", "replace").translate(classes)
    return any(run in classified for run in runs)


def _from_base64(text: str) -> Iterator[str]:
    """Every run of the alphabet, in each alignment, forwards and backwards; the lines of a wrapped one are joined."""
    if not holds(text, _IN_BASE64, b"b" * _ENCODED_CHARACTERS_MIN):
        return
    lines = [line.strip() for line in text.split("\n")]
    # mail programs break at 64 or 76 characters
    if len(wrapped := [line for line in lines if len(line) >= _ENCODED_CHARACTERS_MIN and " " not in line]) > 1:
        text = f"{text}\n{''.join(wrapped)}{lines[-1] if ' ' not in lines[-1] else ''}"
    for run in _BASE64.findall(text):
        for written in (run, run[::-1]):
            usual = written.replace("-", "+").replace("_", "/")
            for offset in range(4):
                part = usual[offset:]
                part = part[: len(part) - 1] if len(part) % 4 == 1 else part
                plain = _plain(binascii.a2b_base64(part + "=" * (-len(part) % 4)))
                if plain is not None:
                    yield plain


def _from_hex(text: str) -> Iterator[str]:
    """Every run of pairs, with or without one separator or 0x, forwards and backwards."""
    text = text.replace("0x", "")
    if not holds(text, _IN_HEX, b"h" * _ENCODED_CHARACTERS_MIN, b"hh hh hh hh hh hh"):
        return
    for run in _HEX.findall(text):
        digits = "".join(character for character in run if character.isalnum())
        for written in (digits, digits[::-1]):
            for offset in (0, 1):
                part = written[offset:]
                plain = _plain(binascii.unhexlify(part[: len(part) // 2 * 2]))
                if plain is not None:
                    yield plain


def _plain(data: bytes) -> str | None:
    """Bytes as text, or None where they are none."""
    text = data.decode("utf-8", "replace")
    shown = sum((letter.isprintable() and letter != "\ufffd") or letter in "\t\n\r" for letter in text)
    return text if len(text) >= _PLAIN_CHARACTERS_MIN and shown >= _PRINTABLE_MIN * len(text) else None


def rotated(text: str) -> str:
    """Return the text in rot13, which is its own inverse."""
    return text.translate(_ROT13)


def spelled(folded: str, digits_min: int = NUMBER_DIGITS_MIN) -> str:
    """The text with digits that are written as words as digits, where at least so many of them follow one another."""
    if sum(folded.count(word) for word in _DIGIT_WORDS) < digits_min:
        return folded

    def figures(match: re.Match[str]) -> str:
        made, times = "", 1
        for word in _DIGIT_WORD.findall(match[0]):
            if word in _TIMES:
                times = _TIMES[word]
            else:
                made, times = made + times * _DIGIT_WORDS[word], 1
        return f"{made} " if len(made) >= digits_min else match[0]

    return _SPELLED.sub(figures, folded)


def words(folded: str) -> list[str]:
    """The words of a folded text in order, each still to be made `canonical`, once for every different word.

    Letters that stand alone with one separator between them are one word; punctuation inside a word is left out.
    """
    if holds(folded, _IN_SPACED, b"a a a a"):
        folded = _SPACED.sub(lambda found: found[0].translate(_BETWEEN), folded)
    text = folded if folded.isascii() else _read_by(_SPACED_OUT, folded)
    if text.isascii():
        return text.encode("ascii").translate(*_SPACED_OUT_ASCII).decode("ascii").split()
    return text.translate(_SPACED_OUT).split()


def canonical(word: str) -> str:
    """A word as compared: in the one reading of _LEET; "" for signs alone."""
    if word.isalnum():
        return word.translate(_LEET_WORD)
    word = word.strip("|")  # the rule of a table, not an i
    return word.translate(_LEET_WORD) if word.strip(_STANDS_FOR_A_LETTER) else ""


def squash(folded: str) -> str:
    """Letters and digits only, in the one reading of _LEET: what a canary is looked for in."""
    text = folded if folded.isascii() else _read_by(_SQUASHED, folded)
    if text.isascii():
        return text.encode("ascii").translate(*_SQUASHED_ASCII).decode("ascii")
    return text.translate(_SQUASHED)
