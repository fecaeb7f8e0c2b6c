"""A release's dialogs and its facts below a low screen: nothing is offered before all that it is about can be seen."""

from __future__ import annotations

from typing import Any

import pytest
from textual.screen import Screen

from console.dialogs import AskingDialog
from console.screens.approval import ApprovalScreen
from tests.console.desk import SIZES, console, type_word
from tests.console.test_T36_approving import DESTINATION, noticed, opened


@pytest.mark.parametrize("key", ["A", "R", "D", "v"])
async def test_a_dialog_is_never_seen_without_its_effect(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[str] = []
    drawn = Screen._compositor_refresh

    def kept(screen: Any) -> None:
        drawn(screen)
        if isinstance(screen, AskingDialog):
            frames.append("\n".join("".join(part.text for part in row) for row in screen._compositor.render_strips()))

    monkeypatch.setattr(Screen, "_compositor_refresh", kept)
    async with console() as desk:
        await opened(desk, noticed(), key)
        assert frames and all("Effect: " in frame and "Signed by alice." in frame for frame in frames)


async def test_a_no_names_what_leaves_and_where_to_in_a_low_terminal_too() -> None:
    async with console() as desk:
        await opened(desk, noticed(), "R")
        words = " ".join(desk.text.split())
        assert "lora.factors 1.9 MiB to coordinator hub of cardio-net" in words and "OTHER see the note" in words
        assert "Reject" in words.rpartition("optional text")[2]  # and the button is there still


@pytest.mark.parametrize("size", SIZES)
async def test_T36_what_leaves_unasked_after_a_yes_stands_on_the_screen_and_in_its_dialog(
    size: tuple[int, int],
) -> None:
    later = "lora.factors of rounds 2 to 4 LEAVES UNASKED (site.yaml:7)"
    for told in (later, ""):
        async with console(size) as desk:
            await opened(desk, noticed(consequences={"approve": "sent once", "reject": "no", "later": told}))
            assert ("LEAVES UNASKED (site.yaml:7)" in desk.text) is bool(told)
            await desk.press("A")
            assert isinstance(desk.app.screen, AskingDialog)
            dialog = "".join(text for row in desk.app.screen.what(70) for text, _ in row)  # type: ignore[attr-defined]
            assert (later in dialog) is bool(told) and ("UNASKED" in desk.text) is bool(told)


async def test_while_facts_are_below_the_screen_it_says_so_until_they_were_read() -> None:
    many = [{**DESTINATION, "id": f"NEW_DESTINATION-{index}"} for index in range(9)]
    async with console() as desk:
        await opened(desk, noticed(*many))
        assert "j more below" in desk.text and "? Help" in desk.text and "goes on without it" not in desk.text
        for _ in range(30):
            await desk.press("j")
        assert "more below" not in desk.text and "p Policy" in desk.text
    async with console() as desk:
        await opened(desk, noticed())
        assert "more below" not in desk.text


async def test_what_is_read_is_cut_anew_when_the_terminal_changes_its_size() -> None:
    seen = []
    for size in ((60, 16), (100, 30)):
        async with console(size) as desk:
            await opened(desk, noticed(DESTINATION), "f")
            await desk.pilot.resize_terminal(60, 16)
            await desk.pilot.pause()
            assert "What it means" in desk.text
            seen.append([row for row in desk.text.splitlines() if "│" in row])
    assert seen[0] == seen[1]


async def test_what_was_answered_here_can_still_be_read() -> None:
    async with console() as desk:
        await opened(desk, noticed(), "R")
        await type_word(desk, "timing")
        await desk.press("tab", "tab", "enter")
        await desk.answers_sent()
        assert "esc Back  n Next  h History  d Diff  p Policy  ? Help" in desk.text


async def test_how_it_ended_is_asked_until_it_was_told_and_nothing_that_stayed_is_counted() -> None:
    async with console() as desk:
        state = noticed(budget="DP off; round 3K->347K of 478K 73 %; sets 0->1 of 1 100 %")
        await opened(desk, state)
        assert "3K->347K" in desk.text
        gone = noticed()
        await desk.show({**gone, "held": []})
        screen = desk.app.screen
        assert isinstance(screen, ApprovalScreen) and screen.wants() and "3K->347K" in desk.text
        given = [{"person": "bob", "verdict": "reject", "reason": "TIMING"}]
        told = {**state["held"][0], "state": "rejected"}
        await desk.answer("approval", {**told, "approvers": {"needed": 1, "roles": ["approver"], "given": given}})
        assert "then rejected by bob" in " ".join(desk.text.split()) and not screen.wants()
        assert "3K->347K" not in desk.text and "it did not leave" in desk.text
        assert "h History  d Diff  p Policy" in desk.text
