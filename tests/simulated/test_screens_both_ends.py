"""Screens in the whole loop of a guard and at the coordinator's door (threats T18, T21, X3)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsilo.grading import Verdict, VerdictCode
from fedsilo.grading.answers import AnswerGrading
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, NotAllowedError, NotFoundError
from policies import screens
from tests.policies import setting
from tests.simulated import screening as site
from tests.simulated.coordinator_parts import House, SimulatedSilo, step_asked_for
from tests.world import ADAPTER, Loop, command

# ---- the guard's loop ------------------------------------------------------------------------------


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    """Halted by the first hit; its grader calls right what equals the reference, so only charset can hit."""
    made = Loop(tmp_path / "a", site.policy(["charset"], max_hits_per_day=0, definitions=NO_DIGITS))
    made.offer_plan()
    made.open_round()
    made.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    made.base_evaluated()
    yield made
    made.close()


# An alphabet without digits: then every right answer ("12") is a hit.
NO_DIGITS = site.DEFINITIONS.replace("[latin, digits, punctuation, math]", "[latin, punctuation, math]")


def answers_step(loop: Loop) -> None:
    for task in ("LoadAdapter", "PrivateStep"):
        loop.trainer_says("done", task=task, round=1, metrics={})
    body = setting.responses_body((1, ("12",)), (4, ()), (7, ()))
    loop.trainer_says("done", codec.encode(body), task="GeneratePublic", round=1, metrics={})


def test_T18_a_halted_kind_is_declined_on_the_wire_and_the_reason_stays_here(loop: Loop) -> None:
    answers_step(loop)
    assert loop.coordinator.bodies("public.responses") == []
    ((envelope, payload),) = loop.coordinator.bodies("control.declined")
    assert pb.Declined.FromString(payload) == pb.Declined(kind="public.responses", round=1, step=2)
    assert b"SCREEN" not in envelope.SerializeToString() + payload
    (decided,) = [each for each in loop.bench.events("egress.decision") if each["kind"] == "public.responses"]
    # Withheld, so no text with a hit is left; the message is denied for the day's hits alone.
    assert decided["reasons"] == ["SCREEN_HALT"]
    assert loop.state()["screens"] == {"halts": ["public.responses"], "troubles": []}


def test_T18_a_halt_is_lifted_by_the_signed_command_of_an_approver(loop: Loop) -> None:
    answers_step(loop)
    queries: dict[str, Any] = {}
    commands: dict[str, Any] = {}

    class Desk:
        def register_query(self, name: str, answer: Any) -> None:
            queries[name] = answer

        def register_command(self, name: str, action: str, carry_out: Any) -> None:
            commands[name] = action, carry_out

    loop.guard.register(Desk())  # type: ignore[arg-type]
    action, _ = commands["approvals.release"]
    assert action == "halt.release"
    (halt,) = queries["halts"]({})["halts"]
    arguments = {"kind": "public.responses", "digest": halt["digest"]}
    with pytest.raises(NotAllowedError):
        loop.guard.orders.release_halt(command("approvals.release", arguments, person="bob", roles=("operator",)))
    with pytest.raises(ConflictError):
        loop.guard.orders.release_halt(command("approvals.release", {**arguments, "digest": ""}))
    answer = loop.guard.orders.release_halt(command("approvals.release", arguments, person="alice"))
    assert (answer["released"], answer["given"], answer["needed"]) == (True, ["alice"], 1)
    assert queries["halts"]({}) == {"halts": []}
    with pytest.raises(NotFoundError):
        loop.guard.orders.release_halt(command("approvals.release", arguments, person="carol"))


# ---- the coordinator's door ------------------------------------------------------------------------


class EndGrader:
    def grade_many(self, pairs: Any, budget_seconds: float | None = None) -> list[Verdict]:
        return [
            Verdict(text.endswith(reference), VerdictCode.CORRECT if text.endswith(reference) else VerdictCode.WRONG)
            for text, reference in pairs
        ]


def before_answers(folder: Path, policy: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[House, SimulatedSilo]:
    """Round 1 stands open and step 2 is asked for."""
    house, silos = step_asked_for(folder, policy=policy)
    monkeypatch.setattr(house.driver.parts.ingress, "_grading", AnswerGrading([EndGrader()], lambda _: 60.0))
    return house, silos[2]


def answer(house: House, silo: SimulatedSilo, first_text: str) -> Any:

    row = house.round(1)
    rows = tuple(json.loads(row.public_steps)["2"])
    body = setting.responses_body(*((number, (f"{first_text if place == 0 else ''}{number}",))
                                    for place, number in enumerate(rows)))  # fmt: skip
    return silo.say("public.responses", body, run="run-1", number=1, step=2)


@pytest.mark.parametrize("name", ["charset", "pii_basic"])
def test_T21_the_coordinator_screens_with_its_own_charter_what_needs_no_private_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    planted = site.PLANTED[name].removesuffix("12")
    charter = site.policy(["overlap", "canary", name])
    house, silo = before_answers(tmp_path / "screens", charter, monkeypatch)
    refused = answer(house, silo, planted)
    assert isinstance(refused, pb.Refusal)
    record = next(each for each in house.audit.records() if each.get("decision") == "deny")
    assert record["reasons"] == ["SCREEN_HIT"]
    assert record["facts"]["final"]["screens"].keys() == {name}  # the other two need a private corpus
    assert isinstance(answer(house, silo, "so it is "), pb.Ack)
    house.close()
    house, silo = before_answers(tmp_path / "none", site.policy(["overlap", "canary"]), monkeypatch)
    assert isinstance(answer(house, silo, planted), pb.Ack)


def test_a_screen_that_fails_at_the_coordinator_denies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house, silo = before_answers(tmp_path, site.policy(["charset"]), monkeypatch)

    def broken(*_arguments: Any) -> Any:
        raise ValueError

    with monkeypatch.context() as patch:
        patch.setattr(screens, "screen_texts", broken)
        assert isinstance(answer(house, silo, "so it is "), pb.Refusal)
    record = next(each for each in house.audit.records() if each.get("decision") == "deny")
    assert record["reasons"] == ["SCREEN_FAILED"]
    assert isinstance(answer(house, silo, "so it is "), pb.Ack)
