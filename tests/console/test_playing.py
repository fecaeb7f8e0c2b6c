"""The demo's recording goes through its scenes by itself, and closes; nothing of it claims to be live."""

from __future__ import annotations

import asyncio

import pytest
from textual.pilot import Pilot

from console.base import Arrived, TextDialog
from console.feed import Feed
from console.recording import Replay
from console.screens.approval import ApprovalScreen
from fedsilo.demo.playing import OVER, RECORDING, STEPS, PlayedConsole, play
from fedsilo.protocol.errors import NotFoundError

WAIT_SECONDS = 20
DURATION_SECONDS = 30.0


@pytest.mark.slow
async def test_it_goes_through_its_scenes_and_closes() -> None:
    assert RECORDING.stat().st_size < 500_000 and b"/tmp/" not in RECORDING.read_bytes()
    time = [0.0]
    replay = Replay(RECORDING, clock=lambda: time[0])
    assert round(replay.duration) == DURATION_SECONDS
    app = PlayedConsole(replay=replay, read_only=True, driven_by_hand=True)
    feed = Feed(lambda: replay, lambda snapshot: app.post_message(Arrived(snapshot)) and None)
    feed.start()
    seen: list[str] = []
    try:
        async with app.run_test(size=(112, 36)) as pilot, asyncio.timeout(WAIT_SECONDS):
            while app.snapshot.state is None:
                await pilot.pause(0.05)
            assert "REPLAY" in app.snapshot.link.banner and app.snapshot.held
            for step in STEPS:
                time[0] = step.at
                app.play_on()
                await pilot.pause()
                await pilot.pause()
                seen.append(type(app.screen).__name__ if not isinstance(app.screen, TextDialog) else "finding")
            assert isinstance(app.screen_stack[-1], type(app.top)) and app.top.called == "outbox"
            assert seen[:3] == [ApprovalScreen.__name__, "finding", ApprovalScreen.__name__]
            feed.read_now()
            while app.snapshot.held:
                await pilot.pause(0.05)
                feed.read_now()
            time[0] = replay.duration
            app.play_on()
            await pilot.pause()
            app.play_on()
            await pilot.press("j", "5")  # other keys look around in the last frame
            drawn = "".join(part.text for strip in app.screen._compositor.render_strips() for part in strip)
            assert OVER in " ".join(drawn.split()) and app.is_running and app.top.called == "outbox"
            await pilot.press("enter")
            assert not app.is_running
    finally:
        feed.stop()


def test_a_recording_whose_console_asked_for_all_records_answers_without_control_messages_too() -> None:
    replay = Replay(RECORDING, clock=lambda: 0.0)
    replay.seek(replay.duration)
    whole, shown = (replay.query("audit", {"limit": 100, **more}) for more in ({}, {"control": False}))
    kinds = {record.get("kind", "") for record in whole["records"]}
    assert any(kind.startswith("control.") for kind in kinds)
    assert shown["size"] == whole["size"] and shown["records"] == [
        record for record in whole["records"] if not record.get("kind", "").startswith("control.")
    ]
    with pytest.raises(NotFoundError, match="not in this recording"):
        replay.query("audit", {"limit": 7, "control": False})


async def test_enter_leaves_only_once_it_is_over() -> None:
    replay = Replay(RECORDING, clock=lambda: 0.0)
    app = PlayedConsole(replay=replay, read_only=True, driven_by_hand=True)
    async with app.run_test() as pilot:
        await pilot.press("space", "enter")
        assert app.is_running and app.message_lines(200) == []


def test_after_it_the_terminal_says_what_was_shown_and_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    async def leave(pilot: Pilot[None]) -> None:
        pilot.app.exit()

    play(headless=True, auto_pilot=leave)
    told = capsys.readouterr()
    assert told.out == "" and "nothing was run" in told.err and "fedsilo demo --leak" in told.err
