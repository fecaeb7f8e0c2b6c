"""What a policy change, a halt, a kill in the middle or a clock set back may not undo at the gate."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsilo.audit.segments import LogFullError
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, DeniedError, OperationError, PeerError, UnreachableError
from policies.model import Policy
from silo.guard.commands import Halts
from silo.guard.ledger import Approval
from silo.guard.messages import Allowed, Held
from silo.guard.releases import keep_recorded_noes
from tests.policies import kinds, setting
from tests.policies.kinds_bounds import REFT
from tests.world import Bench, Killed, MemoryChannel, command

DAY = 86_400.0


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[Bench]:
    with closing(Bench(tmp_path / "holding", setting.policy_of(setting.policy_text(first_rounds=1)))) as bench:
        yield bench


def without_updates(text: str) -> Policy:
    """The same policy, but lora.factors is not named any more."""
    policy = setting.policy_of(re.sub(r"\n  lora\.factors:.*(\n    .*)*", "", text, count=1))
    assert policy.file.egress.lora_factors is None and policy.file.egress.public_responses is not None
    return policy


# ---- a message that waits to be sent -------------------------------------------------------------------


@pytest.mark.parametrize("change", ["kind removed", "expired", "kind halted", "none"])
def test_T34_what_waits_to_be_sent_is_judged_by_the_policy_in_force(tmp_path: Path, change: str) -> None:
    bench = Bench(tmp_path / "a", setting.policy_of(setting.policy_text()), MemoryChannel(before_sending=True))
    bench.channel.fails = UnreachableError("down")
    offered = bench.factors()
    assert isinstance(offered, Allowed)
    with pytest.raises(UnreachableError):
        bench.gate.transmit(offered)
    again = bench.restart(without_updates(setting.policy_text()) if change == "kind removed" else None)
    if change == "expired":
        again.clock_now += 500 * DAY
    if change == "kind halted":
        again.gate._judge.book.screen_halts["lora.factors"] = again.gate.now()
    (item,) = again.ledger.outbox("allowed")
    if change == "none":
        again.gate.retry(item)
        assert again.channel.kinds() == ["lora.factors"]
    else:
        with pytest.raises(DeniedError):
            again.gate.retry(item)
        assert again.channel.sent == []
        expected = {"kind removed": "KIND_NOT_ALLOWED", "expired": "POLICY_NOT_VALID_NOW", "kind halted": "SCREEN_HALT"}
        assert again.events("egress.indeterminate")[-1]["reasons"] == [expected[change]]
    assert again.ledger.outbox("allowed") == []
    again.close()


@pytest.mark.parametrize("halted", [True, False])
def test_T39_what_was_allowed_before_a_halt_is_not_sent_in_it(tmp_path: Path, halted: bool) -> None:
    with closing(Bench(tmp_path / "a", setting.policy_of(setting.policy_text()))) as bench:
        offered = bench.factors()
        assert isinstance(offered, Allowed)
        if not halted:
            bench.gate.transmit(offered)
            assert bench.channel.kinds() == ["lora.factors"]
            return
        bench.gate.halted = "the disk is full"
        with pytest.raises(OperationError, match="the disk is full"):
            bench.gate.transmit(offered)
        assert bench.channel.sent == []
        assert [item.state for item in bench.ledger.outbox()] == ["allowed"]  # it waits for the repair


def test_T39_in_a_halt_nothing_is_decided_since_nothing_could_be_recorded(tmp_path: Path) -> None:
    with closing(Bench(tmp_path / "a", setting.policy_of(setting.policy_text()))) as bench:
        bench.gate.halted = "the disk is full"
        before = bench.audit.size
        with pytest.raises(OperationError, match="the disk is full"):
            bench.factors()
        with pytest.raises(OperationError, match="the disk is full"):
            bench.gate.record("stop")
        assert (bench.audit.size, bench.channel.sent, bench.ledger.outbox()) == (before, [], [])
        bench.gate.halted = ""
        assert isinstance(bench.factors(), Allowed)


def test_T41_the_gates_time_never_goes_back_nor_over_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "a", setting.policy_of(setting.policy_text()))
    bench.clock_now += DAY
    latest = bench.gate.now()
    assert latest == bench.clock_now
    bench.clock_now -= DAY
    assert bench.gate.now() == latest
    again = bench.restart()
    again.clock_now = setting.NOW
    assert again.gate.now() == latest  # the log holds nothing of that time, the ledger does
    again.close()


def test_T41_a_payload_is_as_old_as_the_time_that_never_goes_back_says(tmp_path: Path) -> None:
    with closing(Bench(tmp_path / "a", setting.policy_of(setting.policy_text()))) as bench:
        bench.clock_now += 100 * DAY
        bench.gate.now()
        bench.clock_now -= 100 * DAY  # it was wrong, and is put right
        offered = bench.responses()
        assert isinstance(offered, Allowed)
        bench.gate.transmit(offered)
        bench.archive.expire()
        assert offered.digest in bench.ledger.payloads


# ---- persons' answers ------------------------------------------------------------------------------------


def hold(bench: Bench, deadline_seconds: float | None = None) -> Callable[..., Any]:
    held = bench.factors()
    assert isinstance(held, Held)
    release = bench.releases.hold(held, deadline_seconds=deadline_seconds)
    shown = {
        "release": release.id,
        "digest": release.digest,
        "policy_digest": bench.gate.policy.digest,
        **bench.shown(release),
    }
    return lambda name, person="alice", **more: command(name, shown | more, person=person)


@pytest.mark.parametrize("answer", ["approve", "reject"])
def test_T36_an_answer_during_a_halt_is_refused_and_not_spent(holding: Bench, answer: str) -> None:
    said = hold(holding)
    give = getattr(holding.releases, answer)
    holding.gate.halted = "somebody signed two transcripts"
    with pytest.raises(OperationError) as refused:
        give(said(f"approvals.{answer}", reason_code="CONTENT"))
    assert refused.value.code == "HALTED"
    holding.gate.halted = ""
    assert give(said(f"approvals.{answer}", reason_code="CONTENT"))
    assert len(holding.events("approval.grant" if answer == "approve" else "approval.deny")) == 1


def test_a_hold_whose_time_is_over_during_a_halt_ends_on_record_afterwards(holding: Bench) -> None:
    hold(holding, deadline_seconds=10.0)
    holding.gate.halted = "somebody signed two transcripts"
    holding.clock_now += 1000
    assert holding.releases.expire() == [] and holding.ledger.releases("held")
    holding.gate.halted = ""
    (ended,) = holding.releases.expire()
    assert ended.outcome == "missed" and len(holding.events("approval.expire")) == 1
    assert holding.releases.expire() == []


@pytest.mark.parametrize("answer", ["approve", "reject"])
def test_T36_whoever_was_the_last_needed_before_a_kill_says_it_again(
    holding: Bench, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    said = hold(holding)
    with monkeypatch.context() as patch:
        patch.setattr(type(holding.releases), "_record", _killed)
        with pytest.raises(Killed):
            getattr(holding.releases, answer)(said(f"approvals.{answer}", reason_code="CONTENT"))
    assert holding.channel.sent == [] and holding.ledger.releases("held")
    done = getattr(holding.releases, answer)(said(f"approvals.{answer}", reason_code="CONTENT"))
    settled = done[1] if answer == "approve" else done
    assert settled.outcome == ("allowed" if answer == "approve" else "denied")
    with pytest.raises(ConflictError):
        getattr(holding.releases, answer)(said(f"approvals.{answer}", reason_code="CONTENT"))


@pytest.mark.parametrize("at", ["_answer", "_settle"])
@pytest.mark.parametrize("change", ["nothing", "policy"])
def test_T36_a_no_before_a_kill_is_neither_lost_nor_doubled(
    holding: Bench, monkeypatch: pytest.MonkeyPatch, at: str, change: str
) -> None:
    said = hold(holding)
    with monkeypatch.context() as patch:
        patch.setattr(type(holding.releases), at, _killed)
        with pytest.raises(Killed):
            holding.releases.reject(said("approvals.reject", reason_code="CONTENT", reason="odd", person="bob"))
    tighter = setting.policy_of(setting.policy_text(first_rounds=1).replace("max_total_l2: 5.5", "max_total_l2: 5.4"))
    with closing(holding.restart(tighter if change == "policy" else None)) as bench:
        assert (bench.policy.digest != holding.policy.digest) == (change == "policy")
        keep_recorded_noes(bench.ledger, bench.audit.records())  # as the guard does at its start
        assert bench.releases.judge_again() == []
        shown = {"policy_digest": bench.gate.policy.digest}
        with pytest.raises(ConflictError) as refused:
            bench.releases.approve(said("approvals.approve", person="alice", **shown))
        assert refused.value.code == ("NOT_HELD" if change == "nothing" else "STALE_VIEW")
        assert bench.events("approval.grant") == []
        (ended,) = bench.releases.expire()  # what the loop does with each turn
        assert (ended.outcome, ended.release.state) == ("denied", "rejected")
        (record,) = bench.events("approval.deny")
        assert (record["detail"]["person"], record["reasons"], record["seq"]) == ("bob", ["CONTENT"], ended.record)
        (no,) = bench.ledger.approvals(ended.release.id)
        assert (no.person, no.verdict, no.reason_code, no.record) == ("bob", "reject", "CONTENT", record["seq"])
        assert no.reason == ("odd" if at == "_settle" else "")  # which no log holds
        assert bench.releases.expire() == [] and bench.ledger.releases("held") == []


@pytest.mark.parametrize("at", ["_answer", "_settle"])
def test_T36_whoever_was_killed_with_his_no_may_say_it_again_and_it_is_recorded_once(
    holding: Bench, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    said = hold(holding)
    with monkeypatch.context() as patch:
        patch.setattr(type(holding.releases), at, _killed)
        with pytest.raises(Killed):
            holding.releases.reject(said("approvals.reject", reason_code="CONTENT", person="bob"))
    with closing(holding.restart()) as bench:
        keep_recorded_noes(bench.ledger, bench.audit.records())
        settled = bench.releases.reject(said("approvals.reject", reason_code="CONTENT", person="bob"))
        (record,) = bench.events("approval.deny")
        assert (settled.outcome, settled.release.state, settled.record) == ("denied", "rejected", record["seq"])


def test_T36_a_recorded_no_to_other_bytes_or_to_what_is_over_is_none(holding: Bench) -> None:
    said = hold(holding)
    (release,) = holding.ledger.releases("held")
    detail = {"release": release.id, "person": "bob", "certificate": "f" * 64}
    told: dict[str, Any] = {
        "event": "approval.deny", "seq": 7, "t": 0, "reasons": ["CONTENT"], "payload": dict(release.recorded),
        "detail": detail,
    }  # fmt: skip
    others: list[dict[str, Any]] = [
        {"payload": {"bytes": 1, "sha256": "0" * 64}}, {"event": "approval.grant"},
        {"detail": detail | {"release": "r9/hospital_a/0"}}, {"detail": {"release": release.id}},
    ]  # fmt: skip
    keep_recorded_noes(holding.ledger, [told | other for other in others])
    assert holding.ledger.approvals(release.id) == []
    keep_recorded_noes(holding.ledger, [told])
    (no,) = holding.ledger.approvals(release.id)
    assert (no.person, no.record) == ("bob", 7)
    assert len(holding.releases.expire()) == 1
    keep_recorded_noes(holding.ledger, [told | {"detail": detail | {"person": "carol"}}])
    assert [each.person for each in holding.ledger.approvals(release.id)] == ["bob"]
    with pytest.raises(ConflictError, match="rejected, no longer held"):
        holding.releases.approve(said("approvals.approve"))


def test_a_no_that_a_ledger_of_an_earlier_version_kept_first_is_recorded_with_its_effect(holding: Bench) -> None:
    hold(holding)
    (release,) = holding.ledger.releases("held")
    kept = Approval(release.id, "bob", "f" * 64, release.digest, "reject", "", holding.gate.now())
    holding.ledger.approve(kept)
    (ended,) = holding.releases.expire()
    (record,) = holding.events("approval.deny")
    assert (record["detail"]["person"], record["reasons"], record["seq"]) == ("bob", ["INTERRUPTED"], ended.record)


def test_T39_a_no_that_the_log_does_not_take_is_not_kept(holding: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    said = hold(holding)
    (release,) = holding.ledger.releases("held")
    with monkeypatch.context() as patch:
        patch.setattr(holding.audit, "append", _full)
        with pytest.raises(LogFullError):
            holding.releases.reject(said("approvals.reject", reason_code="CONTENT"))
    assert holding.ledger.approvals(release.id) == []
    holding.gate.halted = ""  # as after a restart with space
    assert holding.releases.expire() == [] and holding.view(release)["approvers"]["given"] == []
    settled = holding.releases.reject(said("approvals.reject", reason_code="TIMING"))
    (record,) = holding.events("approval.deny")
    assert (settled.record, record["reasons"]) == (record["seq"], ["TIMING"])


def test_T39_a_recorded_no_that_the_ledger_does_not_take_halts_until_a_restart_takes_it_up(holding: Bench) -> None:
    said = hold(holding)
    holding.ledger._database.execute("PRAGMA query_only=1")
    with pytest.raises(OperationError) as refused:
        holding.releases.reject(said("approvals.reject", reason_code="CONTENT", person="bob"))
    assert refused.value.code == "LEDGER_UNWRITABLE" and len(holding.events("approval.deny")) == 1
    holding.ledger._database.execute("PRAGMA query_only=0")
    with pytest.raises(OperationError) as refused:  # although the disk takes everything again
        holding.releases.approve(said("approvals.approve", person="alice"))
    assert refused.value.code == "HALTED" and holding.releases.expire() == []
    with closing(holding.restart()) as bench:
        keep_recorded_noes(bench.ledger, bench.audit.records())
        assert [ended.outcome for ended in bench.releases.expire()] == ["denied"]


def test_T36_a_hold_without_an_answer_waits_on_after_a_kill(holding: Bench) -> None:
    said = hold(holding)
    with closing(holding.restart()) as bench:
        assert bench.releases.expire() == []
        _, settled = bench.releases.approve(said("approvals.approve", person="alice"))
    assert settled is not None and settled.outcome == "allowed"


def _killed(*_: object, **__: object) -> None:
    raise Killed


def release(halts: Halts, person: str) -> bool:
    (row,) = halts.rows()
    arguments = {"kind": row["kind"], "digest": row["digest"]}
    return bool(halts.release(command("approvals.release", arguments, person=person))["released"])


def halt(bench: Bench) -> None:
    bench.gate._judge.book.screen_halts["public.responses"] = bench.gate.now()


def test_T36_a_halt_is_released_although_the_guard_was_killed_after_the_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Bench(tmp_path / "a", setting.policy_of(setting.policy_text()))) as bench:
        halts = Halts(bench.gate, bench.ledger)
        halt(bench)
        with monkeypatch.context() as patch:
            patch.setattr(bench.gate, "record", _killed)
            with pytest.raises(Killed):
                release(halts, "alice")
        assert bench.gate.screen_halts
        assert release(halts, "alice") and not bench.gate.screen_halts


def _full(event: str, **fields: Any) -> int:
    raise LogFullError("no space left for the audit log")


def two_needed() -> Policy:
    text = setting.policy_text()
    assert text.count("release_after_halt: 1") == 1
    return setting.policy_of(text.replace("release_after_halt: 1", "release_after_halt: 2"))


def test_T39_a_yes_to_a_halt_that_the_log_does_not_take_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Bench(tmp_path / "a", two_needed())) as bench:
        halts = Halts(bench.gate, bench.ledger)
        halt(bench)
        with monkeypatch.context() as patch:
            patch.setattr(bench.audit, "append", _full)
            with pytest.raises(LogFullError):
                release(halts, "alice")
        bench.gate.halted = ""  # as after a restart with space
        assert halts.rows()[0]["given"] == [] and not release(halts, "bob") and bench.gate.screen_halts
        assert release(halts, "alice") and not bench.gate.screen_halts
        assert [each["detail"]["person"] for each in bench.events("approval.grant")] == ["bob", "alice"]


def test_a_yes_to_a_halt_names_its_own_record_also_where_the_end_of_the_halt_is_behind_it(tmp_path: Path) -> None:
    with closing(Bench(tmp_path / "a", two_needed())) as bench:
        halts = Halts(bench.gate, bench.ledger)
        halt(bench)
        arguments = {"kind": "public.responses", "digest": halts.rows()[0]["digest"]}
        told = [halts.release(command("approvals.release", arguments, person=each)) for each in ("alice", "bob")]
        assert [each["record"] for each in told] == [each["seq"] for each in bench.events("approval.grant")]
        assert bench.audit.size - 1 == bench.events("release")[0]["seq"] > told[1]["record"]


def test_T41_no_yes_to_an_earlier_halt_counts_where_the_clock_stands_still(tmp_path: Path) -> None:
    with closing(Bench(tmp_path / "a", two_needed())) as bench:
        halts = Halts(bench.gate, bench.ledger)
        bench.gate.now()
        bench.clock_now -= 3600.0
        halt(bench)
        assert [release(halts, person) for person in ("alice", "bob")] == [False, True]
        halt(bench)
        assert halts.rows()[0]["given"] == []
        assert [release(halts, person) for person in ("carol", "dora")] == [False, True]


# ---- what comes in ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**53, 2**60, 2**64 - 1])
def test_T29_an_answer_with_a_number_that_nobody_can_sign_is_refused_and_recorded(tmp_path: Path, number: int) -> None:
    with closing(Bench(tmp_path / "a", setting.policy_of(setting.policy_text()))) as bench:
        bench.channel.tamper = lambda envelope: setattr(envelope, "sequence", number)
        with pytest.raises(PeerError) as refused:
            bench.gate.send(bench.gate.view.place("control.poll"), pb.Poll())
        assert refused.value.wire_code == "MALFORMED"
        assert bench.events("ingress.decision")[-1]["reasons"] == ["MALFORMED"]
        bench.channel.tamper = None
        bench.gate.send(bench.gate.view.place("control.poll"), pb.Poll())


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1.0])
def test_T04_a_scale_that_is_no_number_is_denied_and_recorded(tmp_path: Path, scale: float) -> None:
    with closing(Bench(tmp_path / "a", REFT)) as bench:
        payload = codec.encode_factors(
            kinds.reft_tensors(), base_digest="", schema_sha256="", rank=8, scale=scale, dtype="bfloat16"
        )
        bench.channel.routing, bench.channel.answer = {"run": "run-1", "round": 1}, ("reft.aggregate", payload)
        with pytest.raises(PeerError):
            bench.gate.send(bench.gate.view.place("control.poll"), pb.Poll())
        record = bench.events("ingress.decision")[-1]
        assert record["decision"] == "deny"
        assert record["facts"]["final"]["header_scale"] == (1.0 if scale == 1.0 else None)


def test_T23_answers_of_others_that_are_too_large_are_denied_before_a_screen_reads_them(tmp_path: Path) -> None:
    from tests.simulated import screening as site

    policy = site.policy(["charset"], donor_screens=("charset",))
    most = policy.file.ingress.public_donors
    assert most is not None
    for characters, runs in ((20, 1), (400_000, 0)):
        with closing(site.bench(tmp_path / str(characters), policy)) as bench:
            screens = bench.screens
            body = pb.PublicDonors()
            for row in (1, 4, 7):
                donor = body.prompts.add(prompt_index=row).donors.add(origin="hospital_b", position=0)
                donor.response.CopyFrom(pb.Response(text="x" * characters, finish=pb.FINISH_STOP))
            bench.gate.view = replace(bench.gate.view, open_step=2)
            bench.channel.routing = {"run": "run-1", "round": 1, "step": 2}
            bench.channel.answer = ("public.donors", body)
            before = screens.runs
            try:
                bench.gate.send(bench.gate.view.place("control.poll"), pb.Poll())
            except PeerError:
                assert runs == 0
            assert screens.runs - before == runs
