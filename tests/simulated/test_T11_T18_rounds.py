"""T11, T18: when a guard sends is a matter of its own clock, of a round long past nothing is counted or let in, and
a silo that said no to a round reads who rejected it and with which code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator import store as db
from fedsilo.audit.index import Mark
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from policies.history import FULL, HistoryBook
from policies.replay import replay
from silo.guard.answers import rounds
from silo.guard.messages import Allowed, Denied
from silo.guard.trainer_process.supervisor import TrainerSaid
from silo.link import LinkMessage
from tests.policies import setting
from tests.simulated.coordinator_parts import House, SimulatedSilo, federation, joined, until_quiet
from tests.simulated.queries import as_json, rounds_of
from tests.world import ADAPTER, Bench, Loop, TimedQueue, small_factors

CODE = "TOTAL_L2"
HELD = ("first_rounds: 0", "first_rounds: 1")


def states(answer: dict[str, Any]) -> dict[str, str]:
    return {row["silo"]: row["state"] for row in answer["silos"]}


# ---- a coordinator -----------------------------------------------------------------------------------


@pytest.fixture
def late(tmp_path: Path) -> Iterator[tuple[House, list[SimulatedSilo], Any]]:
    """Round 1 is open, and hospital_c and hospital_d have not sent their updates."""
    house, silos = federation(tmp_path)
    for silo in silos[2:]:
        silo.mute = {"lora.factors"}
    house.submit()
    for silo in silos:
        silo.join()
    until_quiet(silos)
    yield house, silos, rounds_of(house)
    house.close()


def test_a_coordinator_tells_who_declined_from_who_was_silent(late: Any) -> None:
    house, silos, ask = late
    said = pb.Declined(kind="lora.factors", round=1)
    silos[2].say("control.declined", said, run="run-1", number=1)
    assert states(ask({}))["hospital_c"] == "declined" and states(ask({}))["hospital_d"] == "awaited"
    house.advance(1000.0)
    until_quiet(silos)
    over = ask({"round": 1})
    assert states(over) == {
        "hospital_a": "accepted", "hospital_b": "accepted", "hospital_c": "declined", "hospital_d": "absent",
    }  # fmt: skip
    assert {row["why"] for row in over["silos"]} == {None}  # nobody told it


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([("egress.decision", "lora.factors", "deny"), ("egress.sent", "metrics.eval", "")], ("refused", CODE)),
        ([("egress.sent", "lora.factors", ""), ("egress.decision", "metrics.eval", "deny")], None),
        ([("egress.decision", "lora.factors", "deny"), ("egress.decision", "lora.factors", "hold")], None),
        ([("approval.deny", "lora.factors", ""), ("egress.decision", "lora.factors", "allow")], None),
        (
            [("egress.decision", "lora.factors", "hold"), ("approval.deny", "lora.factors", "")],
            ("rejected", "TOTAL_L2"),
        ),
    ],
)
def test_the_newest_word_on_the_update_itself_is_told(
    words: list[tuple[str, str, str]], told: tuple[str, str] | None
) -> None:
    marks = [
        Mark(
            at, event, kind, 0, verdict, () if verdict in ("allow", "hold") or event == "egress.sent" else ("TOTAL_L2",)
        )
        for at, (event, kind, verdict) in enumerate(words)
    ]
    assert rounds._not_sent(marks) == told


def test_a_silo_that_drops_out_of_a_round_sits_out_and_did_not_decline(late: Any) -> None:
    house, silos, ask = late
    silos[2].say("control.abstain", pb.Abstain(round=1), run="run-1", number=1)
    assert states(ask({}))["hospital_c"] == "sits out"
    house.advance(1000.0)
    assert states(ask({"round": 1}))["hospital_c"] == "sits out"


@pytest.mark.slow
def test_B6_the_others_are_told_absent_whether_a_silo_declined_or_was_silent(late: Any) -> None:
    house, silos, _ = late
    silos[2].say("control.declined", pb.Declined(kind="lora.factors", round=1), run="run-1", number=1)
    house.advance(1000.0)
    until_quiet(silos)
    told = next(body for _, body in silos[0].heard if isinstance(body, pb.RoundResult))
    assert {row.silo: row.verdict for row in told.verdicts} == {
        "hospital_a": "accepted", "hospital_b": "accepted", "hospital_c": "absent", "hospital_d": "absent",
    }  # fmt: skip


# ---- the silo ----------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """A guard that has made its update of round 1, under its policy with one change in the part on updates."""
    made: list[Loop] = []

    def loop(edit: tuple[str, str]) -> Loop:
        text = setting.policy_text()
        place = text.index("  lora.factors:")
        policy = setting.policy_of(text[:place] + text[place:].replace(*edit, 1))
        made.append(Loop(tmp_path / f"site-{len(made)}", policy))
        trained(made[-1])
        return made[-1]

    yield loop
    for each in made:
        each.close()


def trained(loop: Loop) -> None:
    plan = setting.PLAN.model_copy(update={"method": "fedavg-grpo"})
    loop.offer_plan(plan)
    loop.open_round(plan=plan, public=False)
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()
    for task in ("LoadAdapter", *["PrivateStep"] * 4):
        loop.trainer_says("done", task=task, round=1, metrics={})
    update = codec.encode_factors(
        small_factors(), base_digest=codec.sha256_hex(ADAPTER), schema_sha256=setting.SCHEMA.digest, rank=2,
        scale=2.0, dtype="float32",
    )  # fmt: skip
    loop.bench.clock_now += 10
    loop.trainer_says("done", update, task="ExportDelta", round=1, metrics={"records": 1})


def own_row(loop: Loop) -> dict[str, Any]:
    answer = as_json(loop.guard.queries)["round"]({"run": "run-1", "round": 1})
    (row,) = [row for row in answer["silos"] if row["own"]]
    assert {each["why"] for each in answer["silos"] if not each["own"]} == {None}
    found: dict[str, Any] = row
    return found


def answered(loop: Loop, name: str, **more: Any) -> Any:
    (release,) = loop.bench.ledger.releases("held")
    loop.bench.clock_now += 60
    return loop.bench.answer(release, name, **more)


def last_phase(loop: Loop) -> tuple[str, str]:
    last = [each for each in own_row(loop)["phases"] if each["phase"] != "others"][-1]
    return last["phase"], last["state"]


def end_round(loop: Loop, own: str) -> None:
    words = {silo: own if silo == "hospital_a" else "accepted" for silo in setting.PLAN.silos}
    verdicts = [pb.SiloVerdict(silo=silo, verdict=word) for silo, word in words.items()]
    loop.coordinator.says("control.poll", "round.result", loop.ended(verdicts=verdicts), run="run-1", round=1)
    loop.turn(2)


def test_a_release_that_a_person_rejected_is_told_as_rejected_with_its_code(make: Any) -> None:
    loop = make(HELD)
    assert (own_row(loop)["state"], own_row(loop)["why"]) == ("approval", None)
    loop.guard.orders.reject(answered(loop, "reject", reason_code="TIMING", reason="words that stay in the ledger"))
    for _ in range(2):
        row = own_row(loop)
        assert (row["state"], row["why"]) == ("rejected", "TIMING") and last_phase(loop) == ("approval", "rejected")
        assert "words" not in str(row)
        end_round(loop, "absent")  # all that the coordinator can say of it
    (declined,) = loop.coordinator.bodies("control.declined")
    assert pb.Declined.FromString(declined[1]) == pb.Declined(kind="lora.factors", round=1)


def test_the_counterpart_a_release_that_a_person_approved_is_told_as_sent(make: Any) -> None:
    loop = make(HELD)
    loop.guard.orders.approve(answered(loop, "approve"))
    assert (own_row(loop)["state"], own_row(loop)["why"]) == ("waits", None)
    assert last_phase(loop) == ("approval", "done")
    end_round(loop, "accepted")
    assert (own_row(loop)["state"], own_row(loop)["why"]) == ("accepted", None)


def test_an_update_that_a_rule_refused_is_told_as_refused_with_the_rules_code(make: Any) -> None:
    loop = make(("max_tensor_l2: 0.019", "max_tensor_l2: 0.000001"))
    (decided,) = [each for each in loop.bench.events("egress.decision") if each["kind"] == "lora.factors"]
    assert decided["decision"] == "deny" and decided["reasons"]
    end_round(loop, "absent")
    assert (own_row(loop)["state"], own_row(loop)["why"]) == ("refused", ", ".join(decided["reasons"]))


def test_a_hold_that_nobody_answered_is_missed_and_nobodys_no(make: Any) -> None:
    loop = make(HELD)
    end_round(loop, "absent")
    assert (own_row(loop)["state"], own_row(loop)["why"]) == ("absent", None)
    assert last_phase(loop) == ("approval", "missed")


POLICY = setting.policy_of(setting.policy_text())
FEDAVG = setting.PLAN.model_copy(update={"method": "fedavg-grpo"})
EACH_SECONDS = 0.01  # what an event takes the guard
STEP = LinkMessage("step", {"round": 1, "step": 1, "phase": "rollout"})
PLANNED = LinkMessage("planned", {"overlong": {}, "private_prompts": 40})
DONE = LinkMessage("done", {"task": "PrivateStep", "round": 1, "metrics": {}})
SECONDS = 32.0

Said = list[tuple[float, LinkMessage]]  # when, after the trainer was given its first step
WORDS: dict[str, Said] = {
    "4.3": [(4.3, STEP)],
    "4.6": [(4.6, STEP)],
    "4.9": [(4.9, STEP)],
    "often": [(at / 7, STEP) for at in range(200)],
    "always": [(0.0, STEP)] * 3000,
    "planned": [(4.4, PLANNED), (11.7, PLANNED)],
    "of no kind": [(5.5, LinkMessage("shout", {})), (19.2, LinkMessage("shout", {}))],
    "step after step": [(4.3, DONE), (9.9, DONE), (14.6, DONE)],
}


def moments(folder: Path, words: Said, *, waiting: bool = False) -> list[tuple[str, float]]:
    """What leaves, and when after the trainer was given its first step, by the guard's clock.

    waiting: the first heartbeat is answered with word of other silos' checkpoints, which are then fetched.
    """
    with closing(Loop(folder, POLICY, events_of=partial(TimedQueue, each_seconds=EACH_SECONDS))) as loop:
        loop.offer_plan(FEDAVG)
        loop.open_round(plan=FEDAVG, public=False)
        loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run=FEDAVG.run, round=1)
        loop.base_evaluated()
        loop.trainer_says("done", task="LoadAdapter", round=1, metrics={})
        assert loop.trainer.tasks()[-1] == "PrivateStep"
        if waiting:
            loop.coordinator.says("control.heartbeat", "control.ack", pb.Ack(checkpoints=True))
        events: Any = loop.events
        begun, before = loop.clock, len(loop.coordinator.sent)
        for at, message in words:
            events.put_at(begun + at, TrainerSaid(message))
        left: list[tuple[str, float]] = []
        loop.coordinator.on_send = lambda: left.append(("", round(loop.clock - begun, 1)))
        loop.live(SECONDS)
        assert loop.trainer.tasks()[-1] == "PrivateStep" and not loop.bench.judge.halted
        kinds = [envelope.kind for envelope, _ in loop.coordinator.sent[before:]]
        return [(kind, at) for kind, (_, at) in zip(kinds, left, strict=True)]


@pytest.mark.quick(keep=5)
@pytest.mark.parametrize("waiting", [False, True], ids=["", "checkpoints wait"])
@pytest.mark.parametrize("words", list(WORDS))
def test_T11_no_word_of_a_trainer_that_works_moves_a_message(tmp_path: Path, words: str, waiting: bool) -> None:
    silent = moments(tmp_path / "silent", [], waiting=waiting)
    assert [at for kind, at in silent if kind == "control.heartbeat"][:2] == [5.0, 15.0]
    assert ("control.checkpoint" in dict(silent)) == waiting
    assert moments(tmp_path / "speaks", WORDS[words], waiting=waiting) == silent


def test_T11_a_coordinator_refuses_and_records_it(tmp_path: Path) -> None:
    house, (silo, *others) = joined(tmp_path)
    for _ in range(2):
        for each in (silo, *others):
            each.poll()
    counts = json.loads(house.rows(lambda session: db.counts_of(session, silo.name)))
    counts["counts"]["run-1/first"] = 20
    with house.store.transaction() as session:
        db.set_counts(session, silo.name, db.as_json(counts))
    house.driver.books[silo.name] = HistoryBook.from_json(counts)
    refused = silo.say("lora.factors", silo.delta_payload(3), run="run-1", number=3)
    assert isinstance(refused, pb.Refusal)
    record = list(house.audit.records())[-1]
    assert (record["event"], record["decision"], record["kind"]) == ("ingress.decision", "deny", "lora.factors")
    assert record["facts"]["history"]["messages_in_round"] == FULL
    assert not any(each.changed for each in replay([record], house.policy))


def test_T11_a_gate_denies_and_records_it(bench: Bench) -> None:
    bench.judge.book.counts["run-1/first"] = 20
    assert isinstance(bench.factors(), Denied)
    (record,) = bench.events("egress.decision")
    assert record["decision"] == "deny" and "PER_ROUND" in record["reasons"]
    assert record["facts"]["history"]["messages_in_round"] == FULL
    assert not any(each.changed for each in replay([record], bench.judge.policy))
    bench.judge.book.counts["run-1/first"] = 1  # the counterpart
    assert isinstance(bench.factors(), Allowed)


@pytest.mark.slow
def test_of_a_run_that_ended_no_counts_are_left_and_the_rates_are(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    silo = silos[0]

    def book() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(house.rows(lambda session: db.counts_of(session, silo.name)))
        return found

    of_run = set[str]()
    while sum(each.live() for each in silos):  # every silo has its turn
        of_run |= {key for key in book()["counts"] if key.startswith("run-1/")}
    assert of_run, "while it goes on there are"
    silo.poll()
    assert not [key for key in book()["counts"] if key.startswith("run-1/")]
    assert book()["recent"]["content"] and book()["days"]
