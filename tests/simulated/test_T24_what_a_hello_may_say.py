"""T24: one silo's hello ends no coordinator and no run of the others. What a transcript takes over from a hello is
checked when it is said; a transcript that nobody could read is not signed; and whatever a look at what is due meets,
the coordinator halts by name and its process goes on.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from coordinator import store as db
from coordinator.config import load_config
from coordinator.main import Coordinator, check
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError
from tests.coordinator_folder import write_coordinator
from tests.simulated.coordinator_parts import RUN_YAML, SILOS, Clock, House, federation, until_quiet


@pytest.mark.parametrize("least", [0, 1, 5, 65, 2**32 - 1])
def test_T24_a_hello_that_fits_into_no_transcript_is_refused_and_the_others_go_on(tmp_path: Path, least: int) -> None:
    house, silos = federation(tmp_path)
    house.submit()
    for silo in silos:
        silo.join()
        silo.mute = {"lora.factors"}
    until_quiet(silos)
    refusal = silos[3].join(min_updates=least)
    assert (refusal.code, refusal.field, refusal.expected) == ("MALFORMED", "min_updates", "2-4")
    for silo in silos[:3]:
        silo.say("lora.factors", silo.delta_payload(1), run="run-1", number=1)
        silo.mute = set()
    while house.driver.runs and not house.driver.halted:  # steps and rounds end without the fourth, by their deadlines
        until_quiet(silos[:3])
        house.advance(110.0)
    assert (house.driver.halted, house.run().state) == ("", "finished")
    assert [row["state"] for row in house.record()["rounds"]] == ["committed", "committed"]
    house.close()
    House(tmp_path, clock=house.clock).close()


@pytest.mark.parametrize("least", [2, 3, 4])
def test_T24_a_hello_within_the_number_of_silos_is_taken(tmp_path: Path, least: int) -> None:
    _, silos = federation(tmp_path)
    assert isinstance(silos[0].join(min_updates=least), pb.Ack)


@pytest.mark.parametrize(("kept", "signed"), [("x", False), ("ab" * 32, True)])
def test_T24_a_transcript_that_nobody_could_read_is_not_signed(tmp_path: Path, kept: str, signed: bool) -> None:
    """What is in the database is changed by hand, as no hello could change it."""
    house, silos = federation(tmp_path)
    for silo in silos:
        silo.join()
    with house.store.transaction() as session:
        member = session.get_one(db.Member, "hospital_b")
        member.hello = member.hello.replace('"policy_sha256":""', f'"policy_sha256":"{kept}"')
        assert kept in member.hello
    house.submit()
    if signed:
        until_quiet(silos)
    else:
        with pytest.raises(OperationError, match="no party could read its transcript"):
            until_quiet(silos)
    assert house.driver.halted == ("" if signed else "TRANSCRIPT")
    assert bool(house.rows(lambda session: session.scalars(select(db.RoundTranscript)).all())) is signed


def test_T24_a_coordinator_that_cannot_read_its_own_transcript_halts_and_its_process_goes_on(tmp_path: Path) -> None:
    """The row is damaged by hand; the deadline for signing then reads it in the thread that lets deadlines pass."""
    init_ca(tmp_path / "ca", name="cardio-net", kind="federation")
    provision_site(
        tmp_path / "main", site="main", federation_ca=tmp_path / "ca", people={"alice": ["operator"]},
        is_coordinator=True,
    )  # fmt: skip
    checked = check(load_config(write_coordinator(tmp_path / "main", SILOS)))
    house, silos = federation(
        tmp_path / "main" / "state",
        clock=Clock(time.time()),
        key=checked.identity.signing_key,
        policy=checked.charter,
    )
    house.submit(RUN_YAML.replace("round_deadline_seconds: 1000.0", "round_deadline_seconds: 1.0"))
    for silo in silos:
        silo.join()
    for silo in silos:
        silo.poll()  # the plan
        silo.acknowledged = silo.heard[-1][0].sequence
    for silo in silos:
        silo.poll()  # round.open, which none of them signs
    with house.store.transaction() as session:
        session.get_one(db.RoundTranscript, ("run-1", 1)).canonical = "{}"
    house.close()
    with Coordinator(checked) as coordinator, coordinator.serving():
        working = threading.Thread(target=coordinator.work, daemon=True)
        working.start()
        driver = coordinator.driver
        with driver.changing():
            assert driver.changing().wait_for(lambda: driver.halted, 20)
        assert driver.halted == "MALFORMED" and working.is_alive()
        coordinator.request_stop()
        working.join(20)
        assert not working.is_alive()
