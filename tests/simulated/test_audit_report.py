"""What the report says of people, on the logs of real guards: releases, and the ends of halts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from fedsilo.cli.audit_report import audit_report, page
from silo.guard.commands import Halts
from tests.policies import setting
from tests.simulated import screening as site
from tests.world import Bench, command

TWO_PERSONS = setting.policy_text(first_rounds=1).replace("persons: 1", "persons: 2")


@pytest.mark.parametrize(
    ("people", "state", "given", "said"),
    [
        ([], "held", 0, "held: 0 of 2 approvals"),
        (["alice"], "held", 1, "held: 1 of 2 approvals"),
        (["alice", "bob"], "granted", 2, "granted: 2 of 2 approvals; decided in record"),
    ],
)
def test_T36_the_first_of_two_approvals_grants_nothing(
    tmp_path: Path, people: list[str], state: str, given: int, said: str
) -> None:
    with closing(Bench(tmp_path / "a", setting.policy_of(TWO_PERSONS))) as bench:
        release = bench.hold(bench.factors())
        for person in people:
            bench.approve(release, person)
    made = audit_report([bench.folder / "audit"])
    (told,) = made["approvals"]
    assert (told["state"], told["given"], told["needed"]) == (state, given, 2) and said in page(made)
    assert [item["person"] for item in made["persons"]] == people


def test_T36_a_rejection_is_told_as_one(tmp_path: Path) -> None:
    with closing(Bench(tmp_path / "a", setting.policy_of(TWO_PERSONS))) as bench:
        release = bench.hold(bench.factors())
        bench.approve(release, "alice")
        bench.reject(release, "bob")
    made = audit_report([bench.folder / "audit"])
    assert [item["state"] for item in made["approvals"]] == ["rejected"] and "rejected by bob (CONTENT)" in page(made)


def test_T36_two_releases_of_the_same_bytes_are_told_apart(tmp_path: Path) -> None:
    """Both are approved: the second one is over what the policy lets out in a step, and its approval frees nothing."""
    with closing(site.bench(tmp_path, site.policy(on_hit="hold"))) as bench:
        answers = (1, (site.PLANTED["canary"],)), (4, ()), (7, ())
        for release in [bench.hold(bench.responses(*answers)) for _ in range(2)]:
            bench.approve(release)
    made = audit_report([bench.folder / "audit"])
    assert [item["state"] for item in made["approvals"]] == ["granted", "refused"]
    assert "approved, and denied by the rules" in page(made)


def test_T18_who_ended_a_halt_is_told_with_the_halt(tmp_path: Path) -> None:
    with closing(site.bench(tmp_path, site.policy(["canary"], max_hits_per_day=1, release=2))) as bench:
        bench.responses((1, (site.PLANTED["canary"],)), (4, (site.PLANTED["canary"],)), (7, ()))
        halts = Halts(bench.judge, bench.ledger)
        (row,) = halts.rows()
        for person in ("alice", "bob"):
            halts.release(command("approvals.release", {"kind": row["kind"], "digest": row["digest"]}, person=person))
    made = audit_report([bench.folder / "audit"])
    assert [item["event"] for item in made["halts"]] == ["halt", "release"] and made["approvals_total"] == 0
    assert [item["person"] for item in made["halt_grants"]] == ["alice", "bob"]
    assert "agreed to end a halt 1" in page(made) and "Who agreed to end a halt" in page(made)


@pytest.mark.parametrize("rounds", [0, 1])
def test_T36_what_left_without_a_person_is_told_by_the_line_that_lets_it(tmp_path: Path, rounds: int) -> None:
    policy = setting.policy_of(setting.policy_text(first_rounds=rounds))
    with closing(Bench(tmp_path / "a", policy)) as bench:
        offered = bench.factors()
        if rounds:
            settled = bench.approve(bench.hold(offered))
            offered = settled.allowed if settled else None
        bench.gate.transmit(offered)
    made = audit_report([bench.folder / "audit"])
    line = policy.line_of(("egress", "lora.factors", "approvals"))
    told = [(row["kind"], row["messages"], row["file"], row["line"]) for row in made["left_unasked"]]
    assert told == ([] if rounds else [("lora.factors", 1, "policy", line)])
    assert made["left_asked"] == {"asked": rounds, "unasked": 1 - rounds, "not_told": 0, "control": 0}
    assert f"{rounds} after people" in made["in_words"] and (f"line {line} of the policy" in page(made)) is not rounds
