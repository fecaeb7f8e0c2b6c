"""The dialog that asks for how long a release is put off, for the person at this console alone."""

from __future__ import annotations

from textual import events

from console.drawing import Line, Part, wrap
from console.release_orders import MINUTES, Deferral, choices, deferral
from console.screens.asking import BOX_CELLS
from console.screens.orders import OrderDialog
from console.values import Release


class DeferDialog(OrderDialog):
    """Digits choose how long, and only then `d` signs it.

    Args:
        release: as it is shown.
        time: seconds since 1970, the daemon's clock.
        signer: who signs.
    """

    CSS = OrderDialog.CSS.replace("OrderDialog", "DeferDialog")

    def __init__(self, release: Release, time: float, signer: str) -> None:
        self._release, self._time = release, time
        self._choices = choices(release, time)
        first = next(iter(self._choices.values()), 1)
        super().__init__(deferral(release, first, time), signer)
        self._minutes = first

    @property
    def order(self) -> Deferral:
        return deferral(self._release, self._minutes, self._time)

    def asked(self) -> list[Line]:
        keys: list[Part] = []
        for key, minutes in self._choices.items():
            here = minutes == self._minutes  # marked by a sign too: not every terminal has styles
            keys.append((f"{self.fed.glyphs.cursor if here else ' '} ", "accent"))
            keys += [(key, "accent"), (f" {minutes} minutes  ", "strong" if here else "dim")]
        late = [f"{minutes} minutes" for key, minutes in MINUTES.items() if key not in self._choices]
        cells = min(self.app.size.width, BOX_CELLS) - 4
        told = wrap(f"it expires before {' and '.join(late)} are over", cells, "dim") if late else []
        return [tuple(keys), *told, (), *super().asked()]

    def on_key(self, event: events.Key) -> None:
        if event.key in self._choices:
            event.stop()
            self._minutes = self._choices[event.key]
            self._order = self.order
            self.redraw()
        else:
            super().on_key(event)
