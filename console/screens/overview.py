"""Screen 1: what the silo or the federation does now and what needs a person (console design 4)."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from console import words
from console.drawing import Line, line
from console.screens.base import FedScreen, Lines
from console.values import SiloState


class OverviewScreen(FedScreen):
    CSS = """
    OverviewScreen {
        #bar { height: 1; background: $panel; }
        #condition { padding: 0 1; }
        #strip { padding: 0 1; }
        #main { height: 1fr; }
        #left-side { width: 1fr; }
        #right-side { width: 48; display: none; }
        .box { border: round $secondary; border-title-color: $accent; padding: 0 1; height: auto; }
        #silos-box.alert { border: heavy $warning; }
        #events-box, #side-events-box { height: 1fr; min-height: 3; }
        #footer { background: $panel; }
        &.-wide #right-side { display: block; }
        &.-wide #strip { display: none; }
        &.-wide #events-box { display: none; }
        &.-ascii .box { border: ascii $secondary; }
        &.-ascii #silos-box.alert { border: ascii $warning; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", show=False),
        Binding("a", "inbox", show=False),
        Binding("n", "next", show=False),
        Binding("j,down", "move(1)", show=False),
        Binding("k,up", "move(-1)", show=False),
        Binding("y", "copy", show=False),
        Binding("q", "how_to_leave", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._selected = ""

    def compose(self) -> ComposeResult:
        yield Lines(id="bar")
        yield Lines(id="condition")
        yield Lines(id="strip")
        with Horizontal(id="main"):
            with Vertical(id="left-side"):
                yield Lines(id="silos-box", classes="box")
                yield Lines(id="round-box", classes="box")
                yield Lines(id="out-box", classes="box")
                yield Lines(id="events-box", classes="box")
            with Vertical(id="right-side"):
                yield Lines(id="needs-box", classes="box")
                yield Lines(id="side-events-box", classes="box")
        yield Lines(id="footer")

    # ---- drawing -----------------------------------------------------------------------------------

    def redraw(self) -> None:
        if not self.is_mounted:
            return
        fed = self.fed
        snapshot, now, glyphs = fed.snapshot, fed.now(), fed.glyphs
        width, height = self.app.size
        needs = words.needs_of(snapshot, now)
        self._pin([need.key for need in needs])
        self.set_class(fed.ascii_only, "-ascii")
        bar, main = self.query_one("#bar", Lines), self.query_one("#main")
        main.display = not self.too_small
        if self.too_small:
            text = f"needs 60x16, has {width}x{height}; {len(needs)} need you; silo status tells it in text"
            bar.draw([line(text)])
            for name in ("#condition", "#strip", "#footer"):
                self.query_one(name, Lines).draw([])
            return
        bar.draw([words.top_bar(snapshot, fed.lock, now, width, glyphs)])
        self._draw("#condition", words.condition_lines(
            snapshot, now, width - 2, opened_at=fed.opened_at, waits_for=fed.waits_for
        ))  # fmt: skip
        wide = width >= 140
        self._draw("#strip", words.need_lines(needs, self._selected, width - 2, glyphs, most=3))
        inner = (width - 48 if wide else width) - 4
        stale = snapshot.state is not None and (snapshot.link.state != "live" or snapshot.is_stale(now))
        self._box("#silos-box", "Silos" if not isinstance(snapshot.state, SiloState) else "This silo",
                  words.silos_lines(snapshot, now, inner, glyphs), greyed=stale)  # fmt: skip
        self.query_one("#silos-box").set_class(bool(needs), "alert")
        rounds = [*words.over(snapshot, fed.leaving), *words.round_lines(snapshot, inner, glyphs)]
        self._box("#round-box", words.round_title(snapshot), rounds, greyed=stale)
        out = self.query_one("#out-box", Lines)
        out.display = isinstance(snapshot.state, SiloState)
        left_rows: list[Line] = []
        if isinstance(snapshot.state, SiloState):
            left_rows = words.left_lines(snapshot.state, inner)
            if height < 30:
                left_rows = _shortened(left_rows, 6)
            self._box("#out-box", "Left this silo", left_rows, greyed=stale)
        used = 2 + len(words.silos_lines(snapshot, now, inner, glyphs)) + len(left_rows) + 12 + min(len(needs), 3)
        self._box("#events-box", "Events", words.event_lines(snapshot, inner, glyphs, most=max(height - used, 1)))
        self._box("#needs-box", "Needs you", words.need_lines(needs, self._selected, 44, glyphs, most=6)
                  or [line(("nothing needs you", "dim"))])  # fmt: skip
        self._box("#side-events-box", "Events", words.event_lines(snapshot, 44, glyphs, most=max(height - 12, 1)))
        opens = any(need.release for need in needs)
        keys = " enter Open  a Approvals  n Next  " if opens else " "
        lock = "" if fed.read_only else "L Lock  " if fed.lock.open else "L Unlock  "
        more = "y Copy  Y Twin  r Reconnect  "
        leave = "? Help  ctrl+q Quit"
        if len(keys + lock + more + leave) > width:
            more = ""  # how to leave never falls off the edge; the help lists the rest
        self.query_one("#footer", Lines).draw(self.footer(line(keys, lock, more, leave)))

    def _draw(self, name: str, rows: list[Line]) -> None:
        widget = self.query_one(name, Lines)
        widget.display = bool(rows) and not (name == "#strip" and self.app.size.width >= 140)
        widget.draw(rows)

    def _box(self, name: str, title: str, rows: list[Line], *, greyed: bool = False) -> None:
        box = self.query_one(name, Lines)
        box.border_title = self.fed.title_of(title)
        box.draw(rows, greyed=greyed)

    # ---- cursor ------------------------------------------------------------------------------------

    def _pin(self, keys: list[str]) -> None:
        """The cursor stays on its row; when the row goes away, changing keys rest for a moment."""
        if self._selected in keys:
            return
        if self._selected:
            self.fed.came_on()
        self._selected = keys[0] if keys else ""

    def action_move(self, step: int) -> None:
        keys = [need.key for need in words.needs_of(self.fed.snapshot, self.fed.now())]
        if self._selected in keys:
            self._selected = keys[max(0, min(keys.index(self._selected) + step, len(keys) - 1))]
        self.redraw()

    def action_next(self) -> None:
        keys = [need.key for need in words.needs_of(self.fed.snapshot, self.fed.now())]
        if self._selected in keys:
            self._selected = keys[(keys.index(self._selected) + 1) % len(keys)]
        self.redraw()

    def action_open(self) -> None:
        release = self.fed.snapshot.release(self._selected)
        if release is not None:
            self.fed.open_release(release)

    def action_inbox(self) -> None:
        """With one release held, that one; with more, the one under the cursor or the oldest."""
        held = self.fed.snapshot.held
        release = self.fed.snapshot.release(self._selected) or (held[0] if held else None)
        if release is None:
            self.fed.say("nothing is held at this silo")
        else:
            self.fed.open_release(release)

    def action_how_to_leave(self) -> None:
        self.fed.say(f"q leaves a screen, this is the first: {self.fed.leaving}")

    def action_copy(self) -> None:
        release = self.fed.snapshot.release(self._selected)
        self.fed.copy(release.digest if release else self.fed.snapshot.policy_digest)

    def twin(self) -> str:
        return "silo status" if isinstance(self.fed.snapshot.state, SiloState) else "coordinator status"


def _shortened(rows: list[Line], most: int) -> list[Line]:
    if len(rows) <= most:
        return rows
    return [*rows[: most - 1], line((f"and {len(rows) - most + 1} more kinds: silo status", "dim"))]
