"""Around one release: findings opened before a yes, what would leave, what is beside it, and later (threat T36)."""

from __future__ import annotations

from typing import Any

import pytest
from textual.widgets import Button

from console.actions import ACTIONS
from console.base import TextDialog
from console.dialogs import ConfirmDialog, DeferDialog, OrderDialog
from console.screens.approval import ApprovalScreen, ComparisonScreen, PayloadScreen
from console.screens.approvals import ApprovalsScreen, HistoryScreen
from console.sharing import released_answer
from console.table_screen import TablePane
from fedsilo.control.answers import Evidence, Finding
from fedsilo.protocol.errors import ConflictError, NotAllowedError
from fedsilo.views.lines import UNICODE, to_text
from fedsilo.views.releases import comparison_lines, finding_lines, payload_lines
from tests.console.desk import Desk, console, open_dialog, type_word
from tests.console.states import DIGEST, NOW, POLICY_DIGEST, RULES, release, rule, silo
from tests.console.test_safe import TOGETHER


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


def noticed(*found: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A silo that holds a release of which this was found."""
    looks = [rule(one["code"].lower(), one["says"], None, "look") for one in found]
    policy = {"name": "pubswap", "digest": POLICY_DIGEST, "rules": [*looks, *RULES]}
    return silo(release(**{"noticed": list(found), "policy": policy, **changes}))


async def opened(desk: Desk, state: dict[str, Any], *keys: str) -> None:
    """On the release's screen, unlocked, with a state that is not old."""
    desk.unlock()
    await desk.show(state)
    await desk.press("enter")
    for key in keys:
        await desk.press(key)
        await desk.show(state)
    assert isinstance(desk.app.top, ApprovalScreen)


# ---- findings ---------------------------------------------------------------------------------------


async def test_T36_A_is_off_until_each_finding_was_opened() -> None:
    state = noticed(DESTINATION, HIT)
    async with console() as desk:
        await opened(desk, state, "A")
        assert isinstance(desk.app.screen, ApprovalScreen) and "2 not opened: f opens the next" in desk.text
        await desk.press("A")
        assert "2 findings not opened" in desk.text
        await desk.press("enter")
        assert isinstance(desk.app.screen, TextDialog) and IDS[0] in desk.text and "before coordinator" in desk.text
        await desk.press("escape")
        await desk.show(state)
        await desk.press("A")
        assert "1 finding not opened" in desk.text and isinstance(desk.app.screen, ApprovalScreen)
        await desk.press("f")
        assert IDS[1] in desk.text and "read that answer (v)" in desk.text
        await desk.press("escape")
        await desk.show(state)
        assert "each was opened" in desk.text and "read HIT canary" in desk.text
        await desk.press("A")
        await type_word(desk, DIGEST[-4:])
        await desk.press("tab", "enter")
        ((_, name, arguments, _),) = await desk.answers_sent()
        assert name == "approvals.approve" and arguments["acknowledged"] == IDS


async def test_T36_a_changed_view_is_opened_anew() -> None:
    async with console() as desk:
        await opened(desk, noticed(DESTINATION), "f", "escape")
        screen = desk.app.top
        assert isinstance(screen, ApprovalScreen) and screen.opened == {IDS[0]}
        await desk.press("escape")
        await opened(desk, noticed(DESTINATION, revision=2))
        assert "1 not opened" in desk.text
        again = desk.app.top
        assert isinstance(again, ApprovalScreen) and again.opened == frozenset()


async def test_T36_what_is_found_later_is_to_be_opened_too_also_behind_an_open_dialog() -> None:
    async with console() as desk:
        await opened(desk, noticed(DESTINATION), "f", "escape", "A")
        assert isinstance(desk.app.screen, ConfirmDialog)
        await type_word(desk, DIGEST[-4:])
        await desk.show(noticed(DESTINATION))
        assert not desk.app.screen.query_one("#confirm", Button).disabled
        await desk.show(noticed(DESTINATION, HIT))
        assert desk.app.screen.query_one("#confirm", Button).disabled and "1 finding not opened" in desk.text
        desk.app.screen.confirm()
        assert await desk.answers_sent() == []
        await desk.press("escape", "A")
        assert isinstance(desk.app.screen, ApprovalScreen)


async def test_T36_a_no_needs_nothing_opened_and_the_daemons_refusal_is_shown() -> None:
    async with console() as desk:
        await opened(desk, noticed(DESTINATION), "R")
        await type_word(desk, "CONTENT")
        await desk.press("tab", "tab", "enter")
        assert [name for _, name, _, _ in await desk.answers_sent()] == ["approvals.reject"]
    async with console() as desk:
        desk.signer.refusal = ConflictError("1 of 1 findings of r1 not opened: X-1", code="FINDINGS_UNREAD")
        await open_dialog(desk)
        await type_word(desk, DIGEST[-4:])
        await desk.press("tab", "enter")
        await desk.answers_sent()
        assert "FINDINGS_UNREAD" in desk.text


@pytest.mark.parametrize("size", [(80, 24), (100, 30)])
@pytest.mark.parametrize("items", ["16 tensors, rank 8, float32, 8192 values", ", ".join(["32 tensors, rank 8"] * 9)])
async def test_all_facts_of_a_release_with_a_finding_stand_on_one_screen(size: tuple[int, int], items: str) -> None:
    """In the lengths that a guard writes: its budget, its comparison, and a sentence of two lines for a no."""
    leaves = release()["leaves"]
    kinds = [{**leaves["kinds"][0], "items": items}]
    state = noticed(
        DESTINATION, leaves={**leaves, "kinds": kinds},
        uses="round 0->33K of 124K 27 %; day 34K->97K of 352K 28 %",
        difference="+0 bytes against round 1 of this run; L2 0.166->0.166 +0 %; cosine 0.00; form, base, policy same; "
        "cert to 2027-01-22",
    )  # fmt: skip
    async with console(size) as desk:
        await opened(desk, state, "f", "escape")
        screen = desk.app.top
        assert isinstance(screen, ApprovalScreen) and screen.query_one("#body").max_scroll_y == 0
        assert screen.why_not(approve=True) == ""
        facts = "NEW destination", "cosine 0.00", "cert to 2027-01-22", "day 34K->97K of 352K 28 %", "the quorum is met"
        for fact in facts:
            assert fact in " ".join(desk.text.split()), fact


async def test_what_was_opened_is_opened_again_from_the_first_one() -> None:
    async with console() as desk:
        await opened(desk, noticed(DESTINATION, HIT), "f", "escape", "f", "escape")
        for place in ("1 of 2", "2 of 2", "1 of 2"):
            await desk.press("f")
            assert f"finding {place}" in desk.text
            await desk.press("escape")
        await desk.show(noticed())
        await desk.press("f")
        assert "nothing unusual was found" in desk.text


async def test_the_twin_names_what_was_opened() -> None:
    async with console() as desk:
        await opened(desk, noticed(DESTINATION, HIT), "f", "escape")
        (twin,) = (action.twin for action in ACTIONS if action.name == "approve")
        assert twin is not None
        words = twin(desk.app.top.context())
        assert words[-2:] == ("--ack-finding", IDS[0]) and IDS[1] not in words and f"sha256:{DIGEST}" in words


def test_a_long_finding_is_whole() -> None:
    evidence = tuple(Evidence(f"screen {number}", "", f"row {number} answer 1") for number in range(40))
    text = to_text(finding_lines(Finding("X-1", "UNKNOWN", "look", "word " * 200, evidence), "1 of 1", 60))
    assert text.count("word") == 200 and "row 39 answer 1" in text and "does not know this kind" in text
    assert max(map(len, text.splitlines())) <= 60


# ---- the other refusals (console design 11.2); more of them are in test_screens.py --------------------


@pytest.mark.parametrize(
    ("state", "locked", "why"),
    [
        (noticed(), True, "LOCKED"),
        (noticed(expires_at=NOW - 1), False, "it expired"),
        (noticed(approvers={"needed": 2, "roles": [], "given": [{"person": "alice", "verdict": "approve"}]}), False,
         "nobody counts twice"),
        (noticed(DESTINATION), False, "1 finding not opened"),
        (silo(release(policy={"name": "p", "digest": POLICY_DIGEST, "rules": [rule("L2", 9, 4, "deny")]})), False,
         "denies"),
        (noticed(digest="not a digest"), False, "approve: "),
        (noticed(), False, ""),
    ],
    ids=["locked", "expired", "twice", "unread", "denied", "unreadable", "good"],
)  # fmt: skip
async def test_T36_A_says_why_not(state: dict[str, Any], locked: bool, why: str) -> None:
    async with console() as desk:
        await opened(desk, state)
        if locked:
            desk.app.signing.person = None
        await desk.press("A")
        assert isinstance(desk.app.screen, ConfirmDialog) is not bool(why) and why in desk.text
        assert await desk.answers_sent() == []


async def test_T36_A_is_about_the_release_that_is_open_when_rows_move_under_the_cursor() -> None:
    first, second = release(), release(id="r1/hospital_a/1", digest="ab" * 30 + "beef")
    async with console() as desk:
        desk.unlock()
        await desk.show(silo(first, second))
        await desk.press("3", "j")
        assert isinstance(desk.app.screen, ApprovalsScreen)
        assert desk.app.screen.context().release == "r1/hospital_a/1"
        await desk.show(silo(release(id="r0/hospital_a/9"), first, second))
        assert desk.app.screen.context().release == "r1/hospital_a/1"
        await desk.press("enter")
        await desk.show(silo(second))
        await desk.press("A")
        await desk.show(silo(first))  # the one in the dialog is gone, another stands in its place
        await type_word(desk, DIGEST[-4:])
        assert desk.app.screen.query_one("#confirm", Button).disabled and "no longer held" in desk.text
        await desk.press("escape", "escape", "k")
        await desk.show(silo(first, second))
        await desk.press("j", "enter")
        await desk.show(silo(first, second))
        await desk.press("A")
        await type_word(desk, "beef")
        await desk.press("tab", "enter")
        ((_, _, arguments, _),) = await desk.answers_sent()
        assert arguments["release"] == "r1/hospital_a/1" and arguments["digest"] == second["digest"]


# ---- what would leave -------------------------------------------------------------------------------


async def test_the_payload_is_read_by_a_signed_command_that_a_dialog_asks_for() -> None:
    async with console() as desk:
        desk.signer.result = TICKET
        await opened(desk, noticed(), "v")
        assert isinstance(desk.app.screen, OrderDialog) and "the audit log says" in desk.text
        await desk.press("enter", "v")
        assert await desk.answers_sent() == []
        await desk.press("r")
        assert [(name, arguments) for _, name, arguments, _ in await desk.answers_sent()] == [
            ("approvals.payload", {"release": "r1/hospital_a/0", "digest": DIGEST})
        ]
        assert isinstance(desk.app.screen, PayloadScreen)
        assert desk.app.wanted["payload"] == ("approvals.payload", {"ticket": "t1"})
        await desk.answer("payload", {**PAYLOAD, "sha256": "0" * 64})
        assert "1 2 3" not in desk.text  # of other bytes
        await desk.answer("payload", PAYLOAD)
        assert "| 1 2 3" in desk.text and "| Use one line." in desk.text and "NOT in this site's" in desk.text
        assert "payload" not in desk.app.wanted  # a ticket is good for one look
        await desk.answer("payload", None, ("NOT_ALLOWED", "there is no such ticket"))
        assert "| 1 2 3" in desk.text and "no such ticket" not in desk.text
        await desk.press("escape")
        assert isinstance(desk.app.screen, ApprovalScreen) and "read by alice, audit record 80" in desk.text
        await desk.show(noticed())
        await desk.press("A")  # it answered nothing
        assert isinstance(desk.app.screen, ConfirmDialog)


@pytest.mark.parametrize(
    ("locked", "state", "why"),
    [(True, noticed(), "LOCKED"), (False, silo(), "not held any more"), (False, noticed(revision=2), "judged again")],
    ids=["locked", "over", "changed"],
)
async def test_who_may_not_read_it_now_is_told_why(locked: bool, state: dict[str, Any], why: str) -> None:
    async with console() as desk:
        await opened(desk, noticed())
        if locked:
            desk.app.signing.person = None
        await desk.show(state)
        await desk.press("v")
        assert isinstance(desk.app.screen, ApprovalScreen) and why in desk.text and await desk.answers_sent() == []


async def test_a_person_without_the_role_reads_nothing() -> None:
    async with console() as desk:
        desk.signer.refusal = NotAllowedError("vera may not payload.read")
        await opened(desk, noticed(), "v", "r")
        await desk.answers_sent()
        assert isinstance(desk.app.screen, ApprovalScreen) and "vera may not payload.read" in desk.text


@pytest.mark.parametrize("cells", [60, 76, 136])
def test_T37_all_of_an_answer_is_drawn_and_nothing_that_a_terminal_obeys(cells: int) -> None:
    long = "word " * 400 + "\u4f60" * 100 + "\x9b31m" + "e\u0301" * 50
    hostile = {**PAYLOAD, "answers": [{"row": 1, "prompt": long, "answers": [long, *TOGETHER.values()]}]}
    for shown in (hostile, PAYLOAD, TENSORS, {**PAYLOAD, "answers": None, "content": {"a": long}}):
        lines = payload_lines(shown, cells, UNICODE)
        text = to_text(lines)
        assert not [one for one in text if not (one.isprintable() or one == "\n")]
    for evil in TOGETHER.values():
        found = Finding(evil, evil, "look", evil, (Evidence(evil, evil, evil),))
        told = {
            "against": {"run": evil, "approved_by": [evil]},
            "note": evil,
            "rows": [{"what": evil, "before": evil, "now": evil}],
            "tensors": [{"name": evil, "times": evil}],
        }
        text = to_text([*finding_lines(found, "1 of 1", cells), *comparison_lines(told, cells)])
        assert not [one for one in text if not (one.isprintable() or one == "\n")]
    drawn = to_text(payload_lines(hostile, cells, UNICODE))
    assert drawn.count("word") == 800 and "<U+009B>" in drawn
    assert "cut>" not in drawn


def test_of_tensors_counts_are_drawn_and_what_is_not_finite_is_said() -> None:
    text = to_text(payload_lines(TENSORS, 100, UNICODE))
    assert "layers.0.lora_A" in text and "16x896" in text and "2 NOT FINITE" in text and "and 3 more tensors" in text
    assert "▄█" in text and "█▁" in text


# ---- beside it --------------------------------------------------------------------------------------


async def test_d_opens_the_whole_comparison_and_h_what_was_held_of_this_kind() -> None:
    async with console() as desk:
        await opened(desk, noticed())
        await desk.press("d")
        assert isinstance(desk.app.screen, ComparisonScreen)
        assert desk.app.wanted["comparison"] == ("approval.comparison", {"release": "r1/hospital_a/0"})
        await desk.answer("comparison", COMPARED)
        assert "approved by bob" in desk.text and "cdcdcdcd…cdcd" in desk.text and "x3.00" in desk.text
        assert desk.text.index("sha256") < desk.text.index("rank") and "only one has it" in desk.text
        await desk.press("escape", "h")
        assert isinstance(desk.app.screen, HistoryScreen)
        assert desk.app.wanted["history"] == ("approvals", {"kind": "lora.factors", "limit": 100})
        assert desk.app.screen.twin() == "silo approvals history --kind lora.factors"


@pytest.mark.parametrize(
    ("rejected_by", "state", "says"),
    [(["bob"], "rejected", "rejected by bob: it did not leave"), ([], "expired", "expired: it did not leave")],
)
def test_one_that_did_not_leave_is_compared_with_as_that(rejected_by: list[str], state: str, says: str) -> None:
    against = COMPARED["against"] | {"state": state, "approved_by": [], "rejected_by": rejected_by}
    text = to_text(comparison_lines(COMPARED | {"against": against}, 120))
    assert f"held since 2026-12-01T08:00:00Z, {says}" in text and "nobody was asked" not in text and "x3.00" in text


@pytest.mark.parametrize("told", [{}, {"against": 3}, {"against": {}, "rows": [3], "tensors": {}}, {"note": "x\x1b"}])
def test_a_comparison_of_another_shape_breaks_nothing(told: dict[str, Any]) -> None:
    assert "\x1b" not in to_text(comparison_lines(told, 60))


# ---- later ------------------------------------------------------------------------------------------


async def test_to_put_off_takes_a_choice_and_a_labelled_key_and_is_for_this_person() -> None:
    state = noticed(DESTINATION, expires_at=NOW + 7000)
    async with console() as desk:
        desk.signer.result = {"state": "held", "deferred_until": NOW + 1800, "record": 81}
        await opened(desk, state, "D")
        assert isinstance(desk.app.screen, DeferDialog) and "▸ 1 10 minutes    2 30 minutes" in desk.text
        assert "3 120 minutes" not in desk.text and "it expires before 120 minutes are over" in desk.text
        await desk.press("2", "enter", "D", "3")
        assert await desk.answers_sent() == [] and "in 30 minutes" in " ".join(desk.text.split())
        await desk.show(state)
        await desk.press("d")
        ((person, name, arguments, _),) = await desk.answers_sent()
        assert (person, name, arguments["revision"]) == ("alice", "approvals.defer", 1)
        assert arguments["until_seconds"] == pytest.approx(NOW + 1800, abs=5.0)  # the seconds between the keys
        assert "put off by alice until" in " ".join(desk.text.split()) and "it expires all the same" in desk.text
        await desk.show(noticed(DESTINATION, expires_at=NOW + 7000, deferred={"alice": NOW + 1800, "bob": NOW + 60}))
        assert "you put it off for" in " ".join(desk.text.split())
        await desk.press("f", "escape")
        await desk.show(noticed(DESTINATION, expires_at=NOW + 7000, deferred={"alice": NOW + 1800}))
        await desk.press("A")  # it can be answered all the same
        assert isinstance(desk.app.screen, ConfirmDialog)


@pytest.mark.parametrize(("person", "later"), [("alice", "29:59"), ("bob", "-"), ("", "-")])
async def test_in_the_inbox_it_says_later_to_that_person_alone_and_the_state_is_the_releases(
    person: str, later: str
) -> None:
    async with console((100, 30)) as desk:
        if person:
            desk.unlock(person)
        await desk.show(noticed(deferred={"alice": NOW + 1800}))
        await desk.press("3")
        (row,) = (line for line in desk.text.splitlines() if "r1/hospital_a/0" in line and "▸" in line)
        assert "held" in row.split() and later in row.split() and "later" in desk.text
        # the state is a released field: a recording that is shared has it, and nothing of who put what off
        (item,) = desk.app.top.query_one(TablePane).rows.shown
        shared = released_answer("approvals", {}, {"releases": [item.row]})
        assert shared is not None and shared[0]["releases"][0]["state"] == "held"
        assert not [name for name in shared[0]["releases"][0] if name.startswith("later")]


async def test_what_was_put_off_does_not_need_that_person_until_then() -> None:
    async with console() as desk:
        await desk.show(noticed(deferred={"alice": NOW + 60}))
        assert "1 needs you" in desk.text  # nobody knows yet who looks
        for person, told in (("bob", "1 needs you"), ("alice", "nothing needs you")):
            desk.unlock(person)
            await desk.show(noticed(deferred={"alice": NOW + 60}))
            assert (told in desk.text and "r1/hospital_a/0 held" in desk.text) or person == "alice"
        await desk.press("L")
        assert "1 needs you" in desk.text
        desk.unlock("alice")
        await desk.show(noticed(deferred={"alice": NOW - 1}))
        assert "1 needs you" in desk.text


async def test_what_expires_too_soon_cannot_be_put_off() -> None:
    async with console() as desk:
        await opened(desk, noticed(expires_at=NOW + 500), "D")
        assert isinstance(desk.app.screen, ApprovalScreen)
        await desk.press("D")
        assert "it expires before anybody could be asked again" in desk.text
        desk.app.signing.person = None
        await desk.press("D")
        assert "LOCKED" in desk.text and await desk.answers_sent() == []


async def test_a_choice_that_has_become_too_late_is_off() -> None:
    async with console() as desk:
        await opened(desk, noticed(expires_at=NOW + 700), "D")
        assert isinstance(desk.app.screen, DeferDialog)
        await desk.show(noticed(expires_at=NOW + 700))
        await desk.press("d")
        assert len(await desk.answers_sent()) == 1
    async with console() as desk:
        await opened(desk, noticed(expires_at=NOW + 700), "D")
        await desk.show(noticed(expires_at=NOW + 700, revision=2))
        await desk.press("d")
        assert await desk.answers_sent() == [] and "judged again" in desk.text
