"""Screen 0: what the daemon runs with and where each value comes from, and this console's own settings.

The daemon's are changed in its file, never here. The console's own theme and character set change with `enter`, for
this session: that changes nothing but the view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from console.table_screen import Item, Subject, TableScreen
from fedsilo.views import settings
from fedsilo.views.lines import Line
from fedsilo.views.settings import ASCII_ONLY, THEME, Own, ShownSetting

HERE = "here"


class SettingsScreen(TableScreen):
    called = "settings"
    subject = Subject(
        settings.COLUMNS, settings.setting_id, title="Settings", one="Setting",
        keys=" enter Open or set  / Filter  s Sort  : Go to  ? Help  ctrl+q Quit", query="settings", empty="settings",
        makes="silo settings",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._chosen_here: set[str] = set()
        self._answered = False

    @property
    def _daemon(self) -> str:
        return "coordinator" if self.at_a_coordinator else "silo"

    def own(self) -> list[Own]:
        """Return this console's own settings: those it was started with, and those chosen since."""
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
        if self.answer is not None and not self._answered:  # the cursor stood on the console's own, which were alone
            self._answered = True
            if not self.table.rows.moved:
                self.table.rows.cursor = settings.setting_id(self.rows_of(self.answer)[0])
        super().draw()

    def rows_of(self, answer: Any) -> Sequence[ShownSetting]:
        return settings.setting_rows(answer, self._daemon, self.own())

    def head_lines(self, rows: Sequence[ShownSetting], cells: int) -> list[Line]:
        return settings.head_lines(rows, self._daemon, cells)

    def whole_lines(self, row: ShownSetting, cells: int) -> list[Line]:
        if row.of != settings.CONSOLE:
            return settings.detail_lines(row, self.twin(), cells)
        return settings.own_lines(next(each for each in self.own() if each.key == row.key), cells)

    def open_row(self, item: Item) -> None:
        row = item.row
        key = row.key if row.of == settings.CONSOLE else ""
        if key == THEME:
            self._chosen_here.add(THEME)
            self.fed.next_theme()
            self.redraw()
        elif key == ASCII_ONLY:
            self._chosen_here.add(ASCII_ONLY)
            self.fed.ascii_only = not self.fed.ascii_only
            self.redraw()
        else:
            super().open_row(item)
