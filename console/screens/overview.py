"""Screen 1: what the silo or the federation does and what needs a person, with two figures where there is room.

The figures are the first two of those that are asked for first, asked for only while they are drawn. The last value of
each silo stands above its curve, with the interval where it has one; everything else is a screen away (`4`).

Does not draw: a figure that the daemon has not, nor anything on a terminal that needs the rows for what is to be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from console.actions import Context
from console.base import FedScreen, Lines
from console.dialogs import OrderingScreen
from fedsilo.control.answers import Curves, read
from fedsilo.views import conditions, curves, overview
from fedsilo.views.lines import Glyphs, Line, Part, line, width_of
from fedsilo.views.state import CoordinatorState, Question, SiloState

FIGURES_KEY = "overview figures"
FIGURE_NAMES = curves.ORDER[:4]
FIGURE_BORDER_ROWS, FIGURE_BORDER_CELLS = 2, 4
FIGURE_ROWS_MIN, FIGURE_ROWS_MAX = 7, 26  # without its border: two of values, axis, and a curve that says something
FIGURE_CELLS_MIN = 100
VALUE_LINES_MAX = 2


class OverviewFigures(Horizontal):
    DEFAULT_CSS = """
    OverviewFigures { height: auto; display: none; }
    OverviewFigures Lines { width: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._room = 0

    def compose(self) -> ComposeResult:
        yield Lines(id="first-figure", classes="box")
        yield Lines(id="second-figure", classes="box")

    @property
    def _screen(self) -> FedScreen:
        return cast("FedScreen", self.screen)

    def wants(self) -> Mapping[str, Question]:
        """Return the questions for the figures drawn last."""
        state = self._screen.fed.snapshot.state
        if self._room < FIGURE_ROWS_MIN or state is None:
            return {}
        x = "round" if isinstance(state, CoordinatorState) else "step"
        return {FIGURES_KEY: (curves.QUERY, {"names": ",".join(FIGURE_NAMES), "x": x})}

    def draw(self, rows: int, cells: int) -> int:
        """Fill both.

        Args:
            rows: that are free, with borders.
            cells: over both.

        Returns:
            The rows that they take.
        """
        fed = self._screen.fed
        self._room = min(rows - FIGURE_BORDER_ROWS, FIGURE_ROWS_MAX) if fed.size.width >= FIGURE_CELLS_MIN else 0
        answer = read(Curves, fed.snapshot.answers.get(FIGURES_KEY) if self._room >= FIGURE_ROWS_MIN else None)
        names = [name for name in curves.names_of(answer) if name in FIGURE_NAMES][:2]
        self.display = bool(names)
        if not names:
            return 0
        panes = list(self.query(Lines))
        for pane, name in zip(panes, [*names, ""], strict=False):
            pane.display = bool(name)
            if name:
                pane.border_title = fed.title_of(curves.short_title(answer, name))
                pane.styles.height = self._room + FIGURE_BORDER_ROWS
                shown = figure_lines(answer, name, cells // len(names) - FIGURE_BORDER_CELLS, self._room, fed.glyphs,
                                     ascii_only=fed.ascii_only)  # fmt: skip
                pane.draw(shown, greyed=self._screen.greyed)
        return self._room + FIGURE_BORDER_ROWS


def figure_lines(answer: Curves, name: str, cells: int, rows: int, glyphs: Glyphs, *, ascii_only: bool) -> list[Line]:
    """The newest values of a figure and its curve, in so many rows."""
    places = curves.places_of(answer, name)
    last = curves.View(name, places[-1] if places else None)
    values = curves.value_lines(answer, last, cells, glyphs, most=VALUE_LINES_MAX, brief=True)
    plot = curves.plot_of(answer, curves.View(name), cells, rows - len(values), ascii_only=ascii_only)
    return [*values, *(plot or curves.nothing_lines(answer, name, cells))][:rows]


BORDER_ROWS = 2
EVENT_ROWS_MIN = 1  # of the newest events, however much else there is
EVENT_ROWS_BESIDE_FIGURES = 4
KEYS_MAX = 8
CONDITION_LINES_MAX = 4
# Keys that somebody presses here who thinks of a release, and what they do on its screen.
OF_A_RELEASE = {
    "A": "A approves", "R": "R rejects", "D": "D puts it off", "h": "h shows what was held before",
    "v": "v shows what would leave", "d": "d shows the difference", "f": "f opens what was found",
    "p": "p shows the rules",
}  # fmt: skip
SILO_ROWS_ELSEWHERE = 17  # of the screen: frame, needs, round, and some events


class OverviewScreen(OrderingScreen):
    CSS = """
    OverviewScreen {
        #strip { padding: 0 1; }
        #main { height: 1fr; }
        #left-side { width: 1fr; }
        #right-side { width: 48; display: none; }
        #silos-box.alert { border: heavy $warning; }
        #events-box, #side-events-box { height: 1fr; min-height: 3; }
        &.-wide #right-side { display: block; }
        &.-wide #strip { display: none; }
        &.-wide #events-box { display: none; }
        &.-ascii #silos-box.alert { border: ascii $warning; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", show=False),
        Binding("a", "inbox", show=False),
        Binding("j,down", "move(1)", show=False),
        Binding("k,up", "move(-1)", show=False),
        Binding("y", "copy", show=False),
    ]
    called = "overview"

    def __init__(self) -> None:
        super().__init__()
        self._selected = ""

    def wants(self) -> Mapping[str, Question]:
        return self.query_one(OverviewFigures).wants() if self.is_mounted else {}

    def panes(self) -> ComposeResult:
        yield Lines(id="strip")
        with Horizontal(id="main"):
            with Vertical(id="left-side"):
                yield Lines(id="silos-box", classes="box")
                yield Lines(id="round-box", classes="box")
                yield Lines(id="out-box", classes="box")
                yield OverviewFigures()
                yield Lines(id="events-box", classes="box")
            with Vertical(id="right-side"):
                yield Lines(id="needs-box", classes="box")
                yield Lines(id="side-events-box", classes="box")

    @property
    def needs(self) -> list[overview.Need]:
        return overview.needs_of(self.fed.snapshot, self.fed.now())

    # ---- drawing -----------------------------------------------------------------------------------

    def notices(self, cells: int) -> list[Line]:
        """Return no lines: what concerns every screen is listed among the needs here."""
        fed = self.fed
        shown = [at for at in (fed.snapshot.link.received_at, self.below_at) if at is not None]
        below_at = min(shown) if fed.snapshot.state is not None else None  # its figures may have been read before
        told = conditions.condition_lines(
            fed.snapshot, fed.now(), cells, opened_at=fed.opened_at, waits_for=fed.waits_for, below_at=below_at,
            most=CONDITION_LINES_MAX,
        )  # fmt: skip
        return [*self.result_lines(cells), *told]

    def draw(self) -> None:
        fed, stale = self.fed, self.greyed
        snapshot, now, glyphs = fed.snapshot, fed.now(), fed.glyphs
        width, height = self.app.size
        needs = self.needs
        self._pin([need.key for need in needs])
        wide = width >= 140
        strip = self.query_one("#strip", Lines)
        paused = overview.paused_lines(snapshot, 44 if wide else width - 2, glyphs)
        strip_rows = (
            [*overview.need_lines(needs, self._selected, width - 2, glyphs, most=3), *paused] if not wide else []
        )
        strip.display = bool(strip_rows)
        strip.draw(strip_rows)
        inner = (width - 48 if wide else width) - 4
        silo_rows = overview.silos_lines(snapshot, now, inner, glyphs, most=max(height - SILO_ROWS_ELSEWHERE, 4))
        self.box("#silos-box", "Silos" if not isinstance(snapshot.state, SiloState) else "This silo", silo_rows,
                  greyed=stale)  # fmt: skip
        self.query_one("#silos-box").set_class(bool(needs), "alert")
        rounds = [*overview.over(snapshot, fed.leaving), *overview.round_lines(snapshot, inner, glyphs)]
        self.box("#round-box", overview.round_title(snapshot), rounds, greyed=stale)
        out = self.query_one("#out-box", Lines)
        out.display = isinstance(snapshot.state, SiloState)
        left_rows: list[Line] = []
        if isinstance(snapshot.state, SiloState):
            taken = sum(len(rows) + BORDER_ROWS for rows in (silo_rows, rounds)) + len(strip_rows)
            room = self.room - taken - BORDER_ROWS - (0 if wide else EVENT_ROWS_MIN + BORDER_ROWS)
            # what happens is worth more than the counts: the outbox has those, and nothing else has the events
            most = max(min(room, 5) if height < 30 else room, 0)
            left_rows = _shortened(overview.left_lines(snapshot.state, inner, most=most), most)
            out.display = bool(left_rows)
            self.box("#out-box", "Left this silo since its daemon began", left_rows, greyed=stale)
        boxes = [silo_rows, rounds, *([left_rows] if left_rows else [])]
        used = sum(len(rows) + BORDER_ROWS for rows in boxes) + len(strip_rows) + BORDER_ROWS
        spare = self.room - used + (BORDER_ROWS if wide else -EVENT_ROWS_BESIDE_FIGURES)
        used += self.query_one(OverviewFigures).draw(spare, width - 48 if wide else width)
        self.box("#events-box", "Events", overview.event_lines(snapshot, inner, glyphs, most=max(self.room - used, 1)))
        needed = overview.need_lines(needs, self._selected, 44, glyphs, most=6) or [line(("nothing needs you", "dim"))]
        self.box("#needs-box", "Needs you", [*needed, *paused])
        self.box("#side-events-box", "Events", overview.event_lines(snapshot, 44, glyphs, most=max(height - 13, 1)))

    def keys(self) -> Line:
        fed = self.fed
        opens = any(need.release for need in self.needs)
        keys = " enter Open  n Next  " if opens else " "
        lock = "" if fed.read_only else "L Lock  " if fed.lock.open else "L Unlock  "
        leave = "? Help  ctrl+q Quit"
        shown: list[Part] = [(keys, ""), (lock, "")]
        orders = [] if fed.read_only else self.orders_possible()
        offered = [*((f"{key} {verb}…  ", "" if fed.lock.open else "gone") for key, verb in orders),
                   (": Go to  ", ""), ("y Copy  ", ""), ("r Reconnect  ", "")]  # fmt: skip
        for part in offered[: KEYS_MAX - 3 - opens]:
            # how to leave never falls off the edge; the help lists the rest
            if width_of([*shown, part, (leave, "")]) <= self.app.size.width:
                shown.append(part)
        return line(*shown, leave)

    # ---- cursor ------------------------------------------------------------------------------------

    def _pin(self, keys: list[str]) -> None:
        """The cursor stays on its row; when the row goes away, changing keys rest for a moment."""
        if self._selected in keys:
            return
        if self._selected:
            self.fed.came_on()
        self._selected = keys[0] if keys else ""

    def action_move(self, step: int) -> None:
        keys = [need.key for need in self.needs]
        if self._selected in keys:
            self._selected = keys[max(0, min(keys.index(self._selected) + step, len(keys) - 1))]
        self.redraw()

    def select_next(self, after: str = "") -> None:
        """To the need after the one under the cursor, or after another; the last is followed by the first."""
        keys = [need.key for need in self.needs]
        present = after or self._selected
        if present in keys:
            self._selected = keys[(keys.index(present) + 1) % len(keys)]
        self.redraw()

    def selected(self) -> overview.Need | None:
        return next((need for need in self.needs if need.key == self._selected), None)

    def halted_kind(self) -> str:
        """Return the kind of the selected need, or the halted kind where there is only one."""
        need = self.selected()
        if need is not None and need.halted:
            return need.halted
        halted = [each.halted for each in self.needs if each.halted]
        return halted[0] if len(halted) == 1 else ""

    def action_open(self) -> None:
        need, release = self.selected(), self.fed.snapshot.release(self._selected)
        if release is not None:
            self.fed.open_release(release)
        elif need is not None and need.twin:
            here = "H, after a look at what was found; " if need.halted else ""
            self.fed.say(f"this is done with {here}a command, Y copies it: {need.twin}")

    def on_key(self, event: events.Key) -> None:
        """Keys of a held release do nothing here; whoever presses one is told where it works."""
        if event.key in OF_A_RELEASE:
            event.stop()
            where = "enter or a opens it, and there" if self.fed.snapshot.held else "nothing is held; on a release"
            self.fed.say(f"{event.key} is a key of a held release: {where} {OF_A_RELEASE[event.key]}")

    def action_inbox(self) -> None:
        """Open the held release if there is one; of several, the selected one or the oldest."""
        held = self.fed.snapshot.held
        release = self.fed.snapshot.release(self._selected) or (held[0] if held else None)
        if release is None:
            self.fed.say("nothing is held at this silo")
        else:
            self.fed.open_release(release)

    def action_copy(self) -> None:
        release = self.fed.snapshot.release(self._selected)
        self.fed.copy(release.digest if release else self.fed.snapshot.policy_digest)

    def twin(self) -> str:
        need = self.selected()
        return need.twin if need is not None and need.twin else super().twin()

    def context(self) -> Context:
        release = self.fed.snapshot.release(self._selected)
        return replace(super().context(), release=release.id if release else "")

    def inspected(self) -> Any:
        """The release under the cursor, or all that is known of the daemon."""
        return self.fed.snapshot.release(self._selected) or self.fed.snapshot.state


def _shortened(rows: list[Line], most: int) -> list[Line]:
    if len(rows) <= most:
        return rows
    if most < 2:
        return []
    return [*rows[: most - 1], line((f"and {len(rows) - most + 1} more kinds: silo status", "dim"))]
