"""Two runs at once on one coordinator: what one does is nothing to the other, and each ends as if it were alone."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from coordinator import store as db
from fedsilo.protocol._generated import federation_pb2 as pb
from tests.simulated.coordinator_parts import RUN_YAML, SILOS, House, SimulatedSilo, federation, until_quiet
from tests.simulated.test_orders_recorded import orders_at

PAIRS = {"run-1": SILOS[:2], "run-2": SILOS[2:], "run-3": SILOS[2:]}


def submitted(house: House, *runs: str) -> None:
    for run in runs:
        text = RUN_YAML.replace("run-1", run).replace("rounds: 2", "rounds: 1")
        house.submit(f"{text}silos: [{', '.join(PAIRS[run])}]\n")


def alone(folder: Path, run: str) -> str:
    house, silos = federation(folder, silos=PAIRS[run])
    submitted(house, run)
    for silo in silos:
        silo.join()
    until_quiet(silos)
    digest = adapter_of(house, run)
    house.close()
    return digest


def adapter_of(house: House, run: str) -> str:
    row = house.rows(lambda session: session.get_one(db.Run, run))
    assert row.state == "finished", (run, row.state, row.reason)
    return str(row.adapter_digest)


def test_two_runs_at_once_are_to_each_other_as_if_they_were_not_there(tmp_path: Path) -> None:
    house, silos = federation(tmp_path / "both")
    submitted(house, "run-1", "run-2")
    for silo in silos:
        silo.join()
    first, second = silos[:2], silos[2:]
    first[1].mute = {"lora.factors"}
    until_quiet(silos)  # the second ends while the first waits for an update
    assert house.driver.runs.keys() == {"run-1"}
    digests = {"run-2": adapter_of(house, "run-2")}

    def refused(silo: SimulatedSilo, run: str) -> str:
        answer = silo.say("lora.factors", silo.delta_payload(1), run=run, number=1)
        assert isinstance(answer, pb.Refusal)
        return answer.code

    assert refused(second[0], "run-1") == refused(first[1], "run-2") == "NO_SUCH_RUN"
    # what is ordered of one says nothing of another, which is submitted meanwhile
    give = orders_at(house)
    give("run.pause", run="run-1")
    submitted(house, "run-3")
    until_quiet(silos)
    assert adapter_of(house, "run-3") == digests["run-2"], "the same seed and silos"
    give("run.resume", request_id="request-2", run="run-1")
    first[1].mute = set()
    answer = first[1].say("lora.factors", first[1].delta_payload(1), run="run-1", number=1)
    assert isinstance(answer, pb.Ack)
    until_quiet(silos)
    digests["run-1"] = adapter_of(house, "run-1")
    # the history keeps each, in the order in which they were submitted
    rows = house.rows(lambda session: session.scalars(select(db.Run).order_by(db.Run.ordinal)).all())
    assert [(row.name, row.state) for row in rows] == [(f"run-{number}", "finished") for number in (1, 2, 3)]
    house.close()
    assert digests == {run: alone(tmp_path / run, run) for run in digests}
