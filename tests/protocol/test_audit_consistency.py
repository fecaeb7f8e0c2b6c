"""T38: a log whose own story cannot be, and two sound logs that contradict each other, are found out offline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.consistency import CLOCKS_APART_MILLISECONDS, DIFFERENCES_MAX, check_consistency
from fedsilo.cli.audit import app
from fedsilo.cli.audit_report import audit_report, page
from tests.protocol.audit_parties import COORDINATOR, SILO, Clock, open_log

FACTORS = "ef" * 32
POLICY = {"effective": "ab" * 32}
AFTER_SECONDS = CLOCKS_APART_MILLISECONDS / 1000 + 1


class Pair:
    """A silo's log and the coordinator's, written message by message."""

    def __init__(self, root: Path) -> None:
        self.paths = [root / "silo", root / "coordinator"]
        self.clock = Clock()
        self.silo = open_log(self.paths[0], clock=self.clock)
        self.coordinator = open_log(self.paths[1], COORDINATOR, clock=self.clock)
        for log in (self.silo, self.coordinator):
            log.append("start")

    def routing(self, sequence: int, kind: str) -> dict[str, Any]:
        return {"run": "r1", "round": 1, "kind": kind, "sequence": sequence}

    def decide(self, sequence: int, kind: str = "lora.factors", verdict: str = "allow", **more: Any) -> int:
        fields: dict[str, Any] = {"payload": self.payload(kind), "policy": POLICY, "peer": COORDINATOR, **more}
        return self.silo.append("egress.decision", decision=verdict, **self.routing(sequence, kind), **fields)

    def payload(self, kind: str) -> dict[str, Any]:
        return {"bytes": 100, "sha256": FACTORS} if kind == "lora.factors" else {"bytes": 7, "hmac_sha256": "cd" * 32}

    def outcome(self, decision: int | None, sequence: int, kind: str, event: str = "egress.sent", **more: Any) -> None:
        link = None if decision is None else {"decision": decision}
        fields: dict[str, Any] = {"payload": self.payload(kind), "peer": COORDINATOR, **more}
        self.silo.append(event, link=link, **self.routing(sequence, kind), **fields)

    def send(self, sequence: int, kind: str = "control.poll") -> None:
        self.outcome(self.decide(sequence, kind), sequence, kind)

    def receive(self, sequence: int, kind: str = "control.poll", **more: Any) -> None:
        fields: dict[str, Any] = {"payload": self.payload(kind), "peer": SILO, **more}
        self.coordinator.append("ingress.decision", decision="allow", **self.routing(sequence, kind), **fields)

    def both(self, sequence: int, kind: str = "control.poll") -> None:
        self.send(sequence, kind)
        self.receive(sequence, kind)

    def approve(
        self,
        event: str = "approval.grant",
        person: str = "alice",
        hold: str = "r1/hospital_a",
        kind: str = "lora.factors",
    ) -> int:
        detail = {"release": hold, "person": person}
        place = {"run": "r1", "round": 1, "kind": kind}
        return self.silo.append(event, detail=detail, payload=self.payload(kind), policy=POLICY, **place)

    def told(self, *, alone: bool = False) -> list[list[str]]:
        """Problems of the story and the comparison; the logs themselves verify."""
        for log in (self.silo, self.coordinator):
            log.checkpoint()
        paths = self.paths[:1] if alone else self.paths
        results = verify_logs(paths)
        assert all(result["verified"] for result in results)
        check_consistency(results, paths)
        assert [result["verified"] for result in results] == [not result["problems"] for result in results]
        return [result["problems"] for result in results]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


# ---- one log ---------------------------------------------------------------------------------------------


def test_T38_what_was_sent_by_a_decision_that_allowed_it_is_no_problem(pair: Pair) -> None:
    pair.send(1)
    pair.send(2, "lora.factors")
    assert pair.told(alone=True) == [[]]


@pytest.mark.parametrize(
    ("decided", "kind", "sent", "problem"),
    [
        # what was decided, on which kind, and what the record of the sending has otherwise
        ({"verdict": "deny"}, "lora.factors", {}, "and its decision, record 1, is deny"),
        ({"verdict": "hold"}, "lora.factors", {}, "and its decision, record 1, is hold"),
        ({}, "lora.factors", {"decision": 0}, "and record 0 is no decision on a message that was still to leave"),
        ({}, "lora.factors", {"decision": None}, "and names no decision"),
        (
            {},
            "lora.factors",
            {"payload": {"bytes": 100, "sha256": "00" * 32}},
            "and its decision, record 1, is on another message",
        ),
        ({}, "control.poll", {}, "and its decision, record 1, is on another message"),
    ],
)
def test_T38_what_was_sent_without_having_been_allowed_is_named(
    pair: Pair, decided: dict[str, Any], kind: str, sent: dict[str, Any], problem: str
) -> None:
    decision = pair.decide(1, kind, **decided)
    pair.outcome(**{"decision": decision, "sequence": 1, "kind": "lora.factors", **sent})
    assert pair.told(alone=True) == [[f"record 2: lora.factors was sent, {problem}"]]


@pytest.mark.parametrize(
    ("kind", "more", "problem"),
    [
        ("lora.factors", {}, "twice in one attempt under its decision, record 1"),
        ("control.poll", {"attempt": 1}, "and record 1 is no decision on a message that was still to leave"),
    ],
)
def test_T38_what_was_sent_twice_under_one_decision_is_named(
    pair: Pair, kind: str, more: dict[str, Any], problem: str
) -> None:
    decision = pair.decide(1, kind)
    pair.outcome(decision, 1, kind)
    pair.outcome(decision, 1 + len(more), kind, **more)
    (told,) = pair.told(alone=True)
    assert len(told) == 1 and told[0].startswith(f"record 3: {kind} was sent") and told[0].endswith(problem)


def test_T29_a_content_message_may_be_sent_again_under_its_decision(pair: Pair) -> None:
    decision = pair.decide(1)
    pair.outcome(decision, 1, "lora.factors", "egress.indeterminate")
    pair.outcome(decision, 2, "lora.factors", attempt=1)
    assert pair.told(alone=True) == [[]]


def hold_and_free(pair: Pair, grants: list[str], named: list[int], limit: int = 1) -> list[int]:
    """Persons grant, and a decision names records: the nth grant, or by a number above 9 another record."""
    pair.decide(1, verdict="hold")
    pair.approve("approval.request")
    granted = [pair.approve(person=person) for person in grants]
    rules = [{"rule": "approvals", "outcome": "ok", "measured": len(named), "limit": limit}]
    numbers = [granted[number] if number < 10 else number - 10 for number in named]
    link = {"approvals": numbers} if named else None
    pair.outcome(pair.decide(2, link=link, rules=rules), 2, "lora.factors")
    return granted


@pytest.mark.parametrize(
    ("grants", "named", "limit", "problem"),
    [
        (["alice"], [0], 1, ""),
        (["alice", "bob"], [0, 1], 2, ""),
        ([], [12], 1, "approvals of which 2 are no grants before it"),  # record 2 is the request
        (["alice"], [0, 99], 2, "approvals of which 89 are no grants before it"),
        (["alice"], [0], 2, "is allowed with approvals of 1 persons, and its rule asks for 2"),
        (["alice", "alice"], [0, 1], 2, "is allowed with approvals of 1 persons, and its rule asks for 2"),
        (["alice"], [], 0, "was held, and is allowed under the same policy without anybody's approval"),
    ],
)
def test_T36_a_held_release_needs_the_grants_that_it_names(
    pair: Pair, grants: list[str], named: list[int], limit: int, problem: str
) -> None:
    hold_and_free(pair, grants, named, limit)
    [found] = pair.told(alone=True)
    assert [problem in each for each in found] == [True] * bool(problem)


def test_T36_approvals_of_what_was_never_held_are_named(pair: Pair) -> None:
    pair.decide(1, link={"approvals": [0]})
    assert "are no grants before it" in pair.told(alone=True)[0][0]


def test_T36_a_grant_frees_one_release(pair: Pair) -> None:
    granted = hold_and_free(pair, ["alice"], [0])
    assert pair.told(alone=True) == [[]]
    pair.decide(3, link={"approvals": granted})
    assert "are no grants before it" in pair.told(alone=True)[0][0]


@pytest.mark.parametrize("end", ["approval.deny", "approval.expire"])
def test_T36_a_no_voids_the_grants_before_it(pair: Pair, end: str) -> None:
    """Rejected or expired, and sent all the same with the yes that was given before; held anew, asked anew is fine."""
    pair.decide(1, verdict="hold")
    pair.approve("approval.request")
    granted = pair.approve()
    ended = pair.approve(end, person="bob")
    pair.approve("approval.request", hold="r1/hospital_a.2")
    again = pair.approve(hold="r1/hospital_a.2")
    pair.outcome(pair.decide(2, link={"approvals": [again]}), 2, "lora.factors")
    assert pair.told(alone=True) == [[]]
    wrong = pair.decide(3, link={"approvals": [granted]})
    pair.outcome(wrong, 3, "lora.factors")
    said = f"record {wrong}: lora.factors is allowed with approvals of which {granted} ended with record {ended}, {end}"
    assert pair.told(alone=True) == [[said]]


@pytest.mark.parametrize(
    "other", [{"hold": "r1/hospital_a.2"}, {"kind": "public.responses"}], ids=["another hold", "another message"]
)
@pytest.mark.parametrize("end", ["approval.deny", "approval.expire"])
def test_T36_a_no_to_something_else_voids_no_grant(pair: Pair, end: str, other: dict[str, str]) -> None:
    pair.decide(1, verdict="hold")
    pair.approve("approval.request")
    granted = pair.approve()
    pair.approve(end, person="bob", **other)
    pair.outcome(pair.decide(2, link={"approvals": [granted]}), 2, "lora.factors")
    assert pair.told(alone=True) == [[]]


@pytest.mark.parametrize("event", ["egress.decision", "ingress.decision"])
@pytest.mark.parametrize("outcome", ["ok", "look", "deny", "hold"])
def test_T38_an_allow_against_its_own_rules_is_named(pair: Pair, event: str, outcome: str) -> None:
    rules = [
        {"rule": "declared", "outcome": "ok", "measured": True, "limit": True},
        {"rule": "delta_l2", "outcome": outcome, "measured": 9, "limit": 4},
    ]
    for verdict in ("deny", "hold"):  # a refusal by the same rules is none
        pair.silo.append(event, decision=verdict, rules=rules, policy=POLICY, **pair.routing(1, "control.poll"))
    number = pair.silo.append(event, decision="allow", rules=rules, policy=POLICY, **pair.routing(2, "lora.factors"))
    said = f"record {number}: lora.factors is allowed, and its own rules say otherwise: delta_l2"
    assert pair.told(alone=True) == [[said] * (outcome in ("deny", "hold"))]


def test_T38_records_that_retention_removed_are_not_missed(tmp_path: Path) -> None:
    """A decision and a grant before the first record that is left; the other log has what was sent then."""
    clock = Clock()
    pair = Pair(tmp_path)
    pair.silo.close()
    with open_log(tmp_path / "reduced", clock=clock, segment_bytes_max=1) as log:
        pair.silo, pair.clock = log, clock
        log.append("start")
        pair.both(1, "lora.factors")
        decision = pair.decide(2)
        granted = pair.approve()
        clock.now += 30 * 86400
        log.append("start")
        first = log.remove_old(int((clock.now - 86400) * 1000))
        assert first > decision
        pair.decide(3, link={"approvals": [granted]})
        pair.outcome(decision, 2, "lora.factors")
        log.checkpoint()
        pair.coordinator.checkpoint()
        paths = [tmp_path / "reduced", tmp_path / "coordinator"]
        results = verify_logs(paths)
        assert results[0]["hashes_only"] == first and results[0]["verified"]
        check_consistency(results, paths)
        assert [result["problems"] for result in results] == [[], []]


# ---- two logs --------------------------------------------------------------------------------------------


def test_T38_two_logs_that_say_the_same_have_no_difference(pair: Pair) -> None:
    for sequence in range(1, 4):
        pair.both(sequence, "lora.factors" if sequence == 2 else "control.poll")
    assert pair.told() == [[], []]


def test_T38_an_update_that_the_guard_never_recorded_is_in_the_coordinators_log(pair: Pair) -> None:
    pair.both(1)
    pair.receive(2, "lora.factors")
    pair.both(3)
    said = "record 2: lora.factors of 100 bytes, round 1.0 of run r1 that coordinator received is not in the log of "
    assert pair.told() == [[said + "hospital_a"]] * 2
    assert pair.told(alone=True) == [[]]


def test_T38_an_update_that_the_coordinator_never_recorded_is_in_the_silos_log(pair: Pair) -> None:
    pair.both(1)
    pair.send(2, "lora.factors")
    pair.both(3)
    said = "record 4: lora.factors of 100 bytes, round 1.0 of run r1 that hospital_a sent is not in the log of "
    assert pair.told() == [[said + "coordinator"]] * 2


@pytest.mark.parametrize("acked", [False, True])
def test_T38_a_file_that_was_never_brought_is_no_difference_unless_its_receipt_is_on_record(
    pair: Pair, acked: bool
) -> None:
    pair.both(1)
    decision = pair.decide(2)
    pair.outcome(decision, 2, "lora.factors", detail={"carried": True})
    if acked:
        pair.outcome(decision, 2, "lora.factors", "egress.acked")
    pair.both(3)
    said = "record 4: lora.factors of 100 bytes, round 1.0 of run r1 that hospital_a sent is not in the log of "
    assert pair.told() == [[said + "coordinator"] * acked] * 2


@pytest.mark.parametrize("payload", [{"bytes": 101, "sha256": FACTORS}, {"bytes": 100, "sha256": "00" * 32}])
def test_T38_another_size_or_digest_on_the_other_side_is_a_difference(pair: Pair, payload: dict[str, Any]) -> None:
    pair.send(1, "lora.factors")
    pair.receive(1, "lora.factors", payload=payload)
    assert all("as hospital_a sent it is not record 1 of coordinator" in found[0] for found in pair.told())


def test_T38_many_differences_are_counted(pair: Pair) -> None:
    pair.both(1)
    for sequence in range(2, 2 + DIFFERENCES_MAX + 3):
        pair.receive(sequence, "lora.factors")
    pair.both(99)
    assert [(len(found), found[-1]) for found in pair.told()] == [(DIFFERENCES_MAX + 1, "and 3 more of this kind")] * 2


def unknown_outcome(pair: Pair) -> None:
    pair.outcome(pair.decide(2), 2, "lora.factors", "egress.indeterminate")
    pair.receive(2, "lora.factors")
    pair.outcome(pair.decide(3), 3, "lora.factors", "egress.indeterminate")


def sent_again(pair: Pair) -> None:
    """The coordinator records what arrives twice once; a silo that starts again decides anew."""
    decision = pair.decide(2)
    pair.outcome(decision, 2, "lora.factors", "egress.indeterminate")
    pair.receive(2, "lora.factors")
    pair.outcome(decision, 3, "lora.factors", attempt=1)
    pair.send(4, "lora.factors")


def killed_while_it_sent_again(pair: Pair) -> None:
    pair.outcome(pair.decide(2), 2, "lora.factors", "egress.indeterminate")
    pair.receive(3, "lora.factors", attempt=1)


def refused(pair: Pair) -> None:
    pair.send(2, "lora.factors")
    pair.silo.append("ingress.decision", kind="control.refusal", decision="allow", peer=COORDINATOR)


@pytest.mark.parametrize("story", [unknown_outcome, sent_again, killed_while_it_sent_again, refused])
def test_T38_what_is_honestly_possible_is_no_difference(pair: Pair, story: Callable[[Pair], None]) -> None:
    pair.both(1)
    story(pair)
    pair.both(9)
    pair.clock.now += AFTER_SECONDS
    pair.both(10)
    assert pair.told() == [[], []]


def test_T38_a_log_may_end_before_the_other(pair: Pair) -> None:
    pair.both(1)
    pair.decide(2)  # under way when the silo's log was copied
    pair.receive(2, "lora.factors")
    pair.receive(3, "lora.factors")
    assert pair.told() == [[], []]
    pair.clock.now += AFTER_SECONDS
    pair.silo.append("stop")  # so it went on, and did not record the third
    assert [len(found) for found in pair.told()] == [1, 1]


def test_T38_the_commands_compare_and_exit_7(pair: Pair, tmp_path: Path) -> None:
    pair.both(1)
    pair.receive(2, "lora.factors")
    pair.both(3)
    pair.told()
    paths = [str(path) for path in pair.paths]
    runner = CliRunner()
    verified = runner.invoke(app, ["verify", *paths, "--json"])
    reported = runner.invoke(app, ["report", *paths, "--out", str(tmp_path / "out")])
    assert (verified.exit_code, reported.exit_code) == (7, 7)
    [problem] = json.loads(verified.stdout)["data"][0]["problems"]
    assert "lora.factors" in problem and problem in (tmp_path / "out" / "report.html").read_text()


# ---- the report, and a wrong folder ------------------------------------------------------------------------


def test_T34_who_let_a_looser_policy_come_into_force_stands_beside_it(tmp_path: Path) -> None:
    detail = {"name": "pubswap", "mode": "enforce", "change": "looser", "proposal": "5c" * 16, "proposer": "mallory<b>"}
    with open_log(tmp_path / "log") as log:
        log.append("policy.load", policy={"effective": "11" * 32}, detail={"name": "pubswap", "mode": "enforce"})
        log.append("policy.load", policy=POLICY, detail=detail, link={"approvals": ["bob", "alice"]})
    report = audit_report([tmp_path / "log"])
    assert [(each["proposer"], each["approvers"], each["proposal"]) for each in report["policies"]] == [
        ("", [], ""),
        ("mallory<b>", ["alice", "bob"], "5c" * 16),
    ]
    shown = page(report)
    assert "Proposed by mallory&lt;b&gt;, approved by alice, bob" in shown and shown.count("Proposed by") == 1


@pytest.mark.parametrize("command", ["tail", "replay"])
def test_a_folder_without_a_log_has_no_decisions_to_count(tmp_path: Path, command: str) -> None:
    from tests.policies.setting import policy_text

    (tmp_path / "empty").mkdir()
    (tmp_path / "policy.yaml").write_text(policy_text())
    words = ["--policy", str(tmp_path / "policy.yaml")] if command == "replay" else []
    result = CliRunner().invoke(app, [command, "--log", str(tmp_path / "empty"), *words])
    assert result.exit_code == 8 and "is no log folder" in result.stderr and "hint: " in result.stderr
