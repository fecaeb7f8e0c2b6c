"""One release: what is shown of it, what turns its answer off, and that what is signed was shown (threat T36)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from textual import events
from textual.events import Key, MouseDown
from textual.screen import Screen
from textual.widgets import Button, Input

from benchmarks.release_cases import cases
from benchmarks.release_cases import site as made
from benchmarks.release_site import DeskSource
from console.actions import ACTIONS
from console.app import FedConsole
from console.base import TextDialog, drawable
from console.dialogs import TYPED_SECONDS_MIN, ConfirmDialog, DeferDialog, OrderDialog
from console.feed import Person, Store
from console.lock import BURST, IDLE_LOCK_SECONDS, KeyFiles, KeyGate, Signing
from console.screens.approval import ApprovalScreen, ComparisonScreen, PayloadScreen
from console.screens.approvals import HistoryScreen
from console.screens.overview import OverviewScreen
from fedsilo.control.answers import Comparison, Evidence, Finding, HeldPayload, read
from fedsilo.control.client import Operator
from fedsilo.protocol.errors import ConflictError, NotAllowedError
from fedsilo.views.lines import UNICODE, safe, to_text
from fedsilo.views.releases import comparison_lines, finding_lines, payload_lines
from fedsilo.views.rule_words import REJECT_CODES
from tests.console.desk import SIZES, Desk, answer_it, console, open_dialog, strips, type_word
from tests.console.states import DIGEST, NOW, POLICY_DIGEST, RULES, SHOWN, release, rule, silo
from tests.console.test_safe import HOSTILE, TOGETHER


def finding(code: str, says: str, number: int = 0) -> dict[str, Any]:
    evidence = [{"what": "address", "before": "coordinator.example:7443", "now": "198.51.100.23:7443"}]
    return {"id": f"{code}-0a1b2c{number}d", "code": code, "says": says, "outcome": "look", "evidence": evidence}


DESTINATION = finding("NEW_DESTINATION", "NEW destination 198.51.100.23:7443; round 2 went to coordinator.example:7443")
HIT = finding("SCREEN_HIT", "HIT canary: row 3 answer 2", 1)
IDS = [DESTINATION["id"], HIT["id"]]
TICKET = {"ticket": "t1", "record": 80}
PAYLOAD: dict[str, Any] = {
    "release": "r1/hospital_a/0", "kind": "public.responses", "bytes": 188_000, "sha256": DIGEST,
    "answers": [
        {"row": 3, "prompt": "Sort 3 1 2.\nUse one line.", "answers": ["1 2 3", "\x1b]0;owned\x07 \u202e 12"]},
        {"row": 99, "prompt": None, "answers": ["12"]},
    ],
}  # fmt: skip
TENSORS: dict[str, Any] = {
    "kind": "lora.factors", "bytes": 1_992_294, "sha256": DIGEST, "edges": [1e-3, 1e-2, 1e-1], "tensors_total": 4,
    "tensors": [{
        "name": "layers.0.lora_A", "shape": [16, 896], "type": "float32", "norm": "0.0312",
        "histogram": {"negative": [0, 5, 10], "zero": 3, "positive": [10, 1, 0], "not_finite": 2},
    }],
}  # fmt: skip
COMPARED: dict[str, Any] = {
    "release": "r1/hospital_a/0", "kind": "lora.factors",
    "against": {"run": "run-1", "round": 2, "at": "2026-12-01T08:00:00Z", "approved_by": ["bob"]},
    "rows": [
        {"what": "rank", "before": 16, "now": 16, "differs": False},
        {"what": "sha256", "before": "cd" * 32, "now": DIGEST, "differs": True},
    ],
    "tensors": [{"name": "layers.0.lora_A", "before": 0.1, "now": 0.3, "times": 3.0},
                {"name": "layers.1.lora_A", "before": None, "now": 0.3, "times": None}],
    "tensors_total": 42, "note": "",
}  # fmt: skip
REJECTED = [{"person": "alice", "verdict": "reject", "reason": "TIMING"}]


def noticed(*found: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A silo that holds a release of which this was found."""
    looks = [rule(one["code"].lower(), one["says"], None, "look") for one in found]
    policy = {"name": "pubswap", "digest": POLICY_DIGEST, "rules": [*looks, *RULES]}
    return silo(release(**{"noticed": list(found), "policy": policy, **changes}))


def given(*people: str, needed: int = 2) -> dict[str, Any]:
    answers = [{"person": person, "verdict": "approve"} for person in people]
    return {"needed": needed, "roles": ["approver"], "given": answers}


async def opened(desk: Desk, state: dict[str, Any], *keys: str) -> ApprovalScreen:
    """On the release's screen, unlocked, with a state that is not old."""
    desk.unlock()
    await desk.show(state)
    await desk.press("enter")
    for key in keys:
        await desk.press(key)
        await desk.show(state)
    assert isinstance(desk.app.top, ApprovalScreen)
    return desk.app.top


def button(desk: Desk) -> Button:
    return desk.app.screen.query_one("#confirm", Button)


def field(desk: Desk, name: str = "word") -> Input:
    return desk.app.screen.query_one(f"#{name}", Input)


# ---- findings ---------------------------------------------------------------------------------------


async def test_T36_A_is_off_until_each_finding_was_opened_and_what_is_signed_names_them() -> None:
    state = noticed(DESTINATION, HIT)
    (twin,) = (action.twin for action in ACTIONS if action.name == "approve")
    assert twin is not None
    async with console() as desk:
        await opened(desk, state, "A", "A")
        desk.shows("2 findings not opened")
        await desk.press("enter")
        desk.shows(IDS[0], "before coordinator")
        await desk.press("escape")
        await desk.show(state)
        words = twin(desk.app.top.context())
        assert words[-2:] == ("--ack-finding", IDS[0]) and IDS[1] not in words and f"sha256:{DIGEST}" in words
        await desk.press("A")
        desk.shows("1 finding not opened")
        await desk.press("f")
        desk.shows(IDS[1])
        for place in ("1 of 2", "2 of 2"):
            await desk.press("escape", "f")
            desk.shows(f"finding {place}")
        await desk.press("escape")
        await desk.show(state)
        await desk.press("A")
        ((_, name, arguments, _),) = await answer_it(desk)
        assert name == "approvals.approve" and arguments["acknowledged"] == IDS


@pytest.mark.slow
async def test_T36_a_changed_view_is_opened_anew_and_a_no_needs_nothing_opened() -> None:
    async with console() as desk:
        assert (await opened(desk, noticed(DESTINATION), "f", "escape")).opened == {IDS[0]}
        await desk.press("escape")
        assert (await opened(desk, noticed(DESTINATION, revision=2), "R")).opened == frozenset()
        assert [name for _, name, _, _ in await answer_it(desk, "CONTENT")] == ["approvals.reject"]
        await desk.press("escape")
        await opened(desk, noticed(revision=3), "f")
        desk.shows("nothing unusual was found")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "policy"),
    [
        (noticed(DESTINATION, HIT), POLICY_DIGEST),
        (noticed(DESTINATION, digest="0" * 64), POLICY_DIGEST),
        (noticed(DESTINATION), "1" * 64),
        (silo(), POLICY_DIGEST),
    ],
    ids=["found later", "payload", "policy", "gone"],
)
async def test_T36_a_change_behind_an_open_dialog_turns_its_button_off(changed: dict[str, Any], policy: str) -> None:
    async with console() as desk:
        await opened(desk, noticed(DESTINATION), "f", "escape", "A")
        await type_word(desk, DIGEST[-4:])
        await desk.show(noticed(DESTINATION))
        assert isinstance(desk.app.screen, ConfirmDialog) and not button(desk).disabled
        await desk.show(changed, policy_digest=policy)
        assert button(desk).disabled
        desk.app.screen.confirm()  # whatever pressed it
        assert await desk.answers_sent() == []
        await desk.press("escape", "A", "R")
        assert isinstance(desk.app.screen, ApprovalScreen) or changed["held"]


def test_a_long_finding_is_whole() -> None:
    evidence = tuple(Evidence(f"screen {number}", "", f"row {number} answer 1") for number in range(40))
    text = to_text(finding_lines(Finding("X-1", "UNKNOWN", "look", "word " * 200, evidence), "1 of 1", 60))
    assert text.count("word") == 200 and "row 39 answer 1" in text and "does not know this kind" in text
    assert max(map(len, text.splitlines())) <= 60


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


@pytest.mark.slow
@pytest.mark.parametrize("told", ["", "REPLAY 00:05 of 02:00 x1, 2026-12-01 10:00:00Z, WITH LOCAL DATA"])
async def test_a_near_match_is_read_whole_from_the_screen_alone(near_match: Any, told: str) -> None:
    async with console(read_only=True) as desk:
        await desk.show(replace(near_match, skew_seconds=0.0, link=replace(near_match.link, banner=told)))
        await desk.press("enter")
        desk.shows("HIT overlap/ngram: row", "private text, counted overlap/ngram", "allowed 0")
        await desk.press("f")
        assert isinstance(desk.app.screen, TextDialog) and desk.app.screen.box.max_scroll_y == 0
        desk.shows("a private record of this site", "to public prompt", "Allowed:", "What would pass:", "What to do:")
        assert ("The payload is in no" in desk.words) is bool(told)
        await desk.press("escape", "v")
        assert ("The payload is in no" in desk.words and "f reads each finding" in desk.words) is bool(told)


# ---- what is on the screen ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
async def test_all_facts_of_a_release_with_a_finding_stand_on_one_screen(size: tuple[int, int]) -> None:
    """In the longest lengths that a guard writes."""
    leaves = release()["leaves"]
    kinds = [{**leaves["kinds"][0], "items": ", ".join(["32 tensors, rank 8"] * 9)}]
    difference = "+0 bytes against round 1 of this run; L2 0.166->0.166 +0 %; cosine 0.00; cert to 2027-01-22"
    uses = "round 0->33K of 124K 27 %; day 34K->97K of 352K 28 %"
    state = noticed(DESTINATION, leaves={**leaves, "kinds": kinds}, uses=uses, difference=difference)
    async with console(size) as desk:
        screen = await opened(desk, state, "f", "escape")
        assert screen.query_one("#body").max_scroll_y == 0 and screen.why_not(approve=True) == ""
        desk.shows("NEW destination", "cert to 2027-01-22", "day 34K->97K of 352K 28 %", "the quorum is met")
        assert desk.footer.startswith(" A Approve…") and "Unlock" not in desk.footer and "? Help" in desk.footer
        desk.app.signing.person = None
        await desk.show(state)
        assert desk.footer.startswith(" L Unlock") and "A Approve…" in desk.footer and "? Help" in desk.footer


@pytest.mark.slow
async def test_while_facts_are_below_the_screen_it_says_so_until_they_were_read() -> None:
    many = [{**DESTINATION, "id": f"NEW_DESTINATION-{index}"} for index in range(9)]
    async with console() as desk:
        await opened(desk, noticed(*many))
        assert "j more below" in desk.footer
        await desk.press(*["j"] * 30)
        assert "more below" not in desk.footer
        await desk.press("escape")
        await opened(desk, noticed())
        assert "more below" not in desk.footer


@pytest.mark.parametrize("key", ["A", "R", "D", "v"])
async def test_a_dialog_is_never_seen_without_its_effect(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[str] = []
    drawn = Screen._compositor_refresh

    def kept(screen: Any) -> None:
        drawn(screen)
        if isinstance(screen, OrderDialog):
            frames.append("\n".join("".join(part.text for part in row) for row in strips(screen)))

    monkeypatch.setattr(Screen, "_compositor_refresh", kept)
    later = "lora.factors of rounds 2 to 4 LEAVES UNASKED (site.yaml:7)"
    async with console() as desk:
        await opened(desk, noticed(consequences={"approve": "sent once", "reject": "no", "later": later}), key)
        assert frames and all("Effect: " in frame and "Signed by alice." in frame for frame in frames)
        beside = {"A": ["LEAVES UNASKED"], "R": ["lora.factors 1.9 MiB to coordinator hub", *REJECT_CODES]}
        desk.shows(*beside.get(key, []))


@pytest.mark.slow
async def test_what_is_read_is_cut_anew_when_the_terminal_changes_its_size() -> None:
    seen = []
    for size in ((60, 16), (100, 30)):
        async with console(size) as desk:
            await opened(desk, noticed(DESTINATION), "f")
            await desk.resize(60, 16)
            seen.append([row for row in desk.text.splitlines() if "│" in row])
    assert seen[0] == seen[1] and any("What it means" in row for row in seen[0])


async def test_T37_hostile_text_everywhere_draws_no_control_character() -> None:
    async with console((100, 30)) as desk:
        for text in TOGETHER.values():
            rules = [rule(text, text, text, "look"), rule(text, text, text)]
            held = release(
                **dict.fromkeys(("id", "asked_by", "run", "budget", "findings", "difference", "norm"), text),
                policy={"name": text, "digest": POLICY_DIGEST, "rules": rules},
                approvers={"needed": 2, "roles": [text], "given": [{"person": text, "verdict": "approve"}]},
                leaves={"destination": {"address": text, "certificate": text}, "bytes": 5, "stays": [text],
                        "kinds": [{"kind": text, "items": text, "bytes": 5, "covered_by_epsilon": text}]},
                consequences={"approve": text, "reject": text},
            )  # fmt: skip
            names = ("silo", "federation", "run", "method", "phase", "halted", "dp")
            link = {"address": text, "link": "down", "fault": text}
            left = [{"kind": text, "messages": 1, "bytes": 1}]
            desk.unlock(site=text)
            await desk.show(silo(held, **dict.fromkeys(names, text), left=left, coordinator=link))
            for keys in ((), ("a",), ("p",)):
                await desk.press(*keys)
                desk.is_harmless()
            await desk.press("escape", "escape")


# ---- what turns an answer off ------------------------------------------------------------------------


WHY_NOT = [
    (noticed(), "locked", "LOCKED"),
    (noticed(expires_at=NOW - 1), "", "it expired"),
    (noticed(approvers=given("alice")), "", "nobody counts twice"),
    (noticed(DESTINATION), "", "1 finding not opened"),
    (silo(release(policy={"name": "p", "digest": POLICY_DIGEST, "rules": [rule("L2", 9, 4, "deny")]})), "", "denies"),
    (noticed(digest="not a digest"), "", "approve: "),
    (noticed(), "changed", "CHANGED"),
    (noticed(), "gone", "no longer held"),
    (noticed(), "lost", "disconnected"),
    (noticed(), "", ""),
]


@pytest.mark.slow
async def test_T36_A_says_why_not() -> None:
    async with console() as desk:
        for state, how, why in WHY_NOT:
            await opened(desk, state)
            if how == "locked":
                desk.app.signing.person = None
            elif how:
                await desk.show({"changed": noticed(revision=2), "gone": silo(), "lost": state}[how])
            if how == "lost":
                link = replace(desk.app.snapshot.link, state="disconnected", cause="x", retry_at=desk.now + 4)
                await desk.show(replace(desk.app.snapshot, link=link))
                assert "Reject" not in desk.footer and "r Try now" in desk.footer
            await desk.press("A")
            assert isinstance(desk.app.screen, ConfirmDialog) is not bool(why), why
            assert why.lower() in desk.words.lower() and await desk.answers_sent() == []
            await desk.press("escape", "escape")


async def test_a_read_only_console_offers_no_key_to_unlock() -> None:
    async with console(read_only=True, key_files=KeyFiles(Path("a.crt"), Path("a.key"))) as desk:
        await desk.show(silo(release()))
        await desk.press("enter", "L", "enter", "A", "k")
        assert isinstance(desk.app.screen, ApprovalScreen)
        desk.shows("READ-ONLY", "A Approve…", lacks=["L Unlock"])


@pytest.mark.slow
async def test_T36_A_is_about_the_release_that_is_open_when_rows_move_under_the_cursor() -> None:
    first, second = release(), release(id="r1/hospital_a/1", digest="ab" * 30 + "beef")
    async with console() as desk:
        desk.unlock()
        await desk.show(silo(first, second))
        await desk.press("3", "j")
        await desk.show(silo(release(id="r0/hospital_a/9"), first, second))
        assert desk.app.top.context().release == "r1/hospital_a/1"
        await desk.press("enter")
        await desk.show(silo(second))
        await desk.press("A")
        await desk.show(silo(first))  # the one in the dialog is gone, another stands in its place
        await type_word(desk, DIGEST[-4:])
        assert button(desk).disabled
        await desk.press("escape", "escape", "k")
        await desk.show(silo(first, second))
        await desk.press("j", "enter")
        await desk.show(silo(first, second))
        await desk.press("A")
        await type_word(desk, "beef")
        ((_, _, arguments, _),) = await desk.sends("tab", "enter")
        assert arguments["release"] == "r1/hospital_a/1" and arguments["digest"] == second["digest"]


@pytest.mark.parametrize(("site", "is_here"), [("consortium", False), ("hospital_a", True)])
def test_a_person_of_elsewhere_stays_locked_at_a_silo(
    monkeypatch: pytest.MonkeyPatch, site: str, is_here: bool
) -> None:
    person = Person("carol", Operator(site, Path("c.crt"), Path("c.key")))
    monkeypatch.setattr("console.lock.unlock", lambda certificate, key: person)
    signing = Signing(object(), KeyFiles(Path("c.crt"), Path("c.key")), "", False, lambda: 1.0)  # type: ignore[arg-type]
    assert bool(signing.toggle("hospital_a")) is not is_here and signing.lock.open is is_here
    assert not is_here or (signing.toggle("hospital_a") == "locked" and not signing.lock.open)
    signing = Signing(object(), None, "", False, lambda: 1.0, person=person)  # type: ignore[arg-type]
    assert bool(signing.why_not("hospital_a")) is not is_here


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [IDLE_LOCK_SECONDS - 1, IDLE_LOCK_SECONDS + 1])
async def test_T36_the_first_key_after_the_idle_time_finds_it_locked(seconds: float) -> None:
    """No tick comes in suspend: the lid opens, and somebody presses a key."""
    async with console() as desk:
        await open_dialog(desk)
        await type_word(desk, DIGEST[-4:])
        desk.pass_time(seconds)
        await desk.pilot.press("tab")
        await desk.show(silo(release()))
        sent = await desk.sends("enter")
        locked = seconds > IDLE_LOCK_SECONDS
        assert (desk.app.signing.person is None, sent == []) == (locked, locked)
        desk.unlock()
        desk.pass_time(IDLE_LOCK_SECONDS + 1)
        desk.app.tick()
        assert desk.app.signing.person is None


# ---- keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "settled"),
    [
        ([1.0], "approve"),
        ([1.0, 1.001, 1.002], None),
        ([1.0, -1.01], None),
    ],
    ids=["alone", "pasted", "another right after"],
)
def test_a_key_acts_only_where_it_stands_alone(keys: list[float], settled: str | None) -> None:
    """A negative moment is of a key that offers nothing."""
    gate = KeyGate()
    for at in keys:
        said = gate.key(abs(at))
        if at < 0:
            assert said == BURST
        else:
            gate.offer("approve", at)
    assert gate.settle(keys[-1] + 0.03 if keys == [1.0] else 2.0) == (None if keys == [1.0] else settled)
    assert gate.settle(2.1) == settled and gate.settle(2.2) is None


def test_keys_rest_after_a_screen_change() -> None:
    gate = KeyGate()
    gate.screen_changed(1.0)
    gate.key(1.39)
    assert gate.offer("approve", 1.39) != "" and gate.settle(2.0) is None
    gate.key(2.44)
    assert gate.offer("approve", 2.44) == "" and not gate.in_burst(2.6) and gate.settle(2.6) == "approve"


@pytest.mark.slow
async def test_a_burst_of_keys_signs_nothing_is_said_and_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console() as desk:
        await opened(desk, silo(release()))
        await desk.wait(0.5)
        await desk.pilot.press("A", "A", "A", *DIGEST[-4:], "tab", "enter")
        await desk.wait(0.5)
        assert not isinstance(desk.app.screen, ConfirmDialog)
        await desk.press("escape")
        await desk.pilot.press("enter")
        await desk.wait(0.2)
        await desk.pilot.press("A")  # right after a screen change
        await desk.wait(1.0)
        await desk.pilot.press("A")
        desk.pass_time(0.01)
        await desk.pilot.press("x")  # no key of this screen, and so none that would say anything
        desk.shows(BURST)
        drawn: list[int] = []
        redraw = desk.app.redraw
        monkeypatch.setattr(desk.app, "redraw", lambda: (drawn.append(1), redraw()))
        for _ in range(60):
            desk.pass_time(0.03)  # as a terminal repeats a key that is held
            await desk.pilot.press("A")
        assert isinstance(desk.app.screen, ApprovalScreen) and len(drawn) <= 1 and await desk.answers_sent() == []


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


@pytest.mark.slow
async def test_lower_case_keys_change_nothing() -> None:
    async with console() as desk:
        desk.unlock()
        await desk.show(silo(release()))
        for key in "abcdefghijklmoprstuvwxyz0123456789":
            if not isinstance(desk.app.screen, ApprovalScreen):  # a digit goes to another place, other keys below
                await desk.press("escape", "escape", "escape", "1", "enter")
            await desk.press(key)
        assert await desk.answers_sent() == []


async def test_a_message_goes_with_the_next_key_or_after_some_seconds() -> None:
    told = "approve: LOCKED"
    async with console() as desk:
        await desk.show(silo(release()))
        await desk.press("enter", "A")
        desk.shows(told, "cannot be called back", "no text screens", "0 of 1 given")  # it covers no fact
        await desk.press("k")
        desk.shows("A Approve", lacks=[told])
        await desk.press("A")
        for seconds, there in ((5.0, True), (1.5, False)):
            await desk.wait(seconds)
            desk.app.tick()
            await desk.pilot.pause()
            assert (told in desk.words) is there


@pytest.mark.parametrize("key", ["R", "h"])
async def test_keys_of_a_release_say_on_the_overview_where_they_work(key: str) -> None:
    async with console() as desk:
        for state, told in ((silo(release()), "enter or a opens it"), (silo(), "nothing is held")):
            await desk.show(state)
            await desk.press(key)
            assert isinstance(desk.app.screen, OverviewScreen)
            desk.shows(f"{key} is a key of a held release", told)


# ---- typing ------------------------------------------------------------------------------------------


async def test_T36_only_the_digests_last_characters_typed_by_hand_turn_the_button_on() -> None:
    async with console() as desk:
        await open_dialog(desk)
        for word in ("", "c09", "ffff", "7be1", "yes", "approve"):
            field(desk).value = ""
            field(desk).focus()
            await type_word(desk, word)
            assert button(desk).disabled and await desk.sends("tab", "enter") == [], word
        field(desk).value = ""
        field(desk).focus()
        field(desk).post_message(events.Paste(DIGEST[-4:]))
        await desk.pilot.pause()
        await desk.pilot.press(*DIGEST[-4:])  # the clock stands: a paste that arrives as keys
        assert field(desk).value == "" and button(desk).disabled
        await desk.show(silo(release()))
        await type_word(desk, DIGEST[-4:])
        assert not button(desk).disabled and await desk.sends("enter") == []  # in a field it signs nothing
        await desk.show(silo(release()))
        assert len(await desk.sends("tab", "enter")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("key", "wrong", "right"), [("A", "ffff", DIGEST[-4:]), ("R", "because", "TIMING")])
async def test_enter_after_the_wrong_word_says_so_and_the_next_keys_replace_it(
    key: str, wrong: str, right: str
) -> None:
    async with console() as desk:
        await open_dialog(desk, key)
        before = desk.words
        for typed in ("", wrong):
            await type_word(desk, typed)
            await desk.press("enter")
            assert desk.words != before and await desk.answers_sent() == []
        for each in (*wrong, "enter", *right):  # as fast as hands can
            desk.pass_time(2 * TYPED_SECONDS_MIN)
            await desk.pilot.press(each)
        await desk.pilot.pause()
        assert field(desk).value == right and not button(desk).disabled
        await desk.show(silo(release()))
        assert len(await desk.sends(*["tab"] * (1 if key == "A" else 2), "enter")) == 1


@pytest.mark.slow
async def test_T37_a_reason_keeps_nothing_that_a_terminal_obeys_or_hides() -> None:
    async with console() as desk:
        await open_dialog(desk, "R")
        reason = field(desk, "reason")
        reason.focus()
        for name, hostile in HOSTILE.items():
            reason.value = ""
            await desk.pilot.pause()
            for pasted in (hostile[:150], " odd"):
                reason.post_message(events.Paste(pasted))
                await desk.pilot.pause()
            assert reason.value == drawable(hostile[:150]) + " odd", name
            assert all(safe(one) == one for one in reason.value), name
            assert not re.search(r"[\u0300-\u036f]{3}", reason.value), name


@pytest.mark.slow
async def test_a_note_is_not_thrown_away() -> None:
    async with console() as desk:
        await open_dialog(desk, "R")
        await desk.pilot.press(*"OTHER")  # in a burst: no typing
        await desk.press("tab", *"seen")
        await desk.show(silo(release()))
        await desk.press("tab", "enter")
        assert isinstance(desk.app.screen, ConfirmDialog) and field(desk).has_focus
        assert field(desk, "reason").value == "seen" and await desk.answers_sent() == []
        await desk.press("escape")
        await desk.show(silo(release()))
        await desk.press("A", "tab")  # the button is off: it stays in the field
        assert field(desk).has_focus
        await desk.press("escape")
        await desk.show(silo(release()))
        await desk.press("R")
        assert field(desk, "reason").value == "seen"
        await type_word(desk, "OTHER")
        assert await desk.sends("enter", "tab", "enter") == []  # in the field of the reason it signs nothing either
        await desk.show(silo(release()))
        ((_, _, arguments, _),) = await desk.sends("tab", "enter")
        assert (arguments["reason_code"], arguments["reason"]) == ("OTHER", "seen")


# ---- and what works ----------------------------------------------------------------------------------


async def test_an_approval_is_bound_to_what_was_shown_and_the_screen_shows_what_came_of_it() -> None:
    async with console(leaving="ctrl+q for the result") as desk:
        await open_dialog(desk)
        assert (desk.app.screen_stack[-2].shown.count("hold")) == 1  # type: ignore[attr-defined]
        ((person, name, arguments, request_id),) = await answer_it(desk)
        assert (person, name) == ("alice", "approvals.approve") and len(request_id) == 32
        assert arguments == {
            "release": "r1/hospital_a/0", "digest": DIGEST, "policy_digest": POLICY_DIGEST, "revision": 1,
            "shown": SHOWN,
        }  # fmt: skip
        assert desk.signer.federations == ["cardio-net"]  # whose guard was shown (T29)
        desk.shows("audit record 72")
        # a reading from before the answer was taken in, then those after it, a minute later
        for state in (silo(release()), silo(run="run-1"), silo(run="run-1")):
            await desk.show(state)
            desk.shows("then sent", "1 of 1 given: alice", "24 ok", lacks=["expires in", "0 of 1 given", "23 ok"])
            assert re.search(r"held 02:1[3-6]", desk.words)
            await desk.wait(60.0)
        idle = {"run": "", "rounds": 0, "round": 0, "phase": "idle"}
        await desk.show(silo(**idle, last_run={"run": "run-1", "state": "finished"}))
        desk.shows("run-1 finished: ctrl+q for the result")
        await desk.press("escape")
        desk.shows("run-1 finished: ctrl+q for the result", "fedsilo run show run-1")


@pytest.mark.slow
async def test_after_the_first_of_two_approvals_the_release_is_still_held() -> None:
    async with console() as desk:
        desk.signer.result = {"state": "held", "given": ["alice"], "needed": 2, "record": 72, "audit_size": 75}
        await open_dialog(desk, "A", silo(release(approvers=given())))
        await answer_it(desk)
        await desk.show(silo(release(approvers=given("alice"))))
        desk.shows("1 of 2 given: alice", "expires in", lacks=["then"])


async def test_the_clock_stops_when_somebody_else_settled_it() -> None:
    async with console() as desk:
        await desk.show(silo(release()))
        await desk.press("enter")
        seen = set()
        for seconds in (0.0, 60.0):
            await desk.wait(seconds)
            await desk.show(silo())
            found = re.search(r"held \d\d:\d\d then no longer held", desk.words)
            assert found is not None
            seen.add(found.group())
        assert len(seen) == 1


@pytest.mark.slow
@pytest.mark.parametrize("refused", [False, True])
async def test_who_answered_here_or_at_another_console_is_told_how_it_ended(refused: bool) -> None:
    """With `refused`, another person's no was there before this one."""
    async with console() as desk:
        if refused:
            desk.signer.refusal = ConflictError("it is rejected, no longer held", code="NOT_HELD")
        budget = "DP off; round 3K->347K of 478K 73 %"
        await open_dialog(desk, "R", silo(release(budget=budget)))
        ((_, name, arguments, _),) = await answer_it(desk, "timing")
        assert (name, arguments["reason_code"], arguments["digest"]) == ("approvals.reject", "TIMING", DIGEST)
        assert ("NOT_HELD" in desk.words) is refused
        await desk.show(silo())
        assert desk.app.wanted["approval"] == ("approval", {"release": "r1/hospital_a/0"})
        over = release(budget=budget, state="rejected", approvers=given() | {"needed": 1, "given": REJECTED})
        await desk.answer("approval", over | {"digest": "0" * 64})  # of other bytes: not of this one
        desk.shows(lacks=["alice said no"])
        await desk.answer("approval", over)
        desk.shows("then rejected by alice", "alice said no: TIMING", lacks=["3K->347K", "expires in"])
        assert "approval" not in desk.app.wanted and "Approve" not in desk.footer and "h History" in desk.footer


@pytest.mark.slow
@pytest.mark.parametrize(("key", "word"), [("A", DIGEST[-4:]), ("R", "timing")])
async def test_while_an_answer_is_on_its_way_it_is_named_and_a_refusal_is_shown(key: str, word: str) -> None:
    async with console() as desk:
        desk.signer.refusal = ConflictError("digest is not what was shown", code="STALE_VIEW")
        await open_dialog(desk, key)
        send, kept = desk.app.send, []
        desk.app.send = lambda *call: kept.append(call)  # type: ignore[method-assign]  # the daemon takes its time
        await answer_it(desk, word)
        desk.shows({"A": "approving…", "R": "rejecting…"}[key])
        send(*kept[0])
        await desk.answers_sent()
        desk.shows("STALE_VIEW")


# ---- what would leave --------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_payload_is_read_by_a_signed_command_that_a_dialog_asks_for() -> None:
    async with console() as desk:
        desk.signer.result = TICKET
        await opened(desk, noticed(), "v")
        assert isinstance(desk.app.screen, OrderDialog) and await desk.sends("enter", "v") == []
        ((_, name, arguments, _),) = await desk.sends("r")
        assert (name, arguments) == ("approvals.payload", {"release": "r1/hospital_a/0", "digest": DIGEST})
        assert isinstance(desk.app.screen, PayloadScreen)
        assert desk.app.wanted["payload"] == ("approvals.payload", {"ticket": "t1"})
        await desk.answer("payload", {**PAYLOAD, "sha256": "0" * 64})
        desk.shows(lacks=["1 2 3"])  # of other bytes
        await desk.answer("payload", PAYLOAD)
        desk.shows("| 1 2 3", "| Use one line.")
        assert "payload" not in desk.app.wanted  # a ticket is good for one look
        await desk.answer("payload", None, ("NOT_ALLOWED", "there is no such ticket"))
        desk.shows("| 1 2 3", lacks=["no such ticket"])
        await desk.press("escape")
        desk.shows("read by alice, audit record 80")
        await desk.show(noticed())
        await desk.press("A")  # it answered nothing
        assert isinstance(desk.app.screen, ConfirmDialog)


@pytest.mark.slow
async def test_who_may_not_read_it_now_is_told_why() -> None:
    refused = NotAllowedError("vera may not payload.read")
    async with console() as desk:
        for state, how, why in (
            (noticed(), "locked", "LOCKED"),
            (silo(), "", "not held any more"),
            (noticed(revision=2), "", "judged again"),
            (noticed(), "role", "vera may not"),
        ):
            desk.signer.refusal = refused if how == "role" else None
            await opened(desk, noticed())
            if how == "locked":
                desk.app.signing.person = None
            await desk.show(state)
            sent = await desk.sends("v", *(["r"] if how == "role" else []))
            assert isinstance(desk.app.screen, ApprovalScreen) and len(sent) == (how == "role")
            desk.shows(why)
            await desk.press("escape")


@pytest.mark.parametrize("cells", [60, 76, 136])
def test_T37_all_of_an_answer_is_drawn_and_nothing_that_a_terminal_obeys(cells: int) -> None:
    long = "word " * 400 + "\u4f60" * 100 + "\x9b31m" + "e\u0301" * 50
    hostile = {**PAYLOAD, "answers": [{"row": 1, "prompt": long, "answers": [long, *TOGETHER.values()]}]}
    payloads = (hostile, PAYLOAD, TENSORS, {**PAYLOAD, "content": long})
    shown = [payload_lines(read(HeldPayload, each), cells, UNICODE) for each in payloads]
    for evil in TOGETHER.values():
        told = {
            "against": {"run": evil, "approved_by": [evil]}, "note": evil,
            "rows": [{"what": evil, "before": evil, "now": evil}], "tensors": [{"name": evil, "times": 3.0}],
        }  # fmt: skip
        found = Finding(evil, evil, "look", evil, (Evidence(evil, evil, evil),))
        shown += [finding_lines(found, "1 of 1", cells), comparison_lines(read(Comparison, told), cells)]
    for lines in shown:
        assert not [one for one in to_text(lines) if not (one.isprintable() or one == "\n")]
    drawn = to_text(shown[0])
    assert drawn.count("word") == 800 and "<U+009B>" in drawn and "cut>" not in drawn


def test_of_tensors_counts_are_drawn_what_is_not_finite_is_said_and_names_keep_their_ends() -> None:
    text = to_text(payload_lines(read(HeldPayload, TENSORS), 100, UNICODE))
    assert all(fact in text for fact in ("layers.0.lora_A", "16x896", "2 NOT FINITE", "and 3 more tensors", "▄█", "█▁"))
    name = "base_model.model.model.layers.11.mlp.gate_proj.lora_A.weight"
    other = name.replace("11.mlp.gate_proj.lora_A", "1.self_attn.q_proj.lora_B")
    bars = {"negative": [1] * 9, "zero": 0, "positive": [1] * 9, "not_finite": 0}
    tensors = [{**TENSORS["tensors"][0], "name": one, "histogram": bars} for one in (name, other)]
    one, both = (read(HeldPayload, TENSORS | {"tensors": each}) for each in (tensors[:1], tensors))
    (row,) = (each for each in to_text(payload_lines(one, 76, UNICODE)).splitlines() if "16x896" in each)
    assert "lora_A.weight" in row and row.startswith("bas") and len(row) <= 76
    text = to_text(payload_lines(both, 76, UNICODE))
    assert "11.mlp.gate_proj.lora_A " in text and "1.self_attn.q_proj.lora_B" in text


# ---- beside it ---------------------------------------------------------------------------------------


async def test_d_opens_the_whole_comparison_and_h_what_was_held_of_this_kind() -> None:
    async with console() as desk:
        await opened(desk, noticed())
        await desk.press("d")
        assert isinstance(desk.app.screen, ComparisonScreen)
        assert desk.app.wanted["comparison"] == ("approval.comparison", {"release": "r1/hospital_a/0"})
        await desk.answer("comparison", COMPARED)
        desk.shows("approved by bob", "cdcdcdcd…cdcd", "x3.00", "only one has it")
        assert desk.text.index("sha256") < desk.text.index("rank")  # what differs comes first
        await desk.press("escape", "h")
        assert isinstance(desk.app.screen, HistoryScreen)
        assert desk.app.wanted["history"] == ("approvals", {"kind": "lora.factors", "limit": 100})
        assert desk.app.screen.twin() == "silo approvals history --kind lora.factors"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state": "rejected", "approved_by": [], "rejected_by": ["bob"]}, "rejected by bob: it did not leave"),
        ({"state": "expired", "approved_by": [], "rejected_by": []}, "expired: it did not leave"),
        ({}, "approved by bob"),
    ],
)
def test_one_that_did_not_leave_is_compared_with_as_that(changes: dict[str, Any], says: str) -> None:
    compared = read(Comparison, COMPARED | {"against": COMPARED["against"] | changes})
    text = to_text(comparison_lines(compared, 120))
    assert says in text and "nobody was asked" not in text and "x3.00" in text


@pytest.mark.parametrize("told", [{}, {"against": 3}, {"against": {}, "rows": [3], "tensors": {}}, {"note": "x\x1b"}])
def test_a_comparison_of_another_shape_breaks_nothing(told: dict[str, Any]) -> None:
    assert "\x1b" not in to_text(comparison_lines(read(Comparison, told), 60))


# ---- later -------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_to_put_off_takes_a_choice_and_a_labelled_key_and_is_for_this_person() -> None:
    def state(**more: Any) -> dict[str, Any]:
        return noticed(expires_at=NOW + 7000, **more)

    async with console() as desk:
        desk.signer.result = {"state": "held", "deferred_until": NOW + 1800, "record": 81}
        await opened(desk, state(), "D")
        assert isinstance(desk.app.screen, DeferDialog)
        desk.shows("▸ 1 10 minutes 2 30 minutes", lacks=["3 120 minutes"])  # it expires before
        assert await desk.sends("2", "enter", "D", "3") == []
        await desk.show(state())
        ((person, name, arguments, _),) = await desk.sends("d")
        assert (person, name, arguments["revision"]) == ("alice", "approvals.defer", 1)
        assert arguments["until_seconds"] == pytest.approx(NOW + 1800, abs=5.0)  # the seconds between the keys
        desk.shows("put off by alice until")
        await desk.show(state(deferred={"alice": NOW + 1800, "bob": NOW + 60}))
        desk.shows("you put it off for")
        await desk.press("A")  # it can be answered all the same
        assert isinstance(desk.app.screen, ConfirmDialog)


@pytest.mark.slow
async def test_what_was_put_off_does_not_need_that_person_until_then() -> None:
    async with console((100, 30)) as desk:
        for person, until, needs in (("", 60, True), ("bob", 60, True), ("alice", 60, False), ("alice", -1, True)):
            desk.app.signing.person = None
            if person:
                desk.unlock(person)
            await desk.show(noticed(deferred={"alice": NOW + until}))
            assert ("1 needs you" in desk.words) is needs
            await desk.press("3")
            (row,) = (line.split() for line in desk.text.splitlines() if "▸ r1/hospital_a/0" in line)
            assert "held" in row and ("-" in row) is needs  # the column `later`
            await desk.press("1")


@pytest.mark.slow
async def test_what_expires_too_soon_cannot_be_put_off_nor_what_changed_behind_the_dialog() -> None:
    async with console() as desk:
        await opened(desk, noticed(expires_at=NOW + 500), "D")
        assert isinstance(desk.app.screen, ApprovalScreen)
        await desk.press("escape")
        for then, sent in ((noticed(expires_at=NOW + 700, revision=2), 0), (noticed(expires_at=NOW + 700), 1)):
            await opened(desk, noticed(expires_at=NOW + 700), "D")
            assert isinstance(desk.app.screen, DeferDialog)
            await desk.show(then)
            assert len(await desk.sends("d")) == sent
            await desk.press("escape", "escape")
