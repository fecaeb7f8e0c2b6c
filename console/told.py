"""The console over something else than a daemon alone: a recording played back, or a link that is recorded.

It is `FedConsole` with one more thing to say, which stands where the lock stands and is never dropped from the bar. Of
what is played back nothing can be answered, so there is nothing to unlock.

Does not stop: a picture of a replay passed off as live. The banner is on the screen, not in every line of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from console.app import FedConsole
from console.bar import Lock, shorter
from console.drawing import Part
from console.feed import Source
from console.navigation import PLACES
from console.replay import Replay
from console.signing import Signer
from fedsilo.protocol.errors import OperationError, UnreachableError, UsageError

SEEK_SECONDS = 10.0
SCREEN_SECONDS_MAX = 10.0


@dataclass(frozen=True)
class ToldLock(Lock):
    """A lock with what else is told beside it."""

    told: str = ""

    def words(self) -> list[Part]:
        words = super().words()
        if not self.told:
            return words
        (whole, _), (least, _) = words[0], words[-1]
        told = shorter(self.told)
        return [*((f"{each} {whole}", "warn") for each in told), (f"{told[-1]} {least}", "warn")]


class ToldConsole(FedConsole):
    """Args:
    told: what the bar says, such as `Replay.banner`.
    replay: what `.` pauses and `<` `>` move; None where nothing is played back.
    options: of `FedConsole`.
    """

    # written as tuples: Textual itself is imported by screens only
    BINDINGS: ClassVar[list[Any]] = [
        ("full_stop", "toggle_pause", ""),
        ("less_than_sign", f"seek({-SEEK_SECONDS})", ""),
        ("greater_than_sign", f"seek({SEEK_SECONDS})", ""),
    ]

    def __init__(self, *, told: Callable[[], str], replay: Replay | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._told = told
        self._replay = replay

    @property
    def lock(self) -> Lock:
        lock = super().lock
        # A source that has a banner of its own says it where a live link says "live".
        told = "" if self.snapshot.link.told else self._told()
        return ToldLock(lock.person, lock.seconds_left, lock.read_only, told)

    @property
    def replays(self) -> bool:
        return self._replay is not None

    def action_toggle_pause(self) -> None:
        if self._replay is None:
            return
        if self._replay.paused:
            self._replay.resume()
        else:
            self._replay.pause()
        self.action_read_now()

    def action_seek(self, seconds: float) -> None:
        if self._replay is not None:
            self._replay.seek(self._replay.position + seconds)
            self.action_read_now()


def run_told(
    connect: Callable[[], Source],
    told: Callable[[], str],
    *,
    replay: Replay | None = None,
    signer: Signer | None = None,
    **options: Any,
) -> None:
    """Open the console on a source; returns when the person leaves.

    Args:
        connect: makes the source, again after each loss.
        told: what the bar says.
        replay: what the keys move.
        signer: None for looking only.
        options: of `FedConsole`.
    """
    ToldConsole(told=told, replay=replay, signer=signer, **options).run_on(connect)


def screen_text(
    connect: Callable[[], Source],
    number: str,
    told: Callable[[], str],
    *,
    cells: int,
    rows: int,
    **options: Any,
) -> str:
    """One screen as text, drawn by the console itself without a terminal.

    Args:
        connect: makes the source.
        number: of the screen, as its key says.
        told: what the bar says.
        cells: width.
        rows: height.
        options: of `FedConsole`.

    Raises:
        UsageError: no such screen.
        UnreachableError: the source cannot be read. OperationError: its answers did not come in time.
    """
    place = next((one for one in PLACES if one.key == number), None)
    if place is None:
        known = ", ".join(f"{one.key} {one.name}" for one in PLACES)
        raise UsageError(f"there is no screen {number}", hint=f"there are: {known}")
    app = ToldConsole(told=told, **options)
    drawn: list[str] = []

    async def look(pilot: Any) -> None:
        deadline = time.monotonic() + SCREEN_SECONDS_MAX
        await pilot.pause()
        app.action_go(place.name)
        while time.monotonic() < deadline and not _complete(app):
            await pilot.pause(0.05)
        await pilot.pause()
        if _complete(app):
            compositor = app.screen._compositor  # its strips are what a terminal would get
            drawn.extend("".join(part.text for part in strip).rstrip() for strip in compositor.render_strips())
        app.exit()

    app.run_on(connect, headless=True, size=(cells, rows), auto_pilot=look)
    if app.snapshot.link.state == "disconnected":
        raise UnreachableError(app.snapshot.link.cause, hint=app.snapshot.link.hint)
    if not drawn:
        raise OperationError(f"screen {number} was not complete within {SCREEN_SECONDS_MAX:g} s")
    return "\n".join(drawn)


def _complete(app: FedConsole) -> bool:
    """Everything that the screen asks for was answered or refused."""
    snapshot = app.snapshot
    if snapshot.link.state == "disconnected":
        return True
    return snapshot.state is not None and all(
        key in snapshot.answered_at or key in snapshot.refused for key in app.wanted
    )
