"""Screen for what looks like personal data: e-mail, phone, numbers with check digits, dates of birth, addresses (T15).
Pure.

Each pattern is a list of regular expressions over folded text. No repetition lies inside another one over the same
characters, every one is bounded or can start again only where it ended, and a cheap look for a word or sign decides
whether it is run at all: time is linear in the text. Check digits are python-stdnum's. A number plan (`phonenumbers`)
is not asked: its matcher needs 9 ms for a text of 2,000 characters, and takes a number that no one has for none.
A site's own patterns (policies/custom_patterns.py) are looked for in the same readings.

What this does not stop (N3): names of people; a number without its usual separators and without a word that says what
it is; a year of birth; a house that has only a name; postcodes alone; addresses and words in languages but English; a
number split over two answers. What it stops though nothing is wrong: numbers and dates that only look like these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from stdnum import iban
from stdnum.gb import nhs
from stdnum.us import ssn

from policies.custom_patterns import CustomPattern
from policies.model import PatternName
from policies.screens.normalise import Reading, classes, holds, rotated, spelled

_AT = re.compile(r"[a-z0-9_+-]@(?:[a-z0-9-]{1,63}\.){1,6}[a-z]{2,24}(?![a-z])")
# "jane (at) example (dot) org": brackets around `at`, or `dot` before one of the usual endings
_ENDINGS = "com|org|net|edu|gov|mil|int|info|io|uk|de|fr|it|es|nl|ch|at|se|no|dk|fi|pl|eu|us|ca|au|jp|cn|in|br"
_AT_IN_BRACKETS = re.compile(
    r"[\[({<]\s?at\s?[\])}>]\s?[a-z0-9-]{1,63}(?:\s?[\[({<]?\s?(?:dot|\.)\s?[\])}>]?\s?[a-z0-9-]{1,63}){1,4}"
)
_AT_AS_WORD = re.compile(
    rf" (?:at|@) [a-z0-9-]{{1,63}}(?:\s?(?:\bdot\b|\.)\s?[a-z0-9-]{{1,63}}){{0,3}}\s?(?:\bdot\b)\s?(?:{_ENDINGS})\b"
)

# a chain of digits with at most three signs between two of them
_CHAIN = re.compile(r"\+?\(?\d(?:[ \t.()/-]{0,3}\d){6,}")
_INTERNATIONAL = re.compile(r"(?:\+|(?<![\d.,])00)[ (]?[1-9]\d{0,2}(?:[ .()/-]{0,3}\d){6,12}(?!\d|[.,]\d)")
_TRUNK = re.compile(r"(?<![\d.,/-])\(?0[1-9]\d{1,3}\)?(?:[ ./-]?\d){5,8}(?!\d|[.,]\d)")
_AMERICAN = re.compile(r"(?<![\d.,])(?:1[ .-])?\(?[2-9]\d{2}(?:\) ?|[ .-])[2-9]\d{2}[ .-]\d{4}(?!\d)")
_NUMBERED = ((_INTERNATIONAL, range(9, 18)), (_TRUNK, range(10, 12)), (_AMERICAN, range(10, 12)))
_NHS = re.compile(r"(?<![\d.])(?:\d{3}[ -]\d{3}[ -]\d{4}|\d{10})(?!\d)")
_SSN = re.compile(r"(?<!\d)\d{3}([ .-])\d{2}\1\d{4}(?!\d)")
_BARE_SSN = re.compile(r"(?<!\d)\d{9}(?!\d)")
_ONE_BY_ONE = re.compile(r"\d(?:[ .-]\d){8,10}")
_SUM = re.compile(r"[*/=^(.]| - |[-+] ?$|^ ?[-=]")
_DECIMAL = re.compile(r"[+(]*\d+\.\d+")
_PHONE_WORD = re.compile(
    r"\b(?:tel|(?:tele)?phone|mobile|cell|fax|call(?: me)?)\b[^a-z0-9\n]{0,4}"
    r"(?:(?:on|at|is|no|number)\b[^a-z0-9\n]{0,3}){0,2}$"
)
_SSN_WORD = re.compile(r"\b(?:ssn|soc(?:ial)?\.? sec(?:urity)?)\b[^0-9\n]*$")
_LABEL_REACH = 24  # characters before a number in which a word may say what it is

_IBAN = re.compile(r"(?<![a-z0-9])(?=([a-z]{2}\d{2}(?:[ -]?[a-z0-9]){11,30}))")
_NUMBER = r"(?:no|nr|num|number|id|#)\.?"
_MRN_VALUE = (
    rf"[^a-z0-9\n]{{0,4}}(?:(?:is|was|{_NUMBER})[^a-z0-9\n]{{1,3}})?[a-z]{{0,4}}[ -]?\d(?:[ -]?\d){{4,11}}(?!\d)"
)
_MRN = (
    *(("mrn", ""), ("m.r.n", r"\.?")),
    *((word, rf"s? ?{_NUMBER}") for word in ("record", "med rec", "hospital", "patient", "chart", "case", "unit")),
)
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}\.?"
_DATE = (
    r"(?:\d{4}[./-]\d{1,2}[./-]\d{1,2}|\d{1,2}[ ]?[./-][ ]?\d{1,2}[ ]?[./-][ ]?\d{2,4}"
    rf"|\d{{1,2}}(?:st|nd|rd|th)?(?: of)?[ -]{_MONTH},?[ -]\d{{2,4}}|{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{2,4}}"
    r"|\d{8})(?!\d)"
)
_BORN_VALUE = rf"[^a-z0-9\n]{{0,4}}(?:(?:is|was|on|date)[^a-z0-9\n]{{1,3}}){{0,2}}(?:the )?{_DATE}"
_BORN = (
    *(("dob", r"\b"), ("d.o.b", r"\b\.?"), ("d o b", r"\b")),
    *(("of birth", ""), ("birth", r" ?date"), ("birthday", ""), ("born", "")),
)
_STREETS = (
    *("street", "road", "avenue", "lane", "crescent", "boulevard", "terrace", "gardens", "drive"),
    *("st", "rd", "ave", "blvd"),
)
# The number of a house and up to three words of a name, none of which says that it was a sentence.
_NO_NAME = (
    "a|an|the|of|on|in|at|to|by|and|or|per|for|from|along|down|up|with|is|are|was|were|if|then|its|his|her|their|this"
    r"|that|each|every|other|more|one|two|miles?|km|kilomet\w+|met\w+|feet|foot|yards?|blocks?|hours?|hr|minutes?|cars?"
    r"|people|houses?|trees?|percent|times|square|inch\w*|wheel|half|years?|days?|weeks?|months?|signs?|into|across|off"
    "|crossing|she|he|they|we|i|you|it|can|will|must|could|who|which|when|while|cm|mm|m|ft|x|y"
)
_NAME = rf"(?!(?:{_NO_NAME})\b)[a-z][a-z'.-]{{1,19}}"
_HOUSE = re.compile(rf"(?:^|[^a-z0-9.,$/])(?:flat \d{{1,4}},? )?\d{{1,5}}[a-z]?,? (?:{_NAME} ){{0,2}}{_NAME}$")
_HOUSE_REACH = 90
_STREET = {f" {word}": re.compile(rf" {word}\b") for word in _STREETS}
_IN_BRACKETED_AT = classes(**{"(": "([{<", ")": ")]}>", "a": "a", "t": "t", "_": " \t\n"})
_IN_CHAIN, _SIGNS_IN_CHAIN = classes(d="0123456789"), b" \t.()/-"
_IN_IBAN = classes(a="abcdefghijklmnopqrstuvwxyz", d="0123456789")


@dataclass(frozen=True)
class _View:
    """A text in one of the ways to read it, with what several patterns look at."""

    text: str
    digits_are_meant: bool = False  # they were spelled out one by one, which nobody does with a sum
    backwards: bool = False

    @cached_property
    def chains(self) -> list[re.Match[str]]:
        classified = self.text.encode("ascii", "replace").translate(_IN_CHAIN, _SIGNS_IN_CHAIN)
        return list(_CHAIN.finditer(self.text)) if b"d" * 7 in classified else []

    @cached_property
    def encoded(self) -> bytes:
        return self.text.encode("utf-8", "replace")

    def said_before(self, start: int, label: re.Pattern[str]) -> bool:
        return label.search(self.text[max(0, start - _LABEL_REACH) : start]) is not None


def _emails(view: _View) -> int:
    text, count = view.text, 0
    if "@" in text:
        count += sum(1 for _ in _AT.finditer(text))
    if holds(text, _IN_BRACKETED_AT, b"(at)", b"( at )") or " dot " in text:
        count += sum(1 for _ in _AT_IN_BRACKETS.finditer(text))
        if "dot" in text:
            count += sum(1 for _ in _AT_AS_WORD.finditer(text))
    return count


def _phones(view: _View) -> int:
    count = 0
    for chain in view.chains:
        if view.backwards and _SUM.search(view.text[max(0, chain.start() - 2) : chain.end() + 2]):
            continue  # sums read backwards look like telephone numbers more often than not
        # the signs before and after decide whether it is a decimal
        written = view.text[max(0, chain.start() - 1) : chain.end() + 1]
        numbers = sum(
            len(_digits(number[0])) in lengths and not _DECIMAL.fullmatch(number[0])
            for rule, lengths in _NUMBERED
            for number in rule.finditer(written)
        )
        if not numbers:
            digits = _digits(chain[0])
            alone = view.digits_are_meant or _ONE_BY_ONE.fullmatch(chain[0]) is not None
            labelled = 7 <= len(digits) <= 15 and view.said_before(chain.start(), _PHONE_WORD)
            numbers = int(labelled or (alone and _is_whole_phone(digits)))
        count += numbers
    return count


def _is_whole_phone(digits: str) -> bool:
    national = digits[1:] if digits[0] == "1" and len(digits) == 11 else digits
    trunk = digits[0] == "0" and digits[1] != "0" and digits[:3] != "012"  # a list that counts from nought
    return len(digits) in (10, 11) and (trunk or (len(national) == 10 and national[0] > "1" and national[3] > "1"))


def _nhs_numbers(view: _View) -> int:
    texts = [_digits(chain[0]) for chain in view.chains if view.digits_are_meant or _ONE_BY_ONE.fullmatch(chain[0])]
    texts += [match[0] for chain in view.chains for match in _NHS.finditer(chain[0])]
    return sum(1 for text in texts if nhs.is_valid(text))


def _ssns(view: _View) -> int:
    count = 0
    for chain in view.chains:
        count += sum(1 for number in _SSN.finditer(chain[0]) if ssn.is_valid(_dashed(number[0])))
        if view.digits_are_meant or view.said_before(chain.start(), _SSN_WORD):
            count += sum(1 for number in _BARE_SSN.finditer(_digits(chain[0])) if ssn.is_valid(_dashed(number[0])))
    return count


def _ibans(view: _View) -> int:
    count = 0
    if not holds(view.text, _IN_IBAN, b"aadd"):
        return 0
    for candidate in _IBAN.finditer(view.text):
        number = candidate[1].replace(" ", "").replace("-", "").upper()
        # how long an IBAN is depends on its country, and a word may follow it
        count += any(iban.is_valid(number[:end]) for end in _checked_ends(number))
    return count


def _checked_ends(number: str) -> Iterator[int]:
    """Lengths from 15 on at which ISO 7064 mod 97-10 holds, with the first four characters taken last."""
    country_and_check = int("".join(str(int(character, 36)) for character in number[:4]))
    remainder = 0
    for place, character in enumerate(number[4:], start=5):
        value = int(character, 36)
        remainder = (remainder * (10 if value < 10 else 100) + value) % 97
        if place >= 15 and (remainder * 1_000_000 + country_and_check) % 97 == 1:
            yield place


def _labelled(labels: Iterable[tuple[str, str]], value: str) -> Callable[[_View], int]:
    """A label, which begins a word, with what may follow it and then a value."""
    # A pattern that begins with letters is searched for as fast as a substring: what stands before comes after it.
    rules = [
        (word, re.compile(rf"{re.escape(word)}(?<![a-z0-9]{re.escape(word)}){rest}{value}")) for word, rest in labels
    ]

    def count(view: _View) -> int:
        return sum(1 for word, rule in rules if word in view.text for _ in rule.finditer(view.text))

    return count


def _addresses(view: _View) -> int:
    text, count = view.text, 0
    for word, rule in _STREET.items():
        if word in text:
            for street in rule.finditer(text):
                count += _HOUSE.search(text[max(0, street.start() - _HOUSE_REACH) : street.start()]) is not None
    return count


def _digits(text: str) -> str:
    return "".join(character for character in text if character.isdigit())


def _dashed(number: str) -> str:
    digits = _digits(number)
    return f"{digits[:3]}-{digits[3:5]}-{digits[5:]}"


_COUNT: Final[Mapping[PatternName, Callable[[_View], int]]] = {
    "email": _emails,
    "phone": _phones,
    "ssn_us": _ssns,
    "nhs_number": _nhs_numbers,
    "iban": _ibans,
    "mrn_like": _labelled(_MRN, _MRN_VALUE),
    "date_of_birth": _labelled(_BORN, _BORN_VALUE),
    "street_address": _addresses,
}
_OF_DIGITS = ("phone", "ssn_us", "nhs_number")


def count_patterns(
    patterns: Iterable[PatternName],
    readings: Iterable[Reading],
    own: Sequence[CustomPattern] = (),
    in_time: Callable[[], None] = lambda: None,
) -> dict[str, int]:
    """Return how often each pattern occurs in one text, by code: "email", or "email/hex" where only that reading shows
    it.

    Args:
        patterns: shipped ones.
        readings: of the text.
        own: a site's own; one counts once in a reading, because to look for a next match from where each ended would
            not be linear (`(?:.*z)|a` reads the whole rest for every a).
        in_time: called before each of them; raises when they have taken too long.
    """
    counts: dict[str, int] = {}
    names = tuple(patterns)
    for reading in readings:
        written = _View(reading.text)
        views = [
            (reading.decoder, written),
            (_named(reading.decoder, "reversed"), _View(reading.text[::-1], backwards=True)),
        ]
        views.append((_named(reading.decoder, "rot13"), _View(rotated(reading.text))))
        if (as_digits := spelled(reading.text)) != reading.text:
            views.append((_named(reading.decoder, "spelled"), _View(as_digits, digits_are_meant=True)))
        for name in names:
            for code, view in views:
                if code.endswith("rot13") and name in _OF_DIGITS:
                    continue  # no digit changes
                if count := _COUNT[name](view):
                    counts[f"{name}/{code}" if code else name] = count
                    break
        for pattern in own:
            in_time()
            shown = next((code for code, view in views if pattern.is_in(view.encoded)), None)
            if shown is not None:
                place = f"{pattern.name}/{shown}" if shown else pattern.name
                counts[place] = counts.get(place, 0) + 1  # of two files that were met, two may have one name
    return counts


def _named(decoder: str, last: str) -> str:
    """The outer decoder names a reading: a code says how the text arrived, in one word."""
    return decoder or last
