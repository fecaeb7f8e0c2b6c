"""Where one can go: the places of the console by number and name, the line of tabs, the crumbs, and what `:` goes to.

A place that does not exist is not listed. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from console.drawing import Glyphs, Line, Part, clip, width_of
from console.values import Snapshot

HISTORY_MAX = 50


@dataclass(frozen=True)
class Place:
    """A screen with a key of its own.

    Args:
        key: the digit that opens it.
        name: one word, as typed after `:`.
        title: as shown.
        says: what one sees there, for the help and the palette.
        brief: its title where the whole line of tabs does not fit; as `title` by default.
    """

    key: str
    name: str
    title: str
    says: str
    brief: str = ""


PLACES: tuple[Place, ...] = (
    Place("1", "overview", "Overview", "what the silo or the federation does, and what needs a person", "Over"),
    Place("2", "round", "Round", "one round: each silo's phases, who is awaited, quorum, deadlines, digests", "Rnd"),
    Place("3", "approvals", "Approvals", "what is held and waits for an answer, and what was answered", "Appr"),
    Place(
        "4",
        "curves",
        "Curves",
        "figures by round or step: pass@1 with its interval, reward, KL, norms, the gap",
        "Curv",
    ),
    Place(
        "5",
        "outbox",
        "Outbox",
        "every message that was to leave, and with tab what came in: verdict, rule, bytes",
        "Out",
    ),
    Place("6", "audit", "Audit", "every record of this party's log, and whether its chain holds"),
    Place(
        "7",
        "budget",
        "Budget",
        "limits over messages: used, left, for how many rounds, and what is not counted",
        "Budg",
    ),
    Place("8", "certs", "Certs", "certificates: whose, until when, what happens when one ends, what renews it", "Cert"),
    Place("9", "logs", "Logs", "the newest lines of this daemon's own log, without private text"),
    Place("0", "settings", "Settings", "what the daemon runs with and where it is set, and this console's own", "Set"),
)


# Which titles become brief first where the line is too long; what is left over loses its name from the right.
BRIEF_FIRST = ("settings", "approvals", "overview", "outbox", "budget", "curves", "certs", "round")


def place_of(name: str) -> Place | None:
    return next((place for place in PLACES if place.name == name), None)


def tabs_line(here: str, snapshot: Snapshot, cells: int, glyphs: Glyphs) -> Line:
    """Every place with its key, the present one marked. Where they do not fit, titles become brief one by one, and then
    names go from the right; the present one stays whole."""
    steps = [(brief, len(PLACES)) for brief in range(len(BRIEF_FIRST) + 1)]
    for brief, names in [*steps, *((len(BRIEF_FIRST), left) for left in range(len(PLACES) - 1, -1, -1))]:
        parts: list[Part] = []
        for index, place in enumerate(PLACES):
            count = f"({len(snapshot.held)})" if place.name == "approvals" and snapshot.held else ""
            short = place.brief and place.name in BRIEF_FIRST[:brief] and place.name != here
            word = place.brief if short else place.title
            title = f"{glyphs.dot.strip()}{word}{count}" if index < names or place.name == here else count
            style = "strong" if place.name == here else "warn" if count else "dim"
            parts += [(" ", ""), (f"{place.key}{title}", style)]
        if width_of(parts) <= cells or names == 0:
            return clip(tuple(parts), cells)
    return ()


def crumbs_line(trail: Sequence[str], here: str, cells: int, glyphs: Glyphs) -> Line:
    """The way back, the present screen last."""
    parts: list[Part] = [(" ", "")]
    for crumb in trail:
        parts += [(crumb, "dim"), (glyphs.crumb, "dim")]
    return clip((*parts, (here, "strong"), ("  esc back", "dim")), cells)


@dataclass
class History:
    """What was typed after `:`, newest last; up and down walk through it."""

    lines: list[str] = field(default_factory=list)
    _at: int = 0

    def add(self, text: str) -> None:
        if text and (not self.lines or self.lines[-1] != text):
            self.lines.append(text)
            del self.lines[: max(len(self.lines) - HISTORY_MAX, 0)]
        self._at = len(self.lines)

    def back(self) -> str:
        self._at = max(self._at - 1, 0)
        return self.lines[self._at] if self.lines else ""

    def forth(self) -> str:
        self._at = min(self._at + 1, len(self.lines))
        return self.lines[self._at] if self._at < len(self.lines) else ""


def matches(text: str, names: Sequence[str]) -> list[str]:
    """Names that begin with what was typed, in their order; one that is it exactly stands alone."""
    typed = text.strip().lower()
    exact = [name for name in names if name.lower() == typed]
    return exact or [name for name in names if typed and name.lower().startswith(typed)]
