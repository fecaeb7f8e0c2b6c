"""The demo's recording, played on a terminal in 30 seconds: what a person pressed when it was made is pressed again.

It is a replay like any other and says so in its bar: nothing is answered. What the person typed in the dialog is told
in a line, and what came of it is in the recording. Whoever presses keys meanwhile goes his own way, and it goes on.
`python -m tools.recording` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.replay import Replay
from console.told import ToldConsole
from fedsilo.treaty.errors import NotFoundError

RECORDING = Path(__file__).with_name("approve.fedrec")
STEP_SECONDS = 0.1
STAYS_SECONDS = 2.0  # at the end, before the console closes


@dataclass(frozen=True)
class Step:
    """Attributes:
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


class PlayedConsole(ToldConsole):
    """Args:
    steps: in the order of their time.
    options: of `ToldConsole`; `replay` is needed.
    """

    def __init__(self, *, replay: Replay, steps: Sequence[Step] = STEPS, **options: Any) -> None:
        super().__init__(told=replay.banner, replay=replay, **options)
        self._played = replay
        self._steps = list(steps)

    def on_mount(self) -> None:
        self.set_interval(STEP_SECONDS, self.play_on)

    def play_on(self) -> None:
        """Do what is due at the recording's position; close when it is over."""
        position = self._played.position
        while self._steps and self._steps[0].at <= position:
            step = self._steps.pop(0)
            if step.key:
                self.simulate_key(step.key)
            if step.says:
                self.say(step.says)
        if not self._steps and position >= self._played.duration:
            self._steps = [Step(float("inf"))]  # once
            self.set_timer(STAYS_SECONDS, self.exit)


def play(*, ascii_only: bool = False, theme_name: str = "fed-dark") -> None:
    """Play it on this terminal; returns at its end, or when the person leaves.

    Raises:
        NotFoundError: this installation has no recording.
    """
    if not RECORDING.is_file():
        raise NotFoundError("the recording is not part of this installation", hint="python -m tools.recording makes it")
    replay = Replay(RECORDING)
    app = PlayedConsole(replay=replay, read_only=True, ascii_only=ascii_only, theme_name=theme_name)
    app.run_on(lambda: replay)
