r"""The layout of a mathematical answer taken away: what remains is compared (policies 3 and 4 of the examples).

Text only, every step linear in a text of at most a few thousand characters: no expression is built here.
"""

from __future__ import annotations

import re
import unicodedata

_CHARACTERS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u03c0": "\\pi ",
        "\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u222a": "\\cup ", "\u00b1": "\\pm ",
        "\u00b2": "^2", "\u00b3": "^3", "\u00b0": "", "\u20ac": "", "\u00a3": "", "\u2032": "'",
    }
)  # fmt: skip
_SPACING = re.compile(
    r"\\(?:[!,;:> ]|quad|qquad|displaystyle|left(?![a-z])|right(?![a-z])|bigl?|bigr?|Bigl?|Bigr?|limits|mathstrut)"
    r"(?![a-zA-Z])|~"
)
_SAME = (
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\(?:leq|leqslant)(?![a-z])"), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant)(?![a-z])"), r"\\ge "),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"\\lt(?![a-z])"), "<"),
    (re.compile(r"\\gt(?![a-z])"), ">"),
    (re.compile(r"\\l?dots(?![a-z])"), "..."),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\\$|\$|\\[()]|(?<!\\)\\[\[\]](?![0-9])"), ""),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])"), ""),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt\s*(\d)"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:mathbb|mathbf|mathrm|boldsymbol|bm)\s*\{([A-Za-z]+)\}"), r"\1"),
    (re.compile(r"\\[pbvBV]matrix|\{[bvBV]matrix\}|\{array\}\{[a-z|]*\}"), "{pmatrix}"),
)
_SEPARATING_WORD = re.compile(
    r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
)
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|textbf|textit|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"^(?P<value>-?[\d.,]+%?|-?\\frac\{\d+\}\{\d+\}|-?\d+\s*/\s*\d+|-?[\d.]+\s*\\times\s*10\^\{?-?\d+\}?)\s*"
    r"(?P<unit>(?:\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}|(?<=[\s\d])(?!pi|sqrt|and|or)[A-Za-z]{2,}[A-Za-z ./]*)"
    r"(?:\s*\^\s*\{?-?\d\}?)?)$"
)
_ASSIGNED = re.compile(
    r"^\s*[A-Za-z](?:_\{?\w+\}?)?\s*(?:\(\s*[a-z]\s*\))?\s*(?:=|\\in(?![a-z])|:=)\s*(?P<value>[^=]+)$"
)
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?%?")


def normalise(text: str) -> str:
    """One layout for all: compatibility forms, spacing commands, synonyms of commands, currency and degree signs."""
    plain = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    plain = _SPACING.sub(" ", plain)
    for pattern, same in _SAME:
        plain = pattern.sub(same, plain)
    plain = _SEPARATING_WORD.sub(",", plain)
    return " ".join(plain.split()).strip(" .;")


def tight(text: str) -> str:
    """For comparing as text: no white space, no needless braces around one character, text wrappers opened."""
    plain = re.sub(r"\s+", "", _TEXT.sub(r"\1", text))
    return re.sub(r"\{([A-Za-z0-9])\}", r"\1", plain)


def split_unit(text: str) -> tuple[str, str]:
    r"""A bare number and the unit behind it, or the whole text and nothing: `8\text{ apples}` -> ("8", "apples")."""
    found = _UNIT.match(text)
    if found is None:
        return text, ""
    return found.group("value").strip(), "".join(_TEXT.sub(r"\1", found.group("unit")).lower().split())


def drop_assignment(text: str) -> str:
    """`x = 3` -> `3`, `f(x) = 2x` -> `2x`; other text unchanged."""
    found = _ASSIGNED.match(text)
    return found.group("value").strip() if found is not None else text


def is_thousands(text: str) -> bool:
    return _THOUSANDS.fullmatch(text) is not None


def split_top_level(text: str, separator: str) -> list[str]:
    """Parts of a text between separators that stand in no bracket; brackets of intervals need not match in kind."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        if depth == 0 and text.startswith(separator, position):
            parts.append(text[start:position].strip())
            position += len(separator)
            start = position
            continue
        if text[position] in "([{":
            depth += 1
        elif text[position] in ")]}":
            depth = max(0, depth - 1)
        position += 1
    parts.append(text[start:].strip())
    return parts


def brackets(text: str) -> tuple[str, str, str] | None:
    r"""(opening, inside, closing) when one pair encloses the whole text: `(1,2]`, `\{1,2\}`, `[0,1]`."""
    for opening, closings in (("\\{", ("\\}",)), ("(", (")", "]")), ("[", (")", "]"))):
        if not text.startswith(opening):
            continue
        for closing in closings:
            inside = text[len(opening) : -len(closing)]
            if len(text) > len(opening) and text.endswith(closing) and _balanced(inside):
                return opening, inside.strip(), closing
    return None


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return False
    return depth == 0


def matrix(text: str) -> list[list[str]] | None:
    r"""Rows of a `pmatrix` that is the whole text; None for anything else."""
    found = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text.strip(), re.DOTALL)
    if found is None or "\\begin" in found.group(1):
        return None
    rows = [row for row in found.group(1).split("\\\\") if row.strip()]
    return [[cell.strip() for cell in row.split("&")] for row in rows]


def as_interval(text: str) -> str:
    """An inequality in one variable as its interval; other text unchanged."""
    parts = re.split(r"(\\le(?![a-z])|\\ge(?![a-z])|<|>)", text)
    values = [part.strip() for part in parts[::2]]
    signs = [part.strip() for part in parts[1::2]]
    if len(signs) == 1 and re.fullmatch(r"[a-zA-Z]", values[1]) and not re.fullmatch(r"[a-zA-Z]", values[0]):
        values.reverse()
        signs = [{"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}[signs[0]]]
    if len(signs) == 1 and re.fullmatch(r"[a-zA-Z]", values[0]) and values[1]:
        return {
            "<": f"(-\\infty,{values[1]})",
            "\\le": f"(-\\infty,{values[1]}]",
            ">": f"({values[1]},\\infty)",
            "\\ge": f"[{values[1]},\\infty)",
        }[signs[0]]
    if len(signs) == 2 and re.fullmatch(r"[a-zA-Z]", values[1]) and values[0] and values[2]:
        if set(signs) <= {"<", "\\le"}:
            return f"{'(' if signs[0] == '<' else '['}{values[0]},{values[2]}{')' if signs[1] == '<' else ']'}"
        if set(signs) <= {">", "\\ge"}:
            return f"{'(' if signs[1] == '>' else '['}{values[2]},{values[0]}{')' if signs[0] == '>' else ']'}"
    return text
