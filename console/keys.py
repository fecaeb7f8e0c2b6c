"""Which keys may change something, and when: the part of the key rules that has to do with time (console design 2).

A changing key is offered, and acts only when it stood alone: an unbracketed paste arrives as keys in a burst, so a key
that follows or precedes another by less than 40 ms changes nothing. After a screen change, or when the row under the
cursor went away, changing keys are inert for 400 ms, so that nobody confirms what has just slid under his finger.
What was refused or taken back is said each time. Pure: the time comes in, and for a key that is when it was pressed:
a console that is busy looks at a paste key by key, with pauses of its own in between.
"""

from __future__ import annotations

from math import inf

INERT_SECONDS = 0.4
BURST_SECONDS = 0.04
BURST = "keys came faster than hands type: nothing was done"


class KeyGate:
    def __init__(self) -> None:
        self._last = -inf
        self._previous = -inf
        self._changed = -inf
        self._pending: tuple[str, float] | None = None

    def key(self, now: float) -> str:
        """Some key was pressed. Call it for every key, before what the key does. Returns what to say when it takes back
        what the key before it offered, or nothing."""
        taken_back = self._pending is not None and now - self._pending[1] < BURST_SECONDS
        if taken_back:
            self._pending = None
        self._previous, self._last = self._last, now
        return BURST if taken_back else ""

    def in_burst(self, now: float) -> bool:
        """A key that is pressed now follows another one sooner than hands type."""
        return now - self._last < BURST_SECONDS

    def screen_changed(self, now: float) -> None:
        self._changed = now
        self._pending = None

    def offer(self, name: str, now: float) -> str:
        """A changing key asks to act; it acts at `settle`. Returns why it may not, or nothing."""
        if now - self._changed < INERT_SECONDS:
            return "the screen has just changed: look, then press it again"
        if now - self._previous < BURST_SECONDS:
            self._pending = None
            return BURST
        self._pending = (name, now)
        return ""

    def settle(self, now: float) -> str | None:
        """What was offered and stood alone long enough, once."""
        if self._pending is None or now - self._pending[1] < BURST_SECONDS:
            return None
        name = self._pending[0]
        self._pending = None
        return name
