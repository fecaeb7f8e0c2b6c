"""What an operator reads and where keys lead: a near match whole, who answered elsewhere, the cause of a lost link,
names that keep their ends, and fields that throw nothing away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from benchmarks.release_cases import cases
from benchmarks.release_cases import site as made
from benchmarks.release_site import DeskSource
from console.base import TextDialog
from console.dialogs import ConfirmDialog
from console.feed import Person, Store
from console.lock import KeyFiles, Signing
from console.screens.approval import ApprovalScreen
from console.screens.overview import OverviewScreen
from console.table_screen import FilterLine, TablePane
from fedsilo.control.client import Operator
from fedsilo.protocol.errors import ConflictError
from fedsilo.views import conditions
from fedsilo.views.lines import UNICODE, fit_ends, to_text
from fedsilo.views.releases import payload_lines
from tests.console.desk import console, open_dialog, type_word
from tests.console.states import NOW, live, release, silo
from tests.console.test_audit_screen import Log, answer_all, opened

# ---- a near match -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def near_match(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The planted one of `benchmarks.releases`, held by a real guard with real screens, as a console reads it."""
    (case,) = (case for case in cases() if case.name == "near-match")
    held_at = made(tmp_path_factory.mktemp("near"), "release-01", 7)
    try:
        case.make(held_at)
        held_at.show()
        reading = DeskSource(held_at.desk).snapshot()
    finally:
        held_at.close()
    store = Store()
    store.read(reading, 100.0, wall_time=NOW)
    return store.snapshot


@pytest.mark.parametrize("told", ["", "REPLAY 00:05 of 02:00 x1, 2026-12-01 10:00:00Z, WITH LOCAL DATA"])
async def test_a_near_match_is_read_whole_from_the_screen_alone(near_match: Any, told: str) -> None:
    async with console(read_only=True) as desk:
        snapshot = replace(near_match, skew_seconds=0.0, link=replace(near_match.link, told=told))
        await desk.show(snapshot)
        await desk.press("enter")
        flat = " ".join(desk.text.split())
        assert (
            "HIT overlap/ngram: row" in flat and "private text, counted overlap/ngram" in flat and "allowed 0" in flat
        )
        await desk.press("f")
        assert isinstance(desk.app.screen, TextDialog) and desk.app.screen.box.max_scroll_y == 0
        flat = " ".join(desk.text.replace("│", " ").split())
        for fact in ("a private record of this site", "overlap/ngram", "to public prompt", "Allowed: no answer",
                     "What would pass:", "What to do:"):  # fmt: skip
            assert fact in flat, fact
        assert ("The payload is in no" in flat) is bool(told)
        await desk.press("escape", "v")
        flat = " ".join(desk.text.split())
        assert ("The payload is in no" in flat and "f reads each finding" in flat) is bool(told), flat


# ---- names and causes -------------------------------------------------------------------------------


def test_a_tensors_name_keeps_its_end_at_80_columns() -> None:
    name = "base_model.model.model.layers.11.mlp.gate_proj.lora_A.weight"
    bars = {"negative": [1] * 9, "zero": 0, "positive": [1] * 9, "not_finite": 0}
    others = [name.replace("11.mlp.gate_proj.lora_A", f"{number}.self_attn.q_proj.lora_B") for number in range(3)]
    tensor = {"name": name, "shape": [16, 896], "type": "float32", "norm": "0.0312", "histogram": bars}
    shown = {"kind": "lora.factors", "tensors": [tensor], "tensors_total": 1}
    (row,) = (text for text in to_text(payload_lines(shown, 76, UNICODE)).splitlines() if "16x896" in text)
    assert "lora_A.weight" in row and row.startswith("bas") and len(row) <= 76
    tensors = [{**tensor, "name": one} for one in (name, *others)]
    text = to_text(payload_lines({**shown, "tensors": tensors}, 76, UNICODE))
    assert "11.mlp.gate_proj.lora_A " in text and "0.self_attn.q_proj.lora_B" in text
    assert "begins with base_model.model.model.layers. and ends in .weight; each is of type float32" in " ".join(
        text.split()
    )
    assert fit_ends("abcdef", 6) == "abcdef" and fit_ends("abcdefghij", 7) == "ab…ghij" and fit_ends("abc", 1) == "…"


@pytest.mark.parametrize("cells", [60, 80, 140])
def test_of_a_lost_link_the_cause_comes_first_however_long_its_path(cells: int) -> None:
    for path in ("/run/fedsilo/a.sock", "/srv/sites/hospital_a/" + "deep/" * 30 + "control.sock"):
        snapshot = live(silo())
        cause = f"cannot reach {path}: nothing listens there"
        link = replace(snapshot.link, state="disconnected", cause=cause, hint="silo start", retry_at=104.0)
        rows = conditions.condition_lines(
            replace(snapshot, link=link), 100.0, cells, opened_at=100.0, waits_for="the daemon", below_at=93.0
        )  # fmt: skip
        text = " ".join(to_text(rows).split())
        assert len(rows) <= 2 and "below as of 00:07 ago" in text
        assert text.startswith("DISCONNECTED: cannot reach /") and "r tries now" in text
        assert cells < 80 or ("nothing listens there" in text and path[-6:] in text), text


# ---- answered elsewhere -----------------------------------------------------------------------------


async def test_who_answered_at_another_console_is_told_and_its_keys_go() -> None:
    async with console() as desk:
        desk.signer.refusal = ConflictError("release r1/hospital_a/0 is rejected, no longer held", code="NOT_HELD")
        await open_dialog(desk, "R")
        await type_word(desk, "OTHER")
        await desk.press("tab", "tab", "enter")
        assert len(await desk.answers_sent()) == 1
        assert "NOT_HELD" in desk.text and "approval" not in desk.app.wanted
        await desk.show(silo())
        assert desk.app.wanted["approval"] == ("approval", {"release": "r1/hospital_a/0"})
        assert "no longer held" in desk.text
        given = [{"person": "alice", "verdict": "reject", "reason": "CONTENT"}]
        over = release(state="rejected", approvers={"needed": 1, "roles": ["approver"], "given": given})
        await desk.answer("approval", {**over, "digest": "0" * 64})
        assert "said no" not in desk.text and "no longer held" in desk.text  # of other bytes
        await desk.answer("approval", over)
        flat = " ".join(desk.text.split())
        assert "then rejected by alice" in flat and "rejected by alice; nothing can be answered" in flat
        assert "alice said no: CONTENT" in flat and "no longer held" not in desk.text.splitlines()[2]
        footer = desk.text.splitlines()[-1]
        assert "Approve" not in footer and "Reject" not in footer and "esc Back" in footer


async def test_while_disconnected_the_footer_offers_no_answer() -> None:
    async with console() as desk:
        desk.unlock()
        await desk.show(silo(release()))
        await desk.press("enter")
        assert "R Reject" in desk.text.splitlines()[-1]
        link = replace(
            desk.app.snapshot.link, state="disconnected", cause="nothing listens there", retry_at=desk.now + 4
        )
        await desk.show(replace(desk.app.snapshot, link=link))
        footer = desk.text.splitlines()[-1]
        assert "Reject" not in footer and "r Try now" in footer and "DISCONNECTED: nothing" in desk.text


@pytest.mark.parametrize(("site", "said"), [("consortium", "carol is a person of consortium, not of this site"),
                                            ("hospital_a", "")])  # fmt: skip
def test_a_person_of_elsewhere_stays_locked_at_a_silo(monkeypatch: pytest.MonkeyPatch, site: str, said: str) -> None:
    person = Person("carol", Operator(site, Path("c.crt"), Path("c.key")))
    monkeypatch.setattr("console.lock.unlock", lambda certificate, key: person)
    signing = Signing(object(), KeyFiles(Path("c.crt"), Path("c.key")), "", False, lambda: 1.0)  # type: ignore[arg-type]
    told = signing.toggle("hospital_a")
    assert (said in told) if said else not told
    assert signing.lock.open is not bool(said) and (not said or said == _refused_at_R(person))


def _refused_at_R(person: Person) -> str:
    signing = Signing(object(), None, "", False, lambda: 1.0, person=person)  # type: ignore[arg-type]
    return signing.why_not("hospital_a")


# ---- fields and keys --------------------------------------------------------------------------------


async def test_after_a_word_that_came_too_fast_Tab_and_Enter_do_not_throw_the_note_away() -> None:
    async with console() as desk:
        await open_dialog(desk, "R")
        await desk.pilot.press(*"OTHER")  # in a burst
        await desk.press("tab")
        await desk.press(*"seen")
        await desk.show(silo(release()))
        await desk.press("tab", "enter")
        dialog = desk.app.screen
        assert isinstance(dialog, ConfirmDialog) and dialog.query_one("#word").has_focus
        assert "faster than hands" in " ".join(desk.text.split())
        assert dialog.query_one("#reason", Input).value == "seen" and await desk.answers_sent() == []
        await desk.show(silo(release()))
        await type_word(desk, "OTHER")
        await desk.press("tab", "tab", "enter")
        ((_, _, arguments, _),) = await desk.answers_sent()
        assert (arguments["reason_code"], arguments["reason"]) == ("OTHER", "seen")


async def test_a_note_that_was_not_signed_is_there_in_the_next_dialog() -> None:
    async with console() as desk:
        await open_dialog(desk, "R")
        await desk.press("tab")
        await desk.press(*"why")
        await desk.press("escape")
        assert isinstance(desk.app.screen, ApprovalScreen) and "R has your note still" in desk.text
        await desk.show(silo(release()))
        await desk.press("R")
        assert desk.app.screen.query_one("#reason", Input).value == "why"
        await desk.press("escape")
        await desk.show(silo(release()))
        await desk.press("A", "tab")  # the button is off: it stays in the field
        assert desk.app.screen.query_one("#word").has_focus


async def test_escape_goes_from_a_record_to_the_list_and_only_then_out() -> None:
    async with console() as desk:
        log = Log(1000)
        screen = await opened(desk, log)
        for number in ("950", "118"):
            screen.go_to(number)
            await answer_all(desk, log)
            item = screen.table.selected()
            assert item is not None and item.id == number
            await desk.press("escape")
            await answer_all(desk, log)
            item = screen.table.selected()
            assert desk.app.screen is screen and item is not None and item.id == "999"
        await desk.press("escape")
        assert isinstance(desk.app.screen, OverviewScreen)


async def test_what_is_typed_replaces_a_filter_that_is_there() -> None:
    async with console() as desk:
        await desk.show(silo(release(), release(id="r1/hospital_a/1")))
        await desk.press("3")
        desk.app.screen.query_one(TablePane).filter("lora")
        await desk.press("slash", "x")
        assert desk.app.screen.query_one(FilterLine).value == "x"


@pytest.mark.parametrize("key", ["R", "h"])
async def test_keys_of_a_release_say_on_the_overview_where_they_work(key: str) -> None:
    async with console() as desk:
        for state, told in ((silo(release()), "enter or a opens it"), (silo(), "nothing is held")):
            await desk.show(state)
            await desk.press(key)
            assert isinstance(desk.app.screen, OverviewScreen)
            assert f"{key} is a key of a held release" in desk.text and told in " ".join(desk.text.split())
