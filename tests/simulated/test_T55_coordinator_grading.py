"""T55 at the coordinator: one silo's answers hold nobody else's, what a rule refuses is never graded, and an answer
that is not graded in time is nobody's donor, also after a restart."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedsilo.grading import Verdict
from fedsilo.grading.answers import AnswerGrading
from fedsilo.grading.verdict import TIMEOUT
from fedsilo.protocol._generated import federation_pb2 as pb
from policies.replay import replay
from tests.simulated.coordinator_parts import House, PlainGrader, SimulatedSilo, step_asked_for
from tests.simulated.test_coordinator_ingress import code_of

STEP = {"run": "run-1", "number": 1, "step": 2}


class Grader(PlainGrader):
    """Counts what it is asked. Of "slow" it says that the time ran out, and with "wait" it waits until it may go on."""

    asked: list[str]
    begun, may = threading.Event(), threading.Event()

    def __init__(self) -> None:
        self.asked = []
        self.begun, self.may = threading.Event(), threading.Event()

    def grade_many(self, pairs: Sequence[tuple[str, str]], budget_seconds: float | None = None) -> list[Verdict]:
        self.asked += [text for text, _ in pairs]
        if any(text == "wait" for text, _ in pairs):
            self.begun.set()
            assert self.may.wait(20), "nobody else's answers were taken meanwhile"
        found = super().grade_many(pairs)
        return [TIMEOUT if text == "slow" else verdict for (text, _), verdict in zip(pairs, found, strict=True)]


def answering(folder: Path, *graders: Grader) -> tuple[House, list[SimulatedSilo]]:
    """A coordinator with these graders, where step 2 has been asked for."""
    return step_asked_for(folder, grading=AnswerGrading(graders, lambda _: 60.0))


def asked_for(house: House) -> tuple[int, ...]:
    row = house.round(1)
    return tuple(json.loads(row.public_steps)["2"])


def recorded(house: House, silo: str) -> dict[str, Any]:
    """The last decision on answers of a silo; each replays to what it was."""
    records = list(house.audit.records())
    assert not any(each.changed for each in replay(records, house.policy))
    return [
        each for each in records
        if each.get("kind") == "public.responses" and str(each.get("peer")).endswith(f"/{silo}")
    ][-1]  # fmt: skip


def test_T55_costly_answers_of_one_silo_hold_nobody_elses(tmp_path: Path) -> None:
    first, second = Grader(), Grader()
    second.begun, second.may = first.begun, first.may
    house, silos = answering(tmp_path, first, second)
    with closing(house):
        costly = silos[2].answers(asked_for(house))
        costly.prompts[0].responses[0].text = "wait"
        said: list[Any] = []
        hostile = threading.Thread(target=lambda: said.append(silos[2].say("public.responses", costly, **STEP)))
        hostile.start()
        assert first.begun.wait(20)
        for silo in (silos[1], silos[3], silos[0]):
            assert code_of(silo.say("public.responses", silo.answers(asked_for(house)), **STEP)) == "ok"
        first.may.set()
        hostile.join(20)
        assert code_of(said[0]) == "INGRESS_DENIED"  # its answer was none


@pytest.mark.parametrize("fault", ["order", "finish", "set", "twice", "samples"])
def test_T55_answers_that_any_rule_refuses_are_never_graded(tmp_path: Path, fault: str) -> None:
    grader = Grader()
    house, silos = answering(tmp_path, grader)
    with closing(house):
        body = silos[2].answers(asked_for(house))
        match fault:
            case "order":
                rows = list(reversed(body.prompts))
                del body.prompts[:]
                body.prompts.extend(rows)
            case "finish":
                body.prompts[0].responses[0].finish = pb.FINISH_UNSPECIFIED
            case "set":
                body.public_set_sha256 = "f" * 64
            case "twice":
                body.prompts.add().CopyFrom(body.prompts[0])
                del body.prompts[1]
            case "samples":
                body.prompts[0].samples = 1
        assert code_of(silos[2].say("public.responses", body, **STEP)) == "INGRESS_DENIED"
        assert grader.asked == [] and recorded(house, "hospital_c")["decision"] == "deny"
        good = silos[2].answers(asked_for(house))
        assert code_of(silos[2].say("public.responses", good, **STEP)) == "ok"
        assert len(grader.asked) == sum(len(row.responses) for row in good.prompts)


@pytest.mark.parametrize("restarted", [False, True])
def test_T55_an_answer_that_is_not_graded_in_time_is_no_donor_and_refuses_nothing(
    tmp_path: Path, restarted: bool
) -> None:
    house, silos = answering(tmp_path, Grader())
    body = silos[1].answers(asked_for(house))  # two right answers to each prompt
    body.prompts[0].responses[0].text = "slow"
    assert code_of(silos[1].say("public.responses", body, **STEP)) == "ok"
    record = recorded(house, "hospital_b")
    assert record["decision"] == "allow" and record["facts"]["transform"] == {"responses_ungraded": 1}
    assert record["facts"]["final"]["responses"] == 2 * len(body.prompts) - 1
    last = silos[1].last
    assert last is not None
    if restarted:
        house.close()
        house = House(tmp_path, clock=house.clock, grading=AnswerGrading([Grader()], lambda _: 60.0))
        for silo in silos:
            silo.house = house
    assert code_of(silos[1].deliver(*last)) == "ok"  # the acknowledgement was lost: a retry is none of a new message
    for silo in (silos[0], silos[2], silos[3]):
        assert code_of(silo.say("public.responses", silo.answers(asked_for(house)), **STEP)) == "ok"
    given: list[tuple[int, str, int, str]] = []
    for silo in silos:
        while (item := silo.poll()) is not None:
            if isinstance(item[1], pb.PublicDonors):
                given += [(row.prompt_index, donor.origin, donor.position, donor.response.text)
                          for row in item[1].prompts for donor in row.donors]  # fmt: skip
    first = body.prompts[0].prompt_index
    assert given and "slow" not in {text for *_, text in given}
    # the other one to that prompt keeps the number that its silo knows it by
    assert {place for row, origin, place, _ in given if (row, origin) == (first, "hospital_b")} <= {1}
    assert {0, 1} >= {place for row, origin, place, _ in given if row != first and origin == "hospital_b"} != set()
