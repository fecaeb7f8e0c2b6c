"""What a source does not hold reads `hidden` on every screen: never 0, never an alarm, and not as something that a
daemon said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from console.sharing import released_answer, released_state
from fedsilo.control.answers import MessagePage, MessageRow, ReleaseRow, read
from fedsilo.views import messages, releases
from fedsilo.views.approvals import HISTORY_COLUMNS
from fedsilo.views.lines import UNICODE, to_text
from fedsilo.views.overview import Lock, once_lines, top_bar
from fedsilo.views.state import Snapshot, changed_since, why_not_answer
from tests.console.desk import console
from tests.console.states import POLICY_DIGEST, coordinator, live, release, silo

WRONG = ("CHANGED", " 0 B", "0 of 1", "not seen yet", "0 ok", "does not say", "nobody", "sha256:  ")
TOLD = "REPLAY 00:05 of 03:36 paused, 2026-12-01 10:00:00Z, share-safe"


def shared(state: dict[str, Any]) -> Snapshot:
    snapshot = live(released_state(state))
    return replace(snapshot, link=replace(snapshot.link, banner=TOLD))


def once(snapshot: Snapshot) -> str:
    (held,) = snapshot.held
    now = snapshot.link.received_at
    rows = releases.one_column(held, 100, 100, time=snapshot.server_now(now), banner=snapshot.link.banner)
    return to_text([*rows, *once_lines(snapshot, now, 100, UNICODE), releases.signature_line(held)])


def test_of_a_share_safe_state_what_is_left_out_is_hidden_and_what_is_whole_is_told() -> None:
    text = once(shared(silo(release())))
    assert not [wrong for wrong in WRONG if wrong in text], text
    for label in ("stays", "policy", "budget", "diff", "screens", "approve", "reject"):
        assert f"{label:9}hidden" in text
    assert "FINDINGS hidden" in text and "leaves   hidden" in text and "sha256:hidden" in text
    assert "approvals hidden, 1 needed" in text and "kind and size hidden" in text and "--include-local LOCAL" in text
    assert "coordinator hidden live" in text
    whole = once(live(silo(release())))
    assert "hidden" not in whole.replace("other silos hidden", "") and "0 of 1 given" in whole and "1.9 MiB" in whole


@pytest.mark.parametrize("answered", [False, True])
def test_who_may_still_approve_is_named(answered: bool) -> None:
    given = [{"person": "alice", "verdict": "approve"}] if answered else []
    approvers = {"needed": 2, "roles": ["approver"], "people": ["alice", "bob"], "given": given}
    snapshot = live(silo(release(approvers=approvers)))
    (held,) = snapshot.held
    text = to_text(releases.header(held, 80, time=snapshot.server_now(100.0)))
    assert ("may approve bob" if answered else "may approve alice, bob") in text
    (nobody,) = live(silo(release())).held
    assert "may approve" not in to_text(releases.header(nobody, 80, time=snapshot.server_now(100.0)))


def test_nothing_that_is_hidden_is_a_change_or_a_need_and_nothing_can_be_answered() -> None:
    snapshot = shared(silo(release()))
    (held,), (known,) = snapshot.held, live(silo(release())).held
    assert changed_since(held, snapshot) == ""
    link = replace(snapshot.link, banner="")
    assert why_not_answer(held, replace(snapshot, link=link), link.received_at, approve=False)
    # a daemon that told the digest once and another one, or none, later is a change all the same
    assert changed_since(known, snapshot) and changed_since(known, live(silo(release()), policy_digest="1" * 64))
    for state, told in ((shared(silo()), "needs: some hidden"), (live(silo()), "nothing needs you")):
        assert told in to_text([top_bar(state, Lock(), 100.0, 160, UNICODE)])
    assert "clinic_e refused: hidden" in to_text(once_lines(shared(coordinator()), 100.0, 100, UNICODE))


PAST = {
    "id": "r1/hospital_a/0", "kind": "lora.factors", "state": "rejected", "held_since": 1.0, "needed": 1,
    "bytes": 5, "digest": "ab" * 32, "policy_digest": POLICY_DIGEST, "given": [], "answers": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "told"),
    [("answers", "nobody"), ("answered", "-"), ("bytes", "5 B"), ("digest", "abab"), ("policy", POLICY_DIGEST[:8])],
)
def test_held_before_says_hidden_for_what_a_recording_does_not_hold(name: str, told: str) -> None:
    ((kept,),) = ((answer["releases"][0],) for answer in released_answer("approvals", {}, {"releases": [PAST]}) or ())
    (column,) = (column for column in HISTORY_COLUMNS if column.name == name)
    assert column.show(read(ReleaseRow, kept))[0] == "hidden"
    assert column.show(read(ReleaseRow, PAST))[0].startswith(told)


def test_the_outbox_counts_nothing_that_it_was_not_told() -> None:
    row = {"seq": 24, "verdict": "allow", "outcome": "acked", "digest": "ab" * 32, "rule": "", "reasons": []}
    answer = {"messages": [row], "next": None, "total": 4, "held": 0, "denied": 0}
    kept = released_answer("outbox", {}, answer)
    assert kept is not None
    (left,) = kept[0]["messages"]
    for told, there, hidden in ((answer, row, False), (kept[0], left, True)):
        text = to_text(messages.summary_lines("outbox", read(MessagePage, told), None, 100, control=False))
        assert ("denied: hidden" in text) is hidden and ("0 denied" in text) is not hidden
        parts = messages.rule_part(read(MessageRow, there))[0], messages.digest_part(read(MessageRow, there))[0]
        assert (parts == ("hidden", "hidden")) if hidden else ("hidden" not in parts)


async def test_the_screens_of_what_is_held_show_no_false_fact() -> None:
    async with console(read_only=True) as desk:
        state = shared(silo(release()))
        for keys in ((), ("3",), ("enter",)):
            await desk.show(state)
            await desk.press(*keys)
            await desk.show(state)
            desk.shows("hidden", lacks=WRONG)
