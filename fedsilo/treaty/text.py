"""Foreign text as it may be printed, logged, recorded and sent on (threats T8, T37).

A line break in quoted text would begin a line of its own, in the form of this program's lines; an escape would act on a
terminal; a bidirectional override would reorder what is read. `harmless` writes each of them out.

Does not stop: printable text that is untrue or private, or that looks like other text. An escape in the text itself
cannot be told from one that was made here.
"""

from __future__ import annotations


def harmless(text: object, characters_max: int | None = None, *, lines: bool = False) -> str:
    r"""Replace every character that is not printable by its escape: `\n`, `\x1b`, `\u202e`.

    Args:
        text: anything; what is no string is taken as `str` shows it.
        characters_max: length of the result at most; the rest is cut off.
        lines: newlines and tabs stay, for a text of our own in which something is quoted.
    """
    text = str(text)
    if not text.isprintable():
        kept = "\n\t" if lines else ""
        text = "".join(each if each.isprintable() or each in kept else _escape(each) for each in text)
    return text[:characters_max]


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
