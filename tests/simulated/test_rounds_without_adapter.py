"""A method whose rounds make no adapter: each round is closed, at the coordinator, in what it signs and in the run
record, and the run finishes. With too few silos a round is abandoned, as ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator import store as db
from coordinator.answers.rounds import Live, round_answer, round_row
from coordinator.runs import figures
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.rounds import end_at_silo
from fedsilo.protocol.transcript import KnownKey, check_record
from tests.protocol import closing
from tests.simulated.coordinator_parts import (
    COORDINATOR,
    RUN_YAML,
    SILOS,
    House,
    SimulatedSilo,
    played,
    started_again,
    until_quiet,
)

REQUEST = RUN_YAML.replace("method: pubswap", f"method: {closing.NAME}")
ANSWERS = frozenset({"public.responses"})


@pytest.fixture(autouse=True)
def closing_method() -> Iterator[None]:
    with closing.registered():
        yield


def ends_told(silo: SimulatedSilo) -> list[tuple[int, str]]:
    return [(sent.round, end_at_silo(body)) for sent, body in silo.heard if isinstance(body, pb.RoundResult)]


def states(house: House) -> list[str]:
    return [row["state"] for row in house.record()["rounds"]]


def test_rounds_without_an_adapter_are_closed_and_the_run_finishes(tmp_path: Path) -> None:
    house, silos = played(tmp_path, REQUEST)
    run = house.run()
    assert (run.state, run.adapter_digest) == ("finished", run.base_digest)
    assert states(house) == ["closed", "closed"] and house.round(1).closed_at
    assert not (house.folder / "runs" / run.name / "adapter").exists()
    assert [ends_told(silo) for silo in silos] == [[(1, "close"), (2, "close")]] * len(SILOS)
    assert [name for name, _ in house.published if name.startswith("round.") and name != "round.agreed"] == [
        "round.opened", "round.closed", "round.opened", "round.closed",
    ]  # fmt: skip
    assert house.rows(lambda session: db.rounds_done(session, run.name)) == 2


def test_the_signed_end_says_closed_and_the_record_must_agree_with_it(tmp_path: Path) -> None:
    house, _ = played(tmp_path, REQUEST)
    record = house.record()
    ends = house.rows(lambda session: [figures(session, "run-1", number)["result"] for number in (1, 2)])
    assert [(end["closed"], end["committed"], end["survivors"]) for end in ends] == [(True, False, list(SILOS))] * 2
    public_key = house.key.public_key()
    keys = {COORDINATOR: KnownKey(public_key.public_bytes_raw())}

    def problems(record: dict[str, object]) -> tuple[str, ...]:
        return check_record(record, signer=COORDINATOR, public_key=public_key, keys=keys).problems

    assert problems(record) == ()
    for change in ({"state": "abandoned"}, {"state": "committed"}, {"participants": []}):
        other = json.loads(json.dumps(record))
        other["rounds"][0] |= change
        assert any("state or participants" in problem for problem in problems(other)), change
    unsaid = json.loads(json.dumps(record))
    del unsaid["rounds"][0]["transcript"]["result"]["closed"]
    assert any("not signed by" in problem for problem in problems(unsaid)), "closed is part of what is signed"


def test_a_round_below_the_quorum_is_abandoned_and_a_restart_keeps_what_each_came_to(tmp_path: Path) -> None:
    house, silos = played(tmp_path, REQUEST, dict.fromkeys(range(3), ANSWERS))
    house.advance(1000.0)  # three of four never answer, and the quorum is two
    until_quiet(silos)
    assert house.round(1).state == "abandoned" and house.round(2).state == "open"
    house = started_again(house, silos)
    for silo in silos:
        silo.mute = set()
    house.advance(1000.0)
    until_quiet(silos)
    assert states(house) == ["abandoned", "abandoned"] and house.run().state == "failed"


def test_a_restart_in_a_closed_round_goes_on(tmp_path: Path) -> None:
    house, silos = played(tmp_path, REQUEST, {0: ANSWERS})
    house.advance(1000.0)
    house = started_again(house, silos)
    until_quiet(silos)
    house.advance(1000.0)
    until_quiet(silos)
    assert states(house) == ["closed", "closed"] and house.run().state == "finished"
    assert house.record()["rounds"][0]["participants"] == list(SILOS[1:])


def test_people_are_shown_a_closed_round(tmp_path: Path) -> None:
    house, _ = played(tmp_path, REQUEST)
    answer = house.rows(
        lambda session: round_answer(
            session, house.run(), round_row(session, house.run(), 1), (), charter_digest="", live=Live("")
        )
    )
    assert answer.state == "closed" and [row.state for row in answer.rounds] == ["closed", "closed"]
    assert {silo.state for silo in answer.silos} == {"accepted"}
    assert not any(phase.phase == "update" for silo in answer.silos for phase in silo.phases), "no update is awaited"
