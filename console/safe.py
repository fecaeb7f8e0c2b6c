"""One function that every text from elsewhere passes before it is drawn (threat T37, console design 8).

A model's answer, a silo's name or a reason may carry terminal escapes, bidirectional overrides, invisible characters,
stacks of combining marks or a line long enough to push the facts off the screen. `safe` takes their power and keeps
them visible: what was cut or replaced can be seen to have been. Markup is no business of this module: widgets are
given content objects, never strings to be parsed.

Does not stop: look-alike letters of another script. Digests, not names, identify what is approved.
"""

from __future__ import annotations

import unicodedata

CHARACTERS_MAX = 400
RUN_MAX = 12  # of one character; the rest of the run becomes a count
RUN_KEPT = 6
MARKS_MAX = 2  # combining marks on one base character
_SPELLED_OUT = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Letters, marks and symbols that most fonts draw as nothing at all.
_BLANK = frozenset(
    {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0}
    | set(range(0x180B, 0x1810))
    | set(range(0xFE00, 0xFE10))
    | set(range(0xE0100, 0xE01F0))
)


class Shown(str):
    """A text that `safe` has seen already, and which our own code has only padded since."""

    __slots__ = ()


def safe(text: object, limit: int = CHARACTERS_MAX) -> str:
    """`text` with nothing in it that a terminal obeys or hides, on one line, at most `limit` characters long.

    Args:
        text: anything; what is no string is shown as `str` has it.
        limit: characters kept, marker included; at least 16.
    """
    if isinstance(text, Shown):
        return text
    source = text if isinstance(text, str) else str(text)
    pieces: list[str] = []
    length = 0
    index = 0
    marks = 0
    while index < len(source):
        character = source[index]
        run = 1
        while index + run < len(source) and source[index + run] == character:
            run += 1
        if unicodedata.category(character) in ("Mn", "Me", "Mc"):
            end = _end_of_marks(source, index)
            kept = [_spelled(mark) for mark in source[index : index + max(MARKS_MAX - marks, 0)]][: end - index]
            dropped = end - index - len(kept)
            piece = "".join(kept) + (f"<+{dropped} marks>" if dropped else "")
            marks += len(kept)
            index = end
        else:
            marks = 0
            kept_run = run if run <= RUN_MAX else RUN_KEPT
            piece = _spelled(character) * kept_run + (f"<+{run - kept_run}>" if run > kept_run else "")
            index += run
        pieces.append(piece)
        length += len(piece)
        if length > limit:
            break
    whole = "".join(pieces)
    if length <= limit:
        return whole
    left = f"<+{len(source)} cut>"
    return whole[: max(limit - len(left), 0)] + left


def _end_of_marks(source: str, index: int) -> int:
    while index < len(source) and unicodedata.category(source[index]) in ("Mn", "Me", "Mc"):
        index += 1
    return index


def _spelled(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    category = unicodedata.category(character)
    if category in _SPELLED_OUT or code in _BLANK or (category == "Zs" and character != " "):
        return f"<U+{code:04X}>"
    return character
