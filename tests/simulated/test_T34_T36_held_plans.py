"""T34, T36: what a person says of one plan is said of that plan alone, and no yes joins a run that is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsilo.audit.index import LogIndex
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, DeniedError, OperationError, UnreachableError
from fedsilo.protocol.method import Offer, OfferSettled
from fedsilo.protocol.plan import Plan
from policies.model import Policy
from silo.guard.decisions import RunView
from silo.guard.ledger import Release
from silo.guard.messages import Allowed
from silo.guard.releases import Releases, Settled
from silo.guard.run import RunManager
from silo.sampling import Training
from tests.policies import setting
from tests.simulated.coordinator_parts import SHORT, SILOS, House, joined, until_quiet
from tests.world import STEPS, Bench, Killed, Loop, failing, small_factors

OTHER = setting.PLAN.model_copy(update={"run": "run-2"})


def asking_policy(*edits: tuple[str, str]) -> Policy:
    """A person approves each plan."""
    rest, mark, of_plan = setting.policy_text().partition("  run.plan:\n")
    text = rest + mark + of_plan.replace("first_rounds: 0", "first_rounds: 1", 1)
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return setting.policy_of(text)


@pytest.fixture
def asking(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path / "a", asking_policy())
    yield made
    made.close()


def plans(loop: Loop) -> list[tuple[str, str]]:
    return [(release.run, release.state) for release in loop.bench.ledger.releases() if release.kind == "run.plan"]


def held(loop: Loop, run: str) -> Release:
    (release,) = [release for release in loop.bench.ledger.releases("held") if release.run == run]
    return release


def approve(loop: Loop, release: Release) -> dict[str, Any]:
    return loop.guard.orders.approve(loop.bench.answer(release))


def reject(loop: Loop, release: Release) -> None:
    loop.guard.orders.reject(loop.bench.answer(release, "reject", reason_code="CONTENT"))


def run_ends(loop: Loop, run: str, outcome: str = "failed") -> None:
    loop.coordinator.says("control.poll", "run.end", pb.RunEnd(outcome=outcome), run=run)
    loop.turn()


def came_under(loop: Loop, run: str) -> list[int]:
    """The sequences under which a run's plan came."""
    rows = loop.bench.events("ingress.decision")
    return [row["sequence"] for row in rows if row["kind"] == "run.plan" and row["run"] == run and "sequence" in row]


def declined(loop: Loop) -> list[str]:
    return [envelope.run for envelope, _ in loop.coordinator.bodies("control.abstain")]


# ---- the no to one plan ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["rejected", "expired"])
def test_T36_the_end_of_one_plan_acknowledges_no_other(asking: Loop, how: str) -> None:
    asking.offer_plan()
    asking.bench.clock_now += 60.0
    asking.offer_plan(OTHER)  # the first was taken back, and this site was not told
    first, second = held(asking, "run-1"), held(asking, "run-2")
    (taken,), (waiting,) = came_under(asking, "run-1"), came_under(asking, "run-2")
    if how == "rejected":
        reject(asking, first)
    else:
        asking.bench.clock_now = first.expires_at
        asking.turn()
    assert plans(asking) == [("run-1", how), ("run-2", "held")]
    assert taken <= asking.bench.ledger.acknowledged < waiting
    reject(asking, second)
    assert asking.bench.ledger.acknowledged == waiting


@pytest.mark.parametrize("times", [1, 3])
def test_T18_a_persons_no_is_said_once_however_often_the_plan_came_and_over_a_restart(asking: Loop, times: int) -> None:
    for _ in range(times):
        asking.offer_plan()
    asking.restart()
    reject(asking, held(asking, "run-1"))
    assert asking.bench.ledger.acknowledged == came_under(asking, "run-1")[0]
    asking.turn()
    assert asking.coordinator.acknowledged() == came_under(asking, "run-1")[0]
    assert declined(asking) == ["run-1"]


@pytest.mark.parametrize("end", [approve, reject])
def test_T36_a_plan_that_came_again_waits_once_and_is_held_no_longer_when_it_was_answered(
    asking: Loop, end: Callable[[Loop, Release], Any]
) -> None:
    audit = asking.bench.audit
    index = LogIndex(audit.directory, lambda: audit.size)
    for _ in range(3):
        asking.offer_plan()
    assert index.totals("ingress")["held"] == 1
    end(asking, held(asking, "run-1"))
    asking.turn()
    rows = index.page("ingress", limit=50, verdict="hold", kind="run.plan").rows
    assert index.totals("ingress")["held"] == 0 and len(rows) == 3
    newest, *before = [row["outcome"] for row in rows]
    assert before == ["repeated", "repeated"] and newest == ("approved" if end is approve else "rejected")


def test_T36_a_no_that_was_not_heard_acknowledges_nothing(asking: Loop) -> None:
    asking.offer_plan()
    asking.coordinator.fails_at("control.abstain", UnreachableError("down"))
    reject(asking, held(asking, "run-1"))
    assert asking.bench.ledger.acknowledged == 0
    asking.coordinator.fails_at("control.abstain", UnreachableError("down"))
    asking.offer_plan()
    assert asking.bench.ledger.acknowledged == 0
    asking.offer_plan()
    assert asking.bench.ledger.acknowledged == asking.coordinator.sequence - 2
    assert declined(asking) == ["run-1"] * 3 and asking.trainer.told == []


@pytest.mark.parametrize(
    ("end", "killed", "at"),
    [
        (approve, RunManager, "send_freed_or_report"),
        (reject, RunManager, "send_freed_or_report"),
        (reject, Releases, "_answer"),
        (reject, Releases, "_settle"),
    ],
)
def test_T36_T39_an_answer_that_a_kill_cut_short_stands_when_the_plan_comes_again(
    asking: Loop, end: Callable[[Loop, Release], Any], killed: type, at: str
) -> None:
    asking.offer_plan()
    release = held(asking, "run-1")
    with failing(killed, at), pytest.raises(Killed):
        end(asking, release)
    asking.restart()
    (given,) = asking.bench.ledger.approvals(release.id)
    assert (given.verdict, given.record >= 0) == (end.__name__, True)
    assert asking.trainer.told == []
    asking.offer_plan()
    runs, told = asking.bench.ledger.run_state("run-1"), [message.type for message in asking.trainer.told]
    if end is approve:
        assert (runs, told) == ("running", ["plan"])
        assert asking.bench.ledger.acknowledged == asking.coordinator.sequence
    else:
        assert (runs, told, declined(asking)[:1]) == ("declined", [], ["run-1"])
        assert len(asking.bench.events("approval.deny")) == 1


# ---- a run that is over ------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
def test_T36_the_end_of_a_run_ends_the_hold_of_its_plan_and_the_next_run_is_joined(
    asking: Loop, restarted: bool
) -> None:
    asking.offer_plan()
    first = held(asking, "run-1")
    if restarted:
        asking.restart()
    run_ends(asking, "run-1")
    assert plans(asking) == [("run-1", "missed")]
    with pytest.raises(ConflictError, match="is missed, no longer held"):
        approve(asking, first)
    assert asking.guard.runs.run is None and asking.trainer.told == [] and declined(asking) == []
    assert asking.bench.events("approval.expire")[0]["reasons"] == ["RUN_ENDED"]
    told = {"release": first.id, "outcome": "missed", "reason": "RUN_ENDED"}
    assert ("release.settled", told) in asking.desk.published
    assert ("run.ended", {"run": "run-1", "outcome": "failed"}) in asking.desk.published
    asking.turn()
    assert asking.coordinator.acknowledged() == asking.bench.ledger.acknowledged > came_under(asking, "run-1")[-1]
    asking.offer_plan(OTHER)
    assert approve(asking, held(asking, "run-2"))["state"] == "sent"
    assert asking.bench.ledger.run_state("run-2") == "running"
    asking.offer_plan()  # its name is spent
    assert declined(asking) == ["run-1"] and asking.bench.ledger.run_state("run-1") == "declined"


def test_T36_a_yes_just_before_a_kill_does_not_join_a_run_that_ended_meanwhile(
    asking: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking.offer_plan()
    monkeypatch.setattr(asking.guard.runs, "send_freed_or_report", lambda settled: False)
    approve(asking, held(asking, "run-1"))
    asking.restart()
    run_ends(asking, "run-1")
    asking.offer_plan()
    assert plans(asking) == [("run-1", "denied")]
    assert asking.guard.runs.run is None and declined(asking) == ["run-1"]


def test_T24_the_end_of_a_run_that_was_never_heard_of_leaves_no_trace(asking: Loop) -> None:
    run_ends(asking, "run-9")
    assert asking.bench.ledger.runs() == () and not asking.bench.judge.halted
    assert asking.bench.ledger.acknowledged == asking.coordinator.sequence and declined(asking) == []
    asking.offer_plan(setting.PLAN.model_copy(update={"run": "run-9"}))
    approve(asking, held(asking, "run-9"))
    assert asking.bench.ledger.run_state("run-9") == "running"


# ---- decided without the persons that were asked ---------------------------------------------------------


@pytest.mark.parametrize("changed", [False, True])
def test_T36_a_plan_that_was_declined_without_persons_cannot_be_approved(asking: Loop, changed: bool) -> None:
    """Another plan of the same run comes: one that the rules deny, or one that asks for persons, too."""
    asking.offer_plan()
    first = held(asking, "run-1")
    change: dict[str, Any] = {"seed": 2} if changed else {"held_out_sha256": "9" * 64}
    asking.offer_plan(setting.PLAN.model_copy(update=change))
    assert plans(asking) == [("run-1", "missed")] and declined(asking) == ["run-1"]
    with pytest.raises(ConflictError):
        approve(asking, first)
    assert asking.guard.runs.run is None and asking.bench.ledger.run_state("run-1") == "declined"


@pytest.mark.parametrize("asks", [True, False])
def test_T36_a_plan_accepted_under_a_policy_that_asks_for_nobody_is_not_rejected_any_more(
    asking: Loop, asks: bool
) -> None:
    asking.offer_plan()
    first = held(asking, "run-1")
    if not asks:
        asking.policy = setting.policy_of(setting.policy_text())
    asking.restart()
    asking.offer_plan()
    if asks:
        reject(asking, first)
        assert declined(asking) == ["run-1"] and asking.bench.ledger.run_state("run-1") == "declined"
        return
    with pytest.raises(ConflictError):
        reject(asking, asking.bench.ledger.release(first.id))
    assert declined(asking) == [] and asking.bench.ledger.run_state("run-1") == "running"


def test_T36_nobody_is_asked_about_a_plan_that_cannot_begin_while_a_run_is_open(asking: Loop) -> None:
    asking.offer_plan()
    approve(asking, held(asking, "run-1"))
    asking.offer_plan()  # taken in
    asking.offer_plan(OTHER)
    assert plans(asking) == [("run-1", "approved")] and declined(asking) == ["run-2"]
    assert asking.bench.ledger.acknowledged == asking.coordinator.sequence - 2  # and what waits behind it can come
    assert asking.bench.ledger.run_state("run-1") == "running"


# ---- approved, and nothing came of it --------------------------------------------------------------------


@pytest.mark.parametrize("hours", [0, 2])
def test_T36_a_plan_that_persons_approve_and_the_rules_deny_is_denied(
    tmp_path: Path, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is valid for one more hour."""
    loop = Loop(tmp_path / "a", asking_policy(("2027-12-01T00:00:00Z", "2027-01-15T09:00:00Z")))
    loop.offer_plan()
    loop.bench.clock_now += hours * 3600.0
    act, states = loop.guard.runs.send_freed_or_report, list[list[tuple[str, str]]]()

    def looked_at_first(settled: Settled) -> bool:
        states.append(plans(loop))
        return act(settled)

    monkeypatch.setattr(loop.guard.runs, "send_freed_or_report", looked_at_first)
    told = approve(loop, held(loop, "run-1"))
    if hours:
        assert told["state"] == "denied" and states == [[("run-1", "denied")]] == [plans(loop)]
        assert loop.guard.runs.run is None and loop.bench.ledger.run_state("run-1") == "declined"
        assert loop.bench.ledger.acknowledged == 0  # under that policy nothing leaves, so the no was not heard
    else:
        assert told["state"] == "sent" and states == [[("run-1", "approved")]] == [plans(loop)]
        assert loop.bench.ledger.run_state("run-1") == "running"
    loop.close()


@pytest.mark.parametrize("load", ["fp32", "bf16"])
def test_T36_whoever_approves_a_plan_that_cannot_begin_here_is_told_so(tmp_path: Path, load: str) -> None:
    loop = Loop(tmp_path / "a", asking_policy(), load=load)
    loop.offer_plan()
    release = held(loop, "run-1")
    told = approve(loop, release)
    outcome = [fields["outcome"] for name, fields in loop.desk.published if name == "release.settled"]
    if load == "fp32":
        assert (told["state"], outcome, plans(loop)) == ("sent", ["allowed"], [("run-1", "approved")])
    else:
        assert (told["state"], outcome, plans(loop)) == ("denied", ["denied"], [("run-1", "denied")])
        assert loop.bench.ledger.acknowledged == came_under(loop, "run-1")[0]  # the no was heard
        loop.turn()
        assert declined(loop) == ["run-1"]
    loop.close()


def test_T36_a_trainer_that_cannot_begin_leaves_no_plan_approved(asking: Loop) -> None:
    asking.offer_plan()
    gone = OperationError("the trainer is gone", code="TRAINER_DIED")
    with failing(asking.trainer, "send", gone), pytest.raises(OperationError, match="the trainer is gone"):
        approve(asking, held(asking, "run-1"))
    assert plans(asking) == [("run-1", "denied")]
    asking.offer_plan(OTHER)
    approve(asking, held(asking, "run-2"))
    assert asking.bench.ledger.run_state("run-2") == "running"


# ---- holds of a run that is over -------------------------------------------------------------------------


def factors_held(loop: Loop, plan: Plan) -> Release:
    """The open round's factors are offered, and wait for persons."""
    loop.bench.judge.view = RunView(
        plan, 1, setting.BASE_DIGEST, 1.0, STEPS, open_step=2, training=Training(6, 1, 4), witnesses=1
    )
    header = pb.Factors(base_digest=setting.BASE_DIGEST)
    loop.guard.runs.offer(Offer("lora.factors", 1, 0, header), codec.Factors(header, small_factors(), b""))
    return held(loop, plan.run)


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path / "a", setting.policy_of(setting.policy_text(first_rounds=1)))
    yield made
    made.close()


def test_T36_what_is_held_of_a_run_that_ended_is_held_no_longer(holding: Loop) -> None:
    holding.offer_plan()
    release = factors_held(holding, setting.PLAN)
    run_ends(holding, "run-1", "aborted")
    assert holding.bench.ledger.release(release.id).state == "missed"
    assert holding.bench.events("approval.expire")[0]["reasons"] == ["RUN_ENDED"]
    holding.offer_plan(OTHER)
    again = factors_held(holding, OTHER)
    assert approve(holding, again)["state"] == "sent"
    ((envelope, payload),) = holding.coordinator.bodies("lora.factors")
    assert envelope.run == "run-2" and codec.sha256_hex(payload) == again.digest


@pytest.mark.parametrize("line", ["up", "down"])
def test_T36_an_approved_update_is_called_sent_only_when_it_has_left(holding: Loop, line: str) -> None:
    holding.offer_plan()
    release = factors_held(holding, setting.PLAN)
    if line == "down":
        holding.coordinator.fails_at("lora.factors", UnreachableError("down"))
    assert approve(holding, release)["state"] == ("sent" if line == "up" else "waits")
    states = [(item.digest, item.state) for item in holding.bench.ledger.outbox()]
    assert states == [(release.digest, "sent" if line == "up" else "allowed")]
    holding.turn()
    assert [(item.digest, item.state) for item in holding.bench.ledger.outbox()] == [(release.digest, "sent")]


@pytest.mark.parametrize("ends", ["its trainer fails", "killed while it was left"])
def test_T36_what_is_held_of_a_run_that_was_left_is_held_no_longer_and_a_no_to_it_settles_nothing(
    holding: Loop, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding.offer_plan()
    before = factors_held(holding, setting.PLAN)
    if ends == "its trainer fails":
        holding.trainer_says("failed", code="X", message="it fell over")
        assert holding.bench.ledger.release(before.id).state == "missed"
    else:
        holding.bench.ledger.end_run("run-1", "left")
    holding.restart()
    assert holding.bench.ledger.release(before.id).state == "missed"
    holding.offer_plan(OTHER)
    release = factors_held(holding, OTHER)
    heard: list[Any] = []
    monkeypatch.setattr(holding.guard.runs.run, "feed", lambda *events: heard.extend(events))
    with pytest.raises(ConflictError):
        reject(holding, before)
    assert heard == []
    reject(holding, release)
    assert heard == [OfferSettled("lora.factors", 1, 0, "denied")]


# ---- at the coordinator ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["taken in", "given", "given, and the coordinator is started again", "never given"])
def test_T36_who_was_given_the_plan_and_is_too_late_for_the_run_is_told_how_it_ended(tmp_path: Path, how: str) -> None:
    house, (*silos, slow) = joined(tmp_path, request=SHORT, silos=SILOS[:3], listed=SILOS[:3])
    if how != "never given":
        assert isinstance(slow.say("control.poll", slow.poll_body()), pb.RunPlan)
    if how == "taken in":
        slow.acknowledged = slow.heard[-1][0].sequence
        slow.react(*slow.heard[-1])
        silos.append(slow)
    until_quiet(silos)
    house.advance(60.0)
    until_quiet(silos)
    assert house.run().state == "finished"
    assert len(house.record()["rounds"][0]["participants"]) == len(silos)
    if how == "given, and the coordinator is started again":
        house.close()
        slow.house = House(house.folder, clock=house.clock)
    if how.startswith("given"):
        item = slow.poll()
        assert item is not None and (item[0].kind, item[0].run, item[1].outcome) == ("run.end", "run-1", "finished")
    assert slow.poll() is None


def test_T36_a_yes_to_a_plan_says_of_each_kind_how_often_people_are_asked_and_by_which_line(asking: Loop) -> None:
    """Under this policy a plan is asked about and nothing that leaves in its rounds is."""
    asking.offer_plan()
    shown = asking.bench.view(held(asking, setting.PLAN.run))["consequences"]
    told = {row["kind"]: row for row in shown["later_rounds"]}
    assert {"lora.factors", "public.responses"} <= told.keys()
    for kind in ("lora.factors", "public.responses"):
        line = asking.bench.judge.policy.line_of(("egress", kind, "approvals"))
        assert told[kind]["line"] == line > 0 and f":{line})" in told[kind]["says"]
        assert told[kind]["asked"] is told[kind]["unasked"] is None  # no round of it has begun
        assert "UNASKED" in told[kind]["says"] and told[kind]["says"] in shown["later"]
    approve(asking, held(asking, setting.PLAN.run))
    assert plans(asking) == [(setting.PLAN.run, "approved")]


def first_rounds_policy(first_rounds: int, persons: int = 1) -> Policy:
    text = setting.policy_text(first_rounds=first_rounds)
    assert "persons: 1" in text
    return setting.policy_of(text.replace("persons: 1", f"persons: {persons}"))


def cannot_be_sent(bench: Bench, allowed: Allowed) -> None:
    bench.channel.fails, bench.channel.before_sending = UnreachableError("down"), True
    with pytest.raises(UnreachableError):
        bench.gate.transmit(allowed)


def approved(bench: Bench, *persons: str) -> Allowed:
    release, settled = bench.hold(bench.factors()), None
    for person in persons:
        settled = bench.approve(release, person)
    assert settled is not None and settled.allowed is not None
    return settled.allowed


def dropped(bench: Bench) -> None:
    (item,) = bench.ledger.outbox("allowed")
    with pytest.raises(DeniedError):
        bench.gate.retry(item)
    assert bench.channel.sent == [] and bench.ledger.outbox("allowed") == []
    assert bench.events("egress.indeterminate")[-1]["reasons"] == ["APPROVAL"]


def sent(bench: Bench, allowed: Allowed) -> None:
    (item,) = bench.ledger.outbox("allowed")
    bench.gate.retry(item)
    ((envelope, payload),) = bench.channel.sent
    assert envelope.kind == "lora.factors" and codec.sha256_hex(payload) == allowed.digest


@pytest.mark.parametrize("asks", [False, True])
def test_T34_what_left_without_persons_does_not_go_out_under_a_policy_that_asks_for_some(
    tmp_path: Path, asks: bool
) -> None:
    bench = Bench(tmp_path / "a", first_rounds_policy(0))
    offered = bench.factors()
    assert isinstance(offered, Allowed)
    cannot_be_sent(bench, offered)
    with closing(bench.restart(first_rounds_policy(2) if asks else None)) as again:
        if asks:
            dropped(again)
        else:
            sent(again, offered)


@pytest.mark.parametrize("needed", [1, 2])
def test_T36_the_persons_on_record_count_and_no_others(tmp_path: Path, needed: int) -> None:
    bench = Bench(tmp_path / "a", first_rounds_policy(2))
    allowed = approved(bench, "alice")
    cannot_be_sent(bench, allowed)
    with closing(bench.restart(first_rounds_policy(2, persons=needed))) as again:
        if needed == 1:
            sent(again, allowed)
        else:
            dropped(again)


@pytest.mark.parametrize("first_rounds", [1, 2])
def test_T34_a_later_round_is_judged_as_the_round_of_the_run_that_it_was(tmp_path: Path, first_rounds: int) -> None:
    bench = Bench(tmp_path / "a", first_rounds_policy(0))
    first = bench.factors()
    assert isinstance(first, Allowed)
    bench.gate.transmit(first)
    bench.judge.view = replace(bench.judge.view, round=2)
    header = pb.Factors(base_digest=setting.BASE_DIGEST)
    second = bench.gate.offer(bench.judge.view.place("lora.factors", 2), header, tensors=small_factors(0.002))
    assert isinstance(second, Allowed)
    cannot_be_sent(bench, second)
    with closing(bench.restart(first_rounds_policy(first_rounds))) as again:
        if first_rounds == 1:
            sent(again, second)
        else:
            dropped(again)
