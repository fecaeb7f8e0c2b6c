"""Findings on the approval screen, and sources that are no daemon that runs."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

import pytest

from console.feed import Feed
from fedsilo.views.lines import UNICODE
from fedsilo.views.overview import Lock, top_bar
from fedsilo.views.state import Snapshot, why_not_answer
from silo.guard.answers.release import ON_APPROVE, ON_REJECT, STAYS
from tests.console import states
from tests.console.desk import SIZES, console
from tests.console.states import POLICY_DIGEST, RULES, Reading, release, rule, silo

LOOKS = (
    "NEW destination 198.51.100.23:7443; round 2 went to coordinator.example:7443",
    "far end's certificate CHANGED since round 2, cb86->59a0",
)


def with_looks(*says: str) -> dict[str, Any]:
    """A held release in which the daemon noticed these."""
    looks = [rule("new destination", text, None, "look") for text in says]
    noticed = [{"id": f"X-{place}", "code": "X", "says": text} for place, text in enumerate(says)]
    leaves = release()["leaves"] | {"stays": list(STAYS)}
    return release(
        leaves=leaves,
        noticed=noticed,
        consequences={"approve": ON_APPROVE, "reject": ON_REJECT},
        policy={"name": "pubswap", "digest": POLICY_DIGEST, "rules": [*looks, *RULES]},
        budget="DP off; round 0->33K of 124K 27 %; day 68K->101K of 352K 29 %; sets 0->1 of 2 50 %",
        difference="+0 bytes against round 2 of this run; L2 0.162->0.155 -4 %; cosine -0.02; form, base, policy same",
    )


@pytest.mark.parametrize("size", SIZES)
async def test_findings_come_first_and_all_facts_fit_without_scrolling(size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await desk.show(silo(with_looks(*LOOKS)))
        await desk.press("enter")
        lines = desk.text.splitlines()
        first = next(index for index, text in enumerate(lines) if "look NEW destination" in text)
        assert f"FINDINGS {len(LOOKS)} not opened" in lines[first - 1]
        assert first < next(index for index, text in enumerate(lines) if "1.9 MiB" in text)
        assert "look far end's certificate CHANGED since round 2" in desk.text and "2 look" in desk.text
        assert desk.app.screen.query_one("#body").max_scroll_y == 0
        for fact in ("DP off", "of 352K 29", "L2 0.162->0.155", "cosine -0.02", "policy same", "approve", "reject"):
            assert fact in desk.text


async def test_a_release_without_findings_has_none() -> None:
    async with console() as desk:
        await desk.show(silo(with_looks()))
        await desk.press("enter")
        assert "FINDINGS" not in desk.text and "0 look" in desk.text


@pytest.mark.parametrize("banner", ["REPLAY 00:00 of 01:59 x1, 2027-01-15 08:40:03Z, WITH LOCAL DATA", "REPLAY"])
async def test_what_is_read_in_place_of_a_daemon_is_never_called_live(banner: str) -> None:
    async with console() as desk:
        desk.unlock()
        await desk.show(silo(release()))
        assert "live" in desk.text.splitlines()[0]
        told = replace(desk.app.snapshot, link=replace(desk.app.snapshot.link, told=banner))
        (held,) = told.held
        now = told.link.received_at
        assert why_not_answer(held, desk.app.snapshot, now, approve=True) == ""
        assert why_not_answer(held, told, now, approve=True).endswith("nothing can be changed")
        for cells in (60, 80, 140):
            bar = "".join(text for text, _ in top_bar(told, Lock(read_only=True), now, cells, UNICODE))
            assert banner.split(" ")[0].strip(",") in bar and "live" not in bar and "READ-ONLY" in bar
            assert ("LOCAL DATA" in bar) == ("LOCAL DATA" in banner) and "hospital_a" in bar and len(bar) <= cells


def test_the_feed_takes_time_and_banner_from_a_source_that_has_them() -> None:
    class Recorded:
        def snapshot(self) -> Reading:
            return Reading(silo(release()))

        def watch(self, since_sequence: int = 0) -> Any:
            return iter(())

        def query(self, name: str, arguments: Any = None) -> Any:
            return {}

        def close(self) -> None: ...

    class Played(Recorded):
        def wall_time(self) -> float:
            return states.NOW

        def banner(self) -> str:
            return "REPLAY 00:01 of 00:02"

    for source, told, in_time in ((Recorded(), "", False), (Played(), "REPLAY 00:01 of 00:02", True)):
        got: queue.Queue[Snapshot] = queue.Queue()
        feed = Feed(lambda source=source: source, got.put)  # type: ignore[misc]
        feed.start()
        try:
            snapshot = got.get(timeout=10.0)
        finally:
            feed.stop()
        assert snapshot.link.told == told
        # The recorded moment is not the one of this test, however long that takes.
        assert (abs(snapshot.skew_seconds) < 1.0) == in_time
