"""The demo's recording, played on a terminal in 30 seconds: what a person pressed when it was made is pressed again.

It is a replay like any other and says so in its bar: nothing is answered. What the person typed in the dialog is told
in a line, and what came of it is in the recording. Whoever presses keys meanwhile goes his own way, and it goes on. Its
last frame stays until one of `LEAVES` is pressed; other keys look around in it.
`python -m tools.recording` makes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.app import FedConsole
from console.recording import Replay
from fedsilo.protocol.errors import NotFoundError
from fedsilo.views.lines import Line, line, wrap

RECORDING = Path(__file__).with_name("approve.fedrec")
STEP_SECONDS = 0.1
LEAVES = ("enter", "space", "escape", "q")  # once it is over
OVER = "The recording is over: Enter leaves. fedsilo demo does all of this on your machine, with a release to answer."
SHOWN = (
    "That was a recording; nothing was run or sent. It showed hospital_a's first update, held for a person: what would "
    "leave, what was found unusual in it, alice's rejection, and the outbox, where it never left.\n"
    "Go on: fedsilo demo runs four sites on this machine and holds such a release for you; "
    "fedsilo demo --leak shows a theft being denied.\n"
)


@dataclass(frozen=True)
class Step:
    """A key press at a moment of a recording.

    Attributes:
        at: second of the recording.
        key: pressed then; empty for none.
        says: told in the footer.
    """

    at: float
    key: str = ""
    says: str = ""


STEPS = (
    Step(4.0, "enter"),
    Step(9.5, "f"),
    Step(15.5, "escape"),
    Step(16.0, says="alice pressed R: a reason code and a note are asked for before anything is signed"),
    Step(21.0, says="she typed CONTENT, a note that stays at this site, and went to the button"),
    Step(27.0, "5"),
)


class PlayedConsole(FedConsole):
    """A console that plays a recording and presses keys by itself.

    Args:
        steps: in the order of their time.
        options: of `FedConsole`; `replay` is needed.
    """

    def __init__(self, *, replay: Replay, steps: Sequence[Step] = STEPS, **options: Any) -> None:
        super().__init__(banner=replay.banner, replay=replay, **options)
        self._played = replay
        self._steps = list(steps)
        self._over = False

    def on_mount(self) -> None:
        self.set_interval(STEP_SECONDS, self.play_on)

    def play_on(self) -> None:
        """Do what is due at the recording's position."""
        position = self._played.position
        while self._steps and self._steps[0].at <= position:
            step = self._steps.pop(0)
            if step.key:
                self.simulate_key(step.key)
            if step.says:
                self.say(step.says)
        if not self._over and not self._steps and position >= self._played.duration:
            self._over = True
            self.redraw()

    def message_lines(self, cells: int) -> list[Line]:
        lines = super().message_lines(cells)
        return lines or ([line(" ", *row) for row in wrap(OVER, cells, "accent")] if self._over else [])

    async def on_event(self, event: Any) -> None:
        if self._over and getattr(event, "key", "") in LEAVES:  # only an event of a key has one
            self.exit()
        else:
            await super().on_event(event)


def play(*, ascii_only: bool = False, theme_name: str = "fed-dark", **options: Any) -> None:
    """Play it on this terminal; returns when the person leaves, and says on stderr what was shown and how to go on.

    Args:
        ascii_only: no character above 0x7e.
        theme_name: of `console.theme`.
        options: of `console.terminal.run_to_the_end`.

    Raises:
        NotFoundError: this installation has no recording.
    """
    if not RECORDING.is_file():
        raise NotFoundError("the recording is not part of this installation", hint="python -m tools.recording makes it")
    replay = Replay(RECORDING)
    app = PlayedConsole(replay=replay, read_only=True, ascii_only=ascii_only, theme_name=theme_name)
    app.run_on(lambda: replay, **options)
    sys.stderr.write(SHOWN)
