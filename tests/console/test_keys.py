"""Changing keys: not after a screen change, not in a burst."""

from __future__ import annotations

from time import monotonic

import pytest
from textual.events import Key, MouseDown

from console.app import FedConsole
from console.lock import BURST, KeyGate
from console.screens.approval import ApprovalScreen
from tests.console.desk import console
from tests.console.states import release, silo


def press(gate: KeyGate, now: float, name: str = "approve") -> str:
    gate.key(now)
    return gate.offer(name, now)


def test_a_key_that_stands_alone_acts_once() -> None:
    gate = KeyGate()
    assert press(gate, 1.0) == ""
    assert gate.settle(1.03) is None
    assert gate.settle(1.05) == "approve"
    assert gate.settle(1.06) is None


def test_a_pasted_run_of_keys_does_nothing_not_even_the_first() -> None:
    gate = KeyGate()
    for index in range(3):
        press(gate, 1.0 + index * 0.001)
    assert gate.settle(2.0) is None


def test_a_key_right_after_takes_the_offer_back() -> None:
    gate = KeyGate()
    assert press(gate, 1.0) == ""
    gate.key(1.01)
    assert gate.settle(2.0) is None


def test_keys_rest_after_a_screen_change() -> None:
    gate = KeyGate()
    gate.screen_changed(1.0)
    assert "look" in press(gate, 1.39)
    assert gate.settle(2.0) is None
    assert press(gate, 1.44) == ""


def test_what_a_key_right_after_took_back_is_said() -> None:
    gate = KeyGate()
    assert gate.key(1.0) == gate.offer("approve", 1.0) == ""
    assert gate.in_burst(1.01) and gate.key(1.01) == BURST
    assert gate.key(1.02) == ""  # nothing was offered any more
    assert not gate.in_burst(1.2) and gate.key(1.2) == gate.offer("approve", 1.2) == ""
    assert gate.key(1.3) == "" and gate.settle(1.3) == "approve"


async def test_of_a_burst_the_console_says_what_it_did_and_draws_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console() as desk:
        desk.unlock()
        await desk.show(silo(release()))
        await desk.press("enter")
        await desk.wait(1.0)
        await desk.pilot.press("A")
        desk.pass_time(0.01)
        await desk.pilot.press("x")  # no key of this screen, and so none that would say anything
        assert BURST in desk.text
        await desk.wait(1.0)
        await desk.pilot.press("x")
        assert BURST not in desk.text
        drawn: list[int] = []
        redraw = desk.app.redraw

        def counted() -> None:
            drawn.append(1)
            redraw()

        monkeypatch.setattr(desk.app, "redraw", counted)
        for _ in range(60):
            desk.pass_time(0.03)  # as a terminal repeats a key that is held
            await desk.pilot.press("A")
        assert BURST in desk.text and isinstance(desk.app.screen, ApprovalScreen) and len(drawn) == 1


async def test_keys_that_waited_count_from_when_they_were_pressed() -> None:
    clock = [100.0]
    app = FedConsole(clock=lambda: clock[0])
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        for waited in (3.0, 2.0):  # a second apart for the hands, none for the console
            key = Key("x", "x")
            key.time = monotonic() - waited
            await app.on_event(key)
        assert 0.9 < app._keys._last - app._keys._previous < 1.1  # two readings of the clock, and a busy machine
        assert app._pressed_at == app._keys._last < clock[0] - 1.0
        await app.on_event(MouseDown(None, 1, 1, 0, 0, 1, False, False, False))
        assert app._pressed_at is None  # what a click offers was not pressed with the last key
