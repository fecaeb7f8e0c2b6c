"""A console driven by hand: keyboard, clock, the daemon's snapshots, and a signer that keeps what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, process_time
from typing import Any

from textual.pilot import Pilot
from textual.screen import Screen
from textual.strip import Strip

from console.app import FedConsole
from console.base import Arrived, FedScreen
from console.feed import Person
from console.screens.approval import ApprovalScreen
from fedsilo.control.client import Operator
from fedsilo.protocol.errors import FedSiloError
from fedsilo.views.state import Snapshot
from tests.console.states import DIGEST, live, release, silo

SIZES = [(80, 24), (140, 42)]


FRAMES = str.maketrans("│┃", "  ")
UPDATE_SECONDS = 0.001  # from a change to its drawing, instead of a sixtieth of a second
REST_SECONDS = 0.002  # between two looks at the processor's clock
IDLE_SECONDS = 0.0005  # of it in which nothing is worked on
TURNS = 20  # of the event loop before each look: a message that wakes another has gone on, however busy the machine is


async def idle(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Wait until an application without timers has nothing left to do, and `max_sleep` seconds at most.

    The pilot's own wait looks every 20 ms, and after each key four times, so that most of a test's time was sleep.
    """
    end, rests = monotonic() + max_sleep, 0
    while rests < 2 and monotonic() < end:
        used = process_time()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        await asyncio.sleep(REST_SECONDS)
        rests = rests + 1 if process_time() - used < IDLE_SECONDS else 0


def strips(screen: Screen[Any]) -> list[Strip]:
    """Return what a terminal gets of a screen, line by line."""
    return screen._compositor.render_strips()[: screen.app.size.height]


class Signer:
    """Keeps what it was told, and answers as it was bent to."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, str, dict[str, Any], str]] = []
        self.federations: list[str] = []
        self.refusal: FedSiloError | None = None
        self.result: dict[str, Any] = {"state": "sent", "given": ["alice"], "needed": 1, "record": 72, "audit_size": 75}

    def carry_out(self, person: Person, name: str, arguments: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
        self.commands.append((person.name, name, dict(arguments), request_id))
        self.federations.append(person.operator.federation)
        if self.refusal is not None:
            raise self.refusal
        if name == "approvals.reject":
            return {"release": arguments["release"], "state": "rejected", "record": 72, "audit_size": 75}
        return {**({"release": arguments["release"]} if "release" in arguments else {}), **self.result}


class Desk:
    """A console, its keyboard and its clock."""

    def __init__(self, app: FedConsole, pilot: Pilot[None], signer: Signer, time: list[float]) -> None:
        self.app, self.pilot, self.signer, self._time = app, pilot, signer, time

    @property
    def now(self) -> float:
        return self._time[0]

    def pass_time(self, seconds: float) -> None:
        """The clock alone moves, as in suspend: nothing that waits for it is told."""
        self._time[0] += seconds

    async def wait(self, seconds: float) -> None:
        self.pass_time(seconds)
        self.app.settle_keys()
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        """Like a person: half a second between keys."""
        for key in keys:
            await self.wait(0.5)
            await self.pilot.press(key)
        await self.wait(0.1)

    async def show(self, state: dict[str, Any] | Snapshot, **more: Any) -> None:
        snapshot = state if isinstance(state, Snapshot) else live(state, at=self._time[0], **more)
        self.app.post_message(Arrived(snapshot))
        await self.pilot.pause()

    async def answer(self, key: str, value: Any, refused: tuple[str, str] | None = None) -> None:
        """The daemon answered what a screen wanted under `key`, or refused to."""
        before, now = self.app.snapshot, self._time[0]
        answers = dict(before.answers) if refused else {**before.answers, key: value}
        await self.show(
            replace(
                before, answers=answers, answered_at={**before.answered_at, **({} if refused else {key: now})},
                link=replace(before.link, received_at=now),
                refused={**before.refused, key: refused} if refused else
                {name: told for name, told in before.refused.items() if name != key},
            )
        )  # fmt: skip

    async def resize(self, width: int, height: int) -> None:
        """Give the terminal another size; return once the screen has it, for which the application has a timer."""
        await self.pilot.resize_terminal(width, height)
        while self.app.screen.outer_size != (width, height):
            await self.pilot.pause()
        await self.pilot.pause()

    async def open(self, screen: FedScreen) -> None:
        self.app.open_below(screen)
        await self.pilot.pause()

    def unlock(self, person: str = "alice", site: str = "hospital_a") -> None:
        self.app.signing.person = Person(person, Operator(site, Path("none.crt"), Path("none.key")))
        self.app.signing.last_input = self._time[0]

    async def answers_sent(self) -> list[tuple[str, str, dict[str, Any], str]]:
        await self.app.workers.wait_for_complete()
        await self.pilot.pause()
        return self.signer.commands

    @property
    def text(self) -> str:
        """What stands on the screen, line by line."""
        return "\n".join("".join(segment.text for segment in strip) for strip in strips(self.app.screen))

    @property
    def words(self) -> str:
        """What stands on the screen, without frames and with single spaces."""
        return " ".join(self.text.translate(FRAMES).split())

    def shows(self, *facts: str, lacks: Sequence[str] = ()) -> None:
        """Raise AssertionError unless all of these stand on the screen, and none of `lacks`."""
        words = self.words
        assert [fact for fact in facts if fact not in words] == [], words
        assert [fact for fact in lacks if fact in words] == [], words

    def is_harmless(self) -> None:
        """Raise AssertionError: there is a character that a terminal obeys or hides (T37)."""
        assert [one for one in self.text if not (one.isprintable() or one == "\n")] == []

    @property
    def footer(self) -> str:
        return self.text.splitlines()[-1]

    async def go(self, typed: str) -> None:
        """Type it after `:`."""
        await self.press("colon", *("space" if one == " " else one for one in typed), "enter")
        await self.pilot.pause()

    async def sends(self, *keys: str) -> list[tuple[str, str, dict[str, Any], str]]:
        """Press these keys; return all commands that were signed until then."""
        for key in keys:
            await self.press(key)  # what the key before opened rests a moment
        return await self.answers_sent()


@asynccontextmanager
async def console(size: tuple[int, int] = (80, 24), **options: Any) -> AsyncIterator[Desk]:
    time, signer = [100.0], Signer()
    app = FedConsole(
        signer=signer, clock=lambda: time[0], driven_by_hand=True, waits_for="/run/control.sock", **options
    )
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield Desk(app, pilot, signer, time)


async def open_dialog(desk: Desk, key: str = "A", state: dict[str, Any] | None = None) -> None:
    desk.unlock()
    await desk.show(state or silo(release()))
    await desk.press("enter")
    assert isinstance(desk.app.screen, ApprovalScreen)
    await desk.show(state or silo(release()))
    await desk.press(key)


async def type_word(desk: Desk, word: str) -> None:
    """As quick hands do: before the view that it is about is stale."""
    for key in word:
        desk.pass_time(0.05)
        await desk.pilot.press(key)
    await desk.pilot.pause()


async def answer_it(desk: Desk, word: str = DIGEST[-4:]) -> list[tuple[str, str, dict[str, Any], str]]:
    """Type the word into the open dialog and press its button; what was signed until then."""
    await type_word(desk, word)
    return await desk.sends(*(("tab",) if word == DIGEST[-4:] else ("tab", "tab")), "enter")
