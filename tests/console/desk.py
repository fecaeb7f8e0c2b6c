"""A console driven by hand: keyboard, clock, the daemon's snapshots, and a signer that keeps what it was told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from console.app import FedConsole
from console.base import Arrived, FedScreen
from console.feed import Person
from console.screens.approval import ApprovalScreen
from fedsilo.control.client import Operator
from fedsilo.protocol.errors import FedSiloError
from fedsilo.views.state import Snapshot
from tests.console.states import live, release, silo

SIZES = [(80, 24), (140, 42)]


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
        height = self.app.size.height
        lines = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip) for strip in lines[:height])


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
