"""The demo's recording goes through its scenes by itself, and closes; nothing of it claims to be live."""

from __future__ import annotations

import asyncio

from console.app import Arrived
from console.feed import Feed
from console.playing import RECORDING, STEPS, PlayedConsole
from console.replay import Replay
from console.screens.approval import ApprovalScreen
from console.screens.confirm import TextDialog

WAIT_SECONDS = 20
DURATION_SECONDS = 30.0


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
            assert "REPLAY" in app.snapshot.link.told and app.snapshot.held
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
    finally:
        feed.stop()
