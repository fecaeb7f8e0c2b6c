"""Lines of styled text, and how they become what a widget draws or what a pipe reads.

Everything a screen shows is a list of lines, a line is a list of (text, style) parts, and each text passes `safe` here,
whoever made it. Styles are names of meanings (ok, warn, bad, dim, strong, accent), never colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from console.safe import Shown, safe

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


def digest_text(digest: str) -> str:
    """The two ends people compare; the last four are what is typed."""
    return f"{digest[:4]} {digest[4:8]} … {digest[-4:]}" if len(digest) > 16 else digest
