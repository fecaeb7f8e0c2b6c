"""Lines of styled text, foreign text made safe for a terminal, and how both become what a widget draws or a pipe reads.

A line is a list of (text, style) parts. Styles are names of meanings (ok, warn, bad, dim, strong, accent), never
colours. Each text passes `safe` here, whoever made it (threat T37): a model's answer, a silo's name or a reason may
carry terminal escapes, bidirectional overrides, invisible characters, stacks of combining marks or a line long enough
to push the facts off the screen. `safe` takes their power and keeps them visible: what was cut or replaced can be seen
to have been. Markup is no business of this module: widgets are given content objects, never strings to be parsed.

Does not stop: look-alike letters of another script. Digests, not names, identify what is approved.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from fedsilo.protocol.clocks import utc

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


Part = tuple[str, str]
Line = tuple[Part, ...]


@dataclass(frozen=True)
class Glyphs:
    live: str
    away: str
    bad: str
    need: str
    arrow: str
    full: str
    empty: str
    dot: str
    more: str
    cursor: str
    up: str
    down: str
    crumb: str


NOT_YET_KNOWN = "not yet known"
YEAR_10000_SECONDS = 253_402_300_800  # since 1970; a later moment has no date
UNICODE = Glyphs("●", "○", "\u00d7", "!", "→", "━", "╌", " · ", "…", "▸", "▴", "▾", " > ")
ASCII = Glyphs("*", "o", "x", "!", "->", "#", "-", " | ", "~", ">", "^", "v", " > ")


def line(*parts: str | Part) -> Line:
    """A line of plain texts and (text, style) parts."""
    return tuple((part, "") if isinstance(part, str) else part for part in parts)


def width_of(parts: Iterable[Part]) -> int:
    """Terminal cells a line takes."""
    return sum(cell_len(safe(text)) for text, _ in parts)


def fit(text: str, cells: int, more: str = "…") -> str:
    """`text`, safe, in at most `cells` cells; what was cut ends in `more`."""
    shown = safe(text)
    if cell_len(shown) <= cells:
        return shown
    return set_cell_size(shown, max(cells - cell_len(more), 0)).rstrip() + more if cells > 0 else ""


def fit_ends(text: str, cells: int, more: str = "…") -> str:
    """`text`, safe, in at most `cells` cells; what is too much goes from its middle, and of the rest two thirds are its
    end: of a path or a tensor's name that is what tells it from the next one."""
    shown = safe(text)
    if cell_len(shown) <= cells or cells <= cell_len(more):
        return fit(shown, cells, more)
    room = cells - cell_len(more)
    start = len(shown)
    while start > 0 and cell_len(shown[start - 1 :]) <= room - room // 3:
        start -= 1
    return set_cell_size(shown, room - cell_len(shown[start:])).rstrip() + more + shown[start:]


def short_paths(text: str, cells: int) -> str:
    """`text` with each path in it in at most `cells` cells, its middle left out."""
    return " ".join(fit_ends(word, cells) if "/" in word else word for word in text.split(" "))


def pad(text: str, cells: int, *, right: bool = False, more: str = "…", ends: bool = False) -> str:
    """`text` in exactly `cells` cells; with `ends` what is too much goes from its middle."""
    shown = fit_ends(text, cells, more) if ends else fit(text, cells, more)
    space = " " * (cells - cell_len(shown))
    return Shown(space + shown if right else shown + space)


def clip(parts: Line, cells: int, more: str = "…") -> Line:
    """A line in at most `cells` cells."""
    shown: list[Part] = []
    left = cells
    for text, style in parts:
        piece = safe(text)
        if cell_len(piece) > left:
            shown.append((fit(piece, left, more), style))
            break
        shown.append((piece, style))
        left -= cell_len(piece)
    return tuple(shown)


def flow(pieces: Sequence[Line], cells: int, *, between: str = "  ") -> list[Line]:
    """Pieces side by side in as few lines as they need; a piece is never broken unless it is wider than a line."""
    lines: list[list[Part]] = []
    used = 0
    for piece in pieces:
        size = width_of(piece)
        if lines and used + len(between) + size <= cells:
            lines[-1] += [(between, ""), *piece]
            used += len(between) + size
        else:
            lines.append(list(clip(piece, cells)))
            used = min(size, cells)
    return [tuple(parts) for parts in lines]


def wrap(text: str, cells: int, style: str = "") -> list[Line]:
    """Words of a text in lines of at most `cells`."""
    return flow([line((word, style)) for word in safe(text).split(" ") if word], cells, between=" ")


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Part]],
    cells: int,
    *,
    right: frozenset[int] = frozenset(),
    ends: frozenset[int] = frozenset(),
    gap: int = 2,
) -> list[Line]:
    """Aligned columns; the widest is cut first when they do not fit, those of `ends` in the middle."""
    widths = [
        max(cell_len(safe(header[column])), *(cell_len(safe(row[column][0])) for row in rows)) if rows
        else cell_len(header[column])
        for column in range(len(header))
    ]  # fmt: skip
    while sum(widths) + gap * (len(widths) - 1) > cells and max(widths) > 4:
        widths[widths.index(max(widths))] -= 1
    space = " " * gap
    lines: list[Line] = []
    for row in [[(title, "dim") for title in header], *rows]:
        parts: list[Part] = []
        for column, (text, style) in enumerate(row):
            parts += [(space, "")] if column else []
            parts.append((pad(text, widths[column], right=column in right, ends=column in ends), style))
        lines.append(tuple(parts))
    return lines


def bar(done: float, cells: int, glyphs: Glyphs) -> Line:
    """Progress from 0 to 1; full and empty differ in shape, not in colour alone."""
    full = round(max(0.0, min(done, 1.0)) * cells)
    return ((glyphs.full * 1, "accent"),) * full + ((glyphs.empty * 1, "dim"),) * (cells - full)


# One cell for one cell, so that columns stay where they are.
_IN_ASCII = str.maketrans({"…": "~", "·": "|", "→": ">"})


def in_ascii(text: str) -> str:
    """Our own signs in ASCII; data stays as it is."""
    return text.translate(_IN_ASCII)


def to_text(lines: Iterable[Line]) -> str:
    """Linear text without any style, for pipes and screen readers."""
    return "\n".join("".join(safe(text) for text, _ in parts).rstrip() for parts in lines)


def bytes_text(size: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def duration_text(seconds: float) -> str:
    """Such as 02:13 or 26:07:44; in words where one of the two moments is not known."""
    if not math.isfinite(seconds):
        return NOT_YET_KNOWN
    whole = max(int(seconds), 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes:02d}:{whole % 60:02d}"


def moment_text(seconds: float) -> str:
    """A time since 1970, in UTC."""
    return utc(min(max(seconds, 0.0), YEAR_10000_SECONDS - 1)) if seconds else NOT_YET_KNOWN


def digest_text(digest: str) -> str:
    """The two ends people compare; the last four are what is typed."""
    return f"{digest[:4]} {digest[4:8]} … {digest[-4:]}" if len(digest) > 16 else digest


WHOLE_CHARACTERS_MAX = 4_000


def whole(text: str, cells: int, style: str = "") -> list[Line]:
    """The text in lines of at most `cells` cells, broken between words where there is one."""
    rows: list[str] = []
    row = ""
    for word in safe(text, WHOLE_CHARACTERS_MAX).split(" "):
        if row and cell_len(row) + 1 + cell_len(word) <= cells:
            row = f"{row} {word}"
            continue
        if row:
            rows.append(row)
        *full, row = _broken_word(word, cells)
        rows += full
    return [line((Shown(each), style)) for each in (*rows, row) if each]


def named(name: str, rows: Sequence[Line], style: str = "dim", *, name_cells: int = 10) -> list[Line]:
    """Lines that a name stands before, in a column of its own."""
    return [line((pad("" if index else name, name_cells), style), *row) for index, row in enumerate(rows)]


def field(name: str, text: str, cells: int, style: str = "", *, name_cells: int = 13) -> list[Line]:
    """A named text, whole: the name stands before its first line."""
    rows = whole(text, max(cells - name_cells, 8), style)
    blank = " " * name_cells
    return [line((Shown(f"{name:{name_cells}}" if not index else blank), "dim"), *row) for index, row in enumerate(
        rows)]  # fmt: skip


def _broken_word(word: str, cells: int) -> list[str]:
    pieces, piece, used = [], "", 0
    for character in word:
        size = cell_len(character)
        if piece and used + size > cells:
            pieces.append(piece)
            piece, used = "", 0
        piece, used = piece + character, used + size
    return [*pieces, piece]
