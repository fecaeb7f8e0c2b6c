"""Who answered what for a release that is over, when and why: also of a guard that was started again since."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedsilo.edge.message_index import utc
from silo.guard.messages import Held
from silo.guard.panel import Panel
from tests.policies import setting
from tests.simulated.guarded import Bench, command
from tests.simulated.queries import panel_of

NOTE = "asked for twice today"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Two persons approve each update."""
    text = setting.policy_text(first_rounds=1)
    place = text.index("  lora.factors:")
    policy = setting.policy_of(text[:place] + text[place:].replace("persons: 1", "persons: 2", 1))
    with closing(Bench(tmp_path / "silo", policy)) as made:
        yield made


def held(bench: Bench) -> dict[str, Any]:
    offered = bench.factors()
    assert isinstance(offered, Held)
    release = bench.releases.hold("lora.factors", "run-1", 1, 0, offered, deadline_seconds=None)
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
