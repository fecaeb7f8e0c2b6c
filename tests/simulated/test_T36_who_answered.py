"""Who answered what for a release that is over, when and why: also of a guard that was started again since."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedsilo.edge import message_index
from fedsilo.edge.message_index import HOLD_ENDS, utc
from fedsilo.treaty.errors import ConflictError
from silo.guard.messages import Held
from silo.guard.panel import Panel
from tests.policies import setting
from tests.simulated.guarded import Bench, command
from tests.simulated.queries import panel_of, queries_of, same, slow

NOTE = "asked for twice today"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Two persons approve each update."""
    text = setting.policy_text(first_rounds=1)
    place = text.index("  lora.factors:")
    policy = setting.policy_of(text[:place] + text[place:].replace("persons: 1", "persons: 2", 1))
    with closing(Bench(tmp_path / "silo", policy)) as made:
        yield made


def held(bench: Bench, *, deadline_seconds: float | None = None) -> dict[str, Any]:
    offered = bench.factors()
    assert isinstance(offered, Held)
    release = bench.releases.hold("lora.factors", "run-1", 1, 0, offered, deadline_seconds=deadline_seconds)
    shown = {"release": release.id, "digest": release.digest, "policy_digest": bench.gate.policy.digest}
    return shown | bench.opened(release.id)


def told(panel: Panel, release: str) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    shown = panel.approval({"release": release})
    (row,) = panel.approvals({})["releases"]
    return shown["state"], shown["approvers"]["given"], row["answers"]


def test_T36_a_rejected_release_says_who_answered_what_when_and_why_after_a_restart_too(bench: Bench) -> None:
    shown = held(bench)
    bench.clock_now += 60
    bench.releases.approve(command("approvals.approve", shown, person="alice"))
    bench.clock_now += 60
    no = shown | {"reason_code": "UNEXPECTED", "reason": NOTE}
    bench.releases.reject(command("approvals.reject", no, person="bob"))
    before = told(panel_of(bench), shown["release"])
    at = {"alice": setting.NOW + 60, "bob": setting.NOW + 120}
    said = {"alice": ("approve", "", ""), "bob": ("reject", "UNEXPECTED", NOTE)}
    assert before == (
        "rejected",
        [
            {"person": name, "verdict": verdict, "at": at[name], "time": utc(at[name]), "reason": code, "note": note}
            for name, (verdict, code, note) in said.items()
        ],
        [
            {"person": name, "verdict": verdict, "at": utc(at[name]), "reason": code}
            for name, (verdict, code, _) in said.items()
        ],
    )
    with closing(bench.restart()) as again:
        assert told(panel_of(again), shown["release"]) == before
        assert NOTE not in str(list(again.audit.records()))  # what a person writes stays in the ledger


def test_T36_the_counterpart_an_approved_release_names_its_approvers_without_a_reason(bench: Bench) -> None:
    shown = held(bench)
    for person in ("alice", "bob"):
        bench.releases.approve(command("approvals.approve", shown, person=person))
    state, given, answers = told(panel_of(bench), shown["release"])
    assert state == "approved" and [(each["person"], each["reason"], each["note"]) for each in given] == [
        ("alice", "", ""), ("bob", "", ""),
    ]  # fmt: skip
    assert [each["reason"] for each in answers] == ["", ""]


def ended(bench: Bench, end: str) -> None:
    shown = held(bench)
    match end:
        case "approved":
            for person in ("alice", "bob"):
                bench.releases.approve(command("approvals.approve", shown, person=person))
        case "rejected":
            bench.releases.reject(command("approvals.reject", shown | {"reason_code": "TIMING"}, person="bob"))
        case "expired":
            bench.clock_now += 9 * 24 * 3600
            bench.releases.expire()
        case "missed":
            bench.releases.miss("run-1", 1, None)
        case "denied":
            bench.ledger.payloads.remove([shown["digest"]])
            with pytest.raises(ConflictError):
                for person in ("alice", "bob"):
                    bench.releases.approve(command("approvals.approve", shown, person=person))


@pytest.mark.parametrize("end", [*HOLD_ENDS[:-2], ""])
def test_a_hold_that_is_over_is_counted_as_held_no_more_and_its_row_says_how_it_ended(bench: Bench, end: str) -> None:
    outbox = queries_of(bench)["outbox"]
    if end:
        ended(bench, end)
    else:
        held(bench)  # the counterpart: people are asked still
    for ask in (outbox, queries_of(bench)["outbox"]):  # followed, and read anew
        answer = ask({})
        assert same(answer["messages"], slow(bench.audit, "egress"))
        row = answer["messages"][-1]
        assert (row["verdict"], row["outcome"], answer["held"]) == ("hold", end, 0 if end else 1)
        assert bool(ask({"seq": row["seq"]})["would_pass"]) is not bool(end)
    assert [row["outcome"] for row in outbox({"verdict": "allow"})["messages"]] == ([""] if end == "approved" else [])


def test_a_hold_that_a_deadline_of_the_run_ended_is_missed_in_the_outbox_as_in_the_ledger(bench: Bench) -> None:
    shown = held(bench, deadline_seconds=60.0)
    bench.clock_now += 61
    assert [settled.outcome for settled in bench.releases.expire()] == ["missed"]
    assert bench.ledger.release(shown["release"]).state == "missed"
    assert [row["outcome"] for row in queries_of(bench)["outbox"]({})["messages"]] == ["missed"]


def test_the_same_bytes_held_again_wait_although_a_person_refused_them_before(bench: Bench) -> None:
    outbox = queries_of(bench)["outbox"]
    ended(bench, "rejected")
    held(bench)
    answer = outbox({})
    assert ([row["outcome"] for row in answer["messages"]], answer["held"]) == (["", "rejected"], 1)


def test_of_a_hold_too_old_to_be_indexed_it_is_known_whether_it_is_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_index, "ROWS_MAX", 4)
    outbox = queries_of(bench)["outbox"]
    ended(bench, "rejected")
    held(bench)
    for _ in range(6):
        bench.responses()
    old = [row for row in outbox({"limit": 100})["messages"] if row["verdict"] == "hold"]
    assert [row["outcome"] for row in old] == ["", "ended"] and outbox({})["held"] == 1
    assert [bool(outbox({"seq": row["seq"]})["would_pass"]) for row in old] == [True, False]
