"""T37: text from elsewhere cannot steer the terminal, hide, or push facts away."""

from __future__ import annotations

import unicodedata

import pytest

from fedsilo.views.lines import CHARACTERS_MAX, safe

HOSTILE = {
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "c1": "\x9b31mred\x9c",
    "newlines": "one\r\ntwo\x0bthree\x85four",
    "bidi": "abc\u202egpj.exe\u2066x\u2069",
    "zero width": "ad\u200bmin\u200d\ufeff",
    "soft hyphen and tags": "x\u00ady\U000e0041\U000e007f",
    "separators": "a\u2028b\u2029c",
    "private and surrogate": "\ue000 \ud800 \U0010ffff",
    "blank letters": "a\u3164b\u2800c\u115f\uffa0",
    "spaces": "a\u00a0b\u2003c\u3000d",
    "zalgo": "Z" + "\u0301\u0316\u0335" * 40,
    "long run": "A" * 5000,
    "blank run": "x" + " " * 5000 + "y",
    "long": "".join(chr(97 + index % 26) for index in range(5000)),
    "markup": "[@click=app.quit]press[/] [bold red]x[/] [/nope]",
    "delete": "a\x7fb\x00c",
}
_SHORT = [text for text in HOSTILE.values() if len(text) < 200]
# For screens, whose every start takes a second: all kinds in one text, from both ends, since a text may be cut.
TOGETHER = {"forwards": "".join(_SHORT), "backwards": "".join(reversed(_SHORT)), "long": HOSTILE["long"]}


@pytest.mark.parametrize("name", HOSTILE)
def test_T37_nothing_a_terminal_obeys_or_hides_is_left(name: str) -> None:
    shown = safe(HOSTILE[name])
    # counted another way: by the category of every character that is left
    kinds = {unicodedata.category(character) for character in shown}
    assert kinds.isdisjoint({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
    assert all(character == " " or unicodedata.category(character) != "Zs" for character in shown)
    assert len(shown) <= CHARACTERS_MAX and safe(shown) == shown  # a second pass changes nothing
    shown.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text, ok: 3.5 MiB", "plain text, ok: 3.5 MiB"),
        ("Zürich 日本 Ωμέγα", "Zürich 日本 Ωμέγα"),
        ("\x1b[31m", "␛[31m"),
        ("a\x7f", "a␡"),
        ("\x85", "<U+0085>"),
        ("\u202e", "<U+202E>"),
        ("A" * 20, "AAAAAA<+14>"),
        ("e" + "\u0301" * 9, "e\u0301\u0301<+7 marks>"),
        ("--" * 6, "------------"),
        ("abcdefghij" * 100, ("abcdefghij" * 39)[: CHARACTERS_MAX - 11] + "<+1000 cut>"),
    ],
)
def test_what_is_replaced_can_be_seen(text: str, expected: str) -> None:
    assert safe(text) == expected
