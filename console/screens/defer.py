"""The dialog that asks for how long a release is put off, for the person at this console alone."""

from __future__ import annotations

from textual import events

from console.drawing import Line
from console.release_orders import Deferral, choices, deferral
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
        keys = [
            part
            for key, minutes in self._choices.items()
            for part in ((key, "accent"), (f" {minutes} minutes   ", "strong" if minutes == self._minutes else "dim"))
        ]
        return [tuple(keys), *super().asked()]

    def on_key(self, event: events.Key) -> None:
        if event.key in self._choices:
            event.stop()
            self._minutes = self._choices[event.key]
            self._order = self.order
            self.redraw()
        else:
            super().on_key(event)
