"""Screen 0: what the daemon runs with and where each value comes from, and this console's own settings.

The daemon's are changed in its file, never here. The console's own theme and character set change with `enter`, for
this session: that changes nothing but the view.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.app import ComposeResult

from console.actions import PLACE_TWINS, command_line
from console.base import FedScreen, Lines
from console.dialogs import TextDialog
from console.table_screen import TablePane
from console.theme import THEMES
from fedsilo.views import settings
from fedsilo.views.lines import Line, line
from fedsilo.views.settings import ASCII_ONLY, THEME, Own
from fedsilo.views.state import CoordinatorState, Question

QUERY = "settings"
HERE = "here"


class SettingsScreen(FedScreen):
    called = "settings"
    CSS = "SettingsScreen { #head { padding: 0 2; } }"

    def __init__(self) -> None:
        super().__init__()
        self._chosen_here: set[str] = set()
        self._answered = False

    def panes(self) -> ComposeResult:
        yield Lines(id="head")
        yield TablePane(
            settings.COLUMNS, settings.setting_id, title="Settings", key=QUERY, empty="settings",
            makes="silo settings", id="settings",
        )  # fmt: skip

    @property
    def table(self) -> TablePane:
        return self.query_one("#settings", TablePane)

    @property
    def _daemon(self) -> str:
        return "coordinator" if isinstance(self.fed.snapshot.state, CoordinatorState) else "silo"

    def wants(self) -> Mapping[str, Question]:
        return {QUERY: (QUERY, {})} if self.is_mounted and self.table.frozen_at is None else {}

    def own(self) -> list[Own]:
        """What this console was started with, and what was chosen since."""
        fed = self.fed

        def origin(key: str) -> str:
            return HERE if key in self._chosen_here else fed.origins.get(key, settings.DEFAULT)

        return [
            Own(THEME, str(fed.theme), origin(THEME), "enter: the next one, until the console ends; --theme keeps it"),
            Own(ASCII_ONLY, "true" if fed.ascii_only else "false", origin(ASCII_ONLY),
                "enter: on and off, until the console ends; --ascii keeps it"),
            Own("keys", "as built in", settings.DEFAULT,
                "? lists the keys of each screen. Keys in lower case change nothing but the view; those in upper case "
                "always ask first."),
            Own("times", "UTC", settings.DEFAULT, "Every time is UTC, as in the daemon's log and its audit records."),
            Own("read-only", "true" if fed.read_only else "false", origin("read-only"),
                "A read-only console cannot be unlocked: start it without --read-only, with --operator-certificate and "
                "--operator-key."),
            Own("no-mouse", "false" if fed.mouse else "true", origin("no-mouse"),
                "With the mouse the console scrolls and chooses rows. Started with --no-mouse it leaves it to the "
                "terminal, which then marks text with it; otherwise most terminals do that while shift is held."),
        ]  # fmt: skip

    def draw(self) -> None:
        fed, width = self.fed, self.app.size.width - 4
        answer = fed.snapshot.answers.get(QUERY)
        rows = settings.setting_rows(answer, self._daemon, self.own())
        if answer is not None and not self._answered:  # the cursor stood on the console's own, which were alone
            self._answered = True
            if not self.table.rows.moved:
                self.table.rows.cursor = settings.setting_id(rows[0])
        self.table.take_rows(rows)
        head = settings.head_lines(rows, self._daemon, width)
        self.query_one("#head", Lines).draw(head, greyed=self.greyed)
        self.table.draw()

    def on_table_pane_opened(self, message: TablePane.Opened) -> None:
        row = message.item.row
        cells = max(self.app.size.width * 96 // 100 - 6, 30)
        if row.get("of") != settings.CONSOLE:
            self.app.push_screen(TextDialog("Setting", settings.detail_lines(row, self.twin(), cells)))
            return
        key = row.get("key")
        if key == THEME:
            self._next_theme()
        elif key == ASCII_ONLY:
            self._chosen_here.add(ASCII_ONLY)
            self.fed.ascii_only = not self.fed.ascii_only
            self.redraw()
        else:
            own = next(each for each in self.own() if each.key == key)
            self.app.push_screen(TextDialog("Setting", settings.own_lines(own, cells)))

    def _next_theme(self) -> None:
        names = list(THEMES)
        here = names.index(self.fed.theme) if self.fed.theme in names else -1
        self._chosen_here.add(THEME)
        self.fed.theme = names[(here + 1) % len(names)]
        self.redraw()

    def twin(self) -> str:
        return command_line(PLACE_TWINS[self.called](self.context()))

    def inspected(self) -> Any:
        item = self.table.selected()
        return dict(item.row) if item else None

    def keys(self) -> Line:
        return line(" enter Open or set  / Filter  s Sort  : Go to  ? Help  ctrl+q Quit")
