"""B6, T18: a silo that said no to a round reads who rejected it and with which code; a coordinator reads `declined`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.answers.rounds import RoundView
from fedsilo.audit.index import Mark
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from silo.guard.answers import rounds
from tests.policies import setting
from tests.simulated.coordinator_parts import House, SimulatedSilo, federation, until_quiet
from tests.simulated.queries import as_json
from tests.world import ADAPTER, Loop, command, small_factors

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
    yield house, silos, RoundView(house.driver, "c" * 64).round
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
    assert rounds._kept_in(marks) == told


def test_a_silo_that_drops_out_of_a_round_sits_out_and_did_not_decline(late: Any) -> None:
    house, silos, ask = late
    silos[2].say("control.abstain", pb.Abstain(round=1), run="run-1", number=1)
    assert states(ask({}))["hospital_c"] == "sits out"
    house.advance(1000.0)
    assert states(ask({"round": 1}))["hospital_c"] == "sits out"


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
    shown = {"release": release.id, "digest": release.digest, "policy_digest": loop.policy.digest}
    loop.bench.clock_now += 60
    return command(f"approvals.{name}", shown | loop.bench.opened(release.id) | more)


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
