"""Of a round long past nothing is counted any more and nothing is let in: denied on record, with the facts that it
replays from (T11)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coordinator import store as db
from fedsilo.protocol._generated import federation_pb2 as pb
from policies.history import FULL, HistoryBook
from policies.replay import replay
from silo.guard.messages import Allowed, Denied
from tests.simulated.coordinator_parts import joined
from tests.world import Bench


def test_T11_a_coordinator_refuses_and_records_it(tmp_path: Path) -> None:
    house, (silo, *others) = joined(tmp_path)
    for _ in range(2):
        for each in (silo, *others):
            each.poll()
    counts = json.loads(house.rows(lambda session: db.counts_of(session, silo.name)))
    counts["counts"]["run-1/first"] = 20
    with house.store.transaction() as session:
        db.set_counts(session, silo.name, db.as_json(counts))
    house.driver._books[silo.name] = HistoryBook.from_json(counts)
    refused = silo.say("lora.factors", silo.delta_payload(3), run="run-1", number=3)
    assert isinstance(refused, pb.Refusal)
    record = list(house.audit.records())[-1]
    assert (record["event"], record["decision"], record["kind"]) == ("ingress.decision", "deny", "lora.factors")
    assert record["facts"]["history"]["messages_in_round"] == FULL
    assert not any(each.changed for each in replay([record], house.policy))


def test_T11_a_gate_denies_and_records_it(bench: Bench) -> None:
    bench.gate._judge.book.counts["run-1/first"] = 20
    assert isinstance(bench.factors(), Denied)
    (record,) = bench.events("egress.decision")
    assert record["decision"] == "deny" and "PER_ROUND" in record["reasons"]
    assert record["facts"]["history"]["messages_in_round"] == FULL
    assert not any(each.changed for each in replay([record], bench.gate.policy))
    bench.gate._judge.book.counts["run-1/first"] = 1  # the counterpart
    assert isinstance(bench.factors(), Allowed)


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
