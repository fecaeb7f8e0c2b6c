"""Makes foreign text safe to print, log, record and send on (threats T8, T37).

A line break in quoted text would begin a line of its own, in the form of this program's lines; an escape would act on a
terminal; a bidirectional override would reorder what is read. `harmless` writes each of them out.

Does not stop: printable text that is untrue or private, or that looks like other text. An escape in the text itself
cannot be told from one that was made here.
"""

from __future__ import annotations

import json


def harmless(text: object, characters_max: int | None = None, *, lines: bool = False) -> str:
    r"""Return `text` with every character that is not printable escaped as in JSON: `\n`, `\u001b`, `\u202e`.

    The result has at most `characters_max` characters. With `lines`, newlines and tabs stay: for a text of our own in
    which something is quoted. A blank that is no space is spelled out too, as it looks like one.
    """
    text, layout = str(text)[:characters_max], "\n\t" if lines else ""
    return "".join(each if each.isprintable() or each in layout else _escape(each) for each in text)[:characters_max]


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1]
