"""Drift between silos in the run record, against the factors of each written out (methods 2.8)."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from coordinator import store as db
from coordinator.aggregate import NAME, LazyTensors, drift_note
from coordinator.blobs import FilePayload
from fedsilo.protocol.codec import FactorsReader
from tests.policies.setting import SCHEMA
from tests.simulated.coordinator_parts import SILOS, House, SimulatedSilo, federation, until_quiet
from tests.simulated.test_aggregate import drawn, factors

MODULES = sorted({name.rpartition(".")[0] for name, _ in SCHEMA.tensors})


def written_out(master: dict[str, Any], deltas: list[dict[str, Any]]) -> tuple[list[list[float]], float]:
    """Distances by products, scale 2, and the aggregation error."""
    wide = [{name: master[name].astype(np.float64) + delta.get(name, 0.0) for name in master} for delta in deltas]
    products = [{each: own[f"{each}.lora_B"] @ own[f"{each}.lora_A"] for each in MODULES} for own in wide]
    apart = [
        [2 * sum(((one[each] - other[each]) ** 2).sum() for each in MODULES) ** 0.5 for other in products]
        for one in products
    ]
    lost = whole = 0.0
    for each in MODULES:
        mean = sum(own[each] for own in products) / len(products)
        a, b = (sum(own[f"{each}.{name}"] for own in wide) / len(wide) for name in ("lora_A", "lora_B"))
        lost, whole = lost + ((mean - b @ a) ** 2).sum(), whole + (mean**2).sum()
    return apart, (lost / whole) ** 0.5


@pytest.mark.parametrize("frozen", [False, True])
def test_the_note_equals_the_adapters_written_out(frozen: bool) -> None:
    master = drawn(0)
    deltas = [
        {name: value for name, value in drawn(seed, 1e-3).items() if not frozen or name.endswith("lora_B")}
        for seed in (1, 2, 3)
    ]
    base = factors(master, "")
    note = drift_note(("a", "b", "c"), base, [factors(delta, base.digest) for delta in deltas])
    apart, error = written_out(master, deltas)
    assert note["silos"] == ["a", "b", "c"]
    assert np.allclose(note["products"], apart, rtol=1e-5)  # six digits are kept
    assert note["aggregation_error"] == pytest.approx(error, rel=1e-5, abs=1e-9)
    assert (note["aggregation_error"] < 1e-9) is frozen  # with a common A the mean of products is their product
    for one, other in itertools.combinations(range(3), 2):
        square = sum(((deltas[one][name] - deltas[other][name]).astype(np.float64) ** 2).sum() for name in deltas[0])
        assert note["factors"][one][other] == note["factors"][other][one] == pytest.approx(square**0.5, rel=1e-5)


def test_of_many_modules_a_fixed_choice_is_read_and_scaled_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [f"{MODULES[0]}.{number}" for number in range(5)]
    master, *deltas = (
        {f"{module}.{name.rpartition('.')[2]}": values
         for place, module in enumerate(modules) for name, values in drawn(seed + 10 * place, 1e-3).items()}
        for seed in (0, 1, 2)
    )  # fmt: skip
    base = factors(master, "")
    uploads = [factors(delta, base.digest) for delta in deltas]
    whole = drift_note(("a", "b"), base, uploads)
    monkeypatch.setattr("coordinator.aggregate.MODULES_MAX", 2)
    note = drift_note(("a", "b"), base, uploads)
    chosen = sorted(modules, key=lambda module: hashlib.sha256(module.encode()).hexdigest())[:2]
    square = sum(((deltas[0][name] - deltas[1][name]).astype(np.float64) ** 2).sum()
                 for name in deltas[0] if name.rpartition(".")[0] in chosen)  # fmt: skip
    assert note["factors"][0][1] == pytest.approx((5 / 2 * square) ** 0.5, rel=1e-5)
    assert note["factors"] != whole["factors"]
    assert [(each["modules"], each["of_modules"]) for each in (whole, note)] == [(5, 5), (2, 5)]


def test_tensors_that_are_no_pair_are_left_out() -> None:
    master = drawn(0)
    odd = {"x.lora_A": np.ones((2, 3), np.float32), **master}
    base = factors(odd, "")
    note = drift_note(("a",), base, [factors(drawn(1), base.digest)])
    assert note["products"] == [[0.0]]


def test_a_committed_round_has_its_drift_in_the_record(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    house.submit()
    for silo in silos:
        silo.join()
    until_quiet(silos)
    for row in house.record()["rounds"]:
        [note] = [note for note in row["notes"] if note["name"] == "drift"]
        assert note["silos"] == list(SILOS)
        assert all(note["products"][place][place] == 0 for place in range(len(SILOS)))
        assert note["factors"][0][1] > 0


def drifts(house: House) -> dict[int, list[dict[str, Any]]]:
    """Notes by round, as they stand in the database."""
    query = select(db.Figure).where(db.Figure.name == NAME).order_by(db.Figure.id)
    found: dict[int, list[dict[str, Any]]] = {}
    for row in house.rows(lambda session: list(session.scalars(query))):
        found.setdefault(row.round, []).append(json.loads(row.fields))
    return found


def one_round_committed(folder: Path) -> tuple[House, list[SimulatedSilo]]:
    """Of two; the second waits for what one silo keeps back."""
    house, silos = federation(folder)
    house.submit()
    for silo in silos:
        silo.join()
    whole = silos[-1].offer
    silos[-1].offer = lambda kind, number, *rest: "denied" if number == 2 else whole(kind, number, *rest)  # type: ignore[method-assign]
    until_quiet(silos)
    assert house.driver.runs["run-1"].life.round == 2
    return house, silos


def test_a_round_is_committed_before_its_drift_is_worked_out_and_noted_once(tmp_path: Path) -> None:
    house, _ = one_round_committed(tmp_path)
    assert drifts(house) == {} and house.driver.runs["run-1"].undrifted
    assert house.driver.drift.note() is True
    assert list(drifts(house)) == [1] and len(drifts(house)[1]) == 1
    assert house.driver.drift.note() is False and len(drifts(house)[1]) == 1


def test_while_it_is_worked_out_a_message_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is free: within the work, another thread has a poll answered."""
    house, silos = one_round_committed(tmp_path)
    answered: list[Any] = []

    def slow(*_: Any) -> dict[str, Any]:
        other = threading.Thread(target=lambda: answered.append(silos[0].poll()))
        other.start()
        other.join(10.0)
        return {"silos": []}

    monkeypatch.setattr("coordinator.aggregate.drift_note", slow)
    house.driver.drift.note()
    assert len(answered) == 1 and drifts(house) == {1: [{"silos": []}]}


@pytest.mark.parametrize("error", [OSError(5, "the disk"), ValueError("no payload")], ids=["disk", "payload"])
def test_a_payload_that_cannot_be_read_costs_the_note_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    house, _ = one_round_committed(tmp_path)

    def unreadable(*_: Any) -> dict[str, Any]:
        raise error

    monkeypatch.setattr("coordinator.aggregate.drift_note", unreadable)
    assert house.driver.drift.note() is True and house.driver.drift.note() is False
    assert drifts(house) == {} and not house.driver.halted


@pytest.mark.parametrize("noted_before", [False, True])
def test_what_a_kill_left_over_is_noted_after_the_restart(tmp_path: Path, noted_before: bool) -> None:
    house, _ = one_round_committed(tmp_path)
    if noted_before:
        house.driver.drift.note()
    house.close()
    again = House(tmp_path, clock=house.clock)
    assert bool(again.driver.runs["run-1"].undrifted) is not noted_before
    while again.driver.drift.note():
        pass
    assert {number: len(notes) for number, notes in drifts(again).items()} == {1: 1}
    again.close()


def test_a_run_that_ends_meanwhile_has_the_note_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house, _ = one_round_committed(tmp_path)
    run, whole = house.driver.runs["run-1"], drift_note

    def ended_meanwhile(*given: Any) -> dict[str, Any]:
        monkeypatch.undo()
        with house.driver.changing(), house.store.transaction() as session:
            run.abort(session)
        return whole(*given)

    monkeypatch.setattr("coordinator.aggregate.drift_note", ended_meanwhile)
    house.driver.drift.note()
    assert [note["name"] for note in house.record()["rounds"][0]["notes"]].count(NAME) == 1
    assert {number: len(notes) for number, notes in drifts(house).items()} == {1: 1}


def test_the_thread_notes_what_is_committed_and_ends_with_the_coordinator(tmp_path: Path) -> None:
    house, _ = one_round_committed(tmp_path)
    run, noted = house.driver.runs["run-1"], threading.Event()
    whole = run.note_drift
    run.note_drift = lambda *given: (whole(*given), noted.set())  # type: ignore[method-assign, assignment, func-returns-value]
    thread = threading.Thread(target=house.driver.drift.keep_noting, daemon=True)
    thread.start()
    assert noted.wait(30.0)
    house.driver.stop()
    thread.join(10.0)
    assert not thread.is_alive() and list(drifts(house)) == [1]


def test_a_payload_that_cannot_be_read_costs_the_note_alone(tmp_path: Path) -> None:
    house, _ = one_round_committed(tmp_path)
    [due] = house.driver.runs["run-1"].undrifted
    Path(house.blobs.get(due.uploads[0]).path).unlink()
    assert house.driver.drift.note() is True and house.driver.drift.note() is False
    assert drifts(house) == {} and not house.driver.halted


def test_what_was_averaged_leaves_memory_when_its_drift_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base and the uploads of the round: a run reads them no more. The new adapter stays: it is read next."""
    left: list[str] = []
    leave = FilePayload.leave_memory
    monkeypatch.setattr(FilePayload, "leave_memory", lambda payload: left.append(payload.digest) or leave(payload))
    house, _ = one_round_committed(tmp_path)
    [due] = house.driver.runs["run-1"].undrifted
    assert left == [] and len(due.uploads) == len(SILOS)
    assert house.driver.drift.note() is True
    assert sorted(left) == sorted([due.base_digest, *due.uploads])
    assert all(house.blobs.get(digest).read_at(0, 8) for digest in left)


def test_whether_a_payload_has_a_tensor_is_known_without_reading_it() -> None:
    payload = factors(drawn(0), "")
    reads: list[int] = []

    class Counting:
        def read_at(self, offset: int, length: int) -> bytes:
            reads.append(offset)
            return payload.read_at(offset, length)

    tensors = LazyTensors(FactorsReader(Counting(), payload.size_bytes))
    opened = len(reads)
    assert all(name in tensors for name in drawn(0)) and "another" not in tensors
    assert len(reads) == opened
    assert np.array_equal(tensors[MODULES[0] + ".lora_A"], drawn(0)[MODULES[0] + ".lora_A"])
    assert len(reads) == opened + 1
