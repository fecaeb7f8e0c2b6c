"""A run with `exchange: round_end` against the real coordinator: what the pool of each round is, whatever happens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator import store as db
from coordinator.runs import stored_events
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.protocol import method as events
from fedsilo.protocol import rounds
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import FedSiloError
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import plan_from_canonical
from fedsilo.protocol.swap import public_batch, rows_ahead
from fedsilo.protocol.tasks import PublicStep
from tests.simulated.coordinator_parts import REFERENCES, RUN_YAML, SILOS, House, SimulatedSilo, federation, until_quiet
from tests.simulated.test_coordinator_killed import Federation, Killer

ROUND_END = RUN_YAML.replace("rounds: 2", "rounds: 3") + "exchange: round_end\n"
RIGHT = {"hospital_a": 0, "hospital_b": 2, "hospital_c": 3, "hospital_d": 1}  # of 4, whatever the prompt


def play(folder: Path, text: str = ROUND_END, *, gone: dict[str, int] | None = None) -> tuple[House, Any]:
    """A whole run. gone: silos that say nothing any more from a round's opening on."""
    house, silos = federation(folder)
    house.submit(text)
    trained: dict[str, list[Any]] = {silo.name: [] for silo in silos}
    for silo in silos:
        watch(silo, trained[silo.name], (gone or {}).get(silo.name, 99))
        silo.join()
    until_quiet(silos)
    while house.run().state == "running":
        house.advance(200.0)
        until_quiet(silos)
    return house, trained


def watch(silo: SimulatedSilo, tasks: list[Any], last: int) -> None:
    work, react = silo.work, silo.react

    def noted(task: Any) -> Any:
        tasks.append(task)
        return work(task)

    def heard(envelope: pb.Envelope, body: Any) -> None:
        if envelope.round < last:
            react(envelope, body)

    silo.work, silo.react = noted, heard  # type: ignore[method-assign]


def public_steps(tasks: list[Any]) -> dict[tuple[int, int], PublicStep]:
    return {(task.round, task.step): task for task in tasks if isinstance(task, PublicStep)}


def origins(task: PublicStep) -> Counter[str]:
    return Counter(donor.origin for row in task.donors.prompts for donor in row.donors)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, Any]]:
    house, trained = play(tmp_path_factory.mktemp("whole"))
    yield house, trained
    house.close()


def test_three_rounds_swap_with_the_answers_of_the_round_before_and_nobody_waits(whole: tuple[House, Any]) -> None:
    house, trained = whole
    plan = plan_from_canonical(house.run().plan)
    assert (house.run().state, house.run().reason) == ("finished", "")
    for name in SILOS:
        steps = public_steps(trained[name])
        assert list(steps) == [(number, step) for number in (1, 2, 3) for step in (2, 4)]
        assert [origins(steps[1, step]) for step in (2, 4)] == [Counter()] * 2, "the first round has no donors"
        for number, step in list(steps)[2:]:
            task = steps[number, step]
            # two of K = 4 for each of three prompts, of the six right answers less its own: two where there are two
            assert [row.prompt_index for row in task.donors.prompts] == list(public_batch(plan, number, step))
            assert [len(row.donors) for row in task.donors.prompts] == [2] * 3
            assert set(origins(task)) <= {other for other in SILOS if RIGHT[other]} - {name}
            for row in task.donors.prompts:
                assert all(donor.response.text == REFERENCES[row.prompt_index] for donor in row.donors)
    stored = house.rows(lambda session: stored_events(session, "run-1"))
    assert not [each for each in stored if isinstance(each, events.StartDeadline) and each.name.startswith("public/")]
    uploads = house.rows(lambda session: list(session.scalars(select(db.Upload))))
    kinds = Counter((row.kind, row.round) for row in uploads)
    # four silos: two public steps of the next round, which the last round has not
    assert {key: count for key, count in kinds.items() if key[0] == "public.responses"} == {
        ("public.responses", 1): 8, ("public.responses", 2): 8,
    }  # fmt: skip
    assert kinds["lora.factors", 3] == kinds["metrics.eval", 3] == kinds["metrics.eval", 0] == 4
    transcripts = house.rows(lambda session: list(session.scalars(select(db.RoundTranscript))))
    assert [row.round for row in transcripts] == [1, 2, 3]
    for number, text in ((row.round, row.canonical) for row in transcripts):
        expected = {
            name: sha256_hex(canonical_json({
                str(row.step): row.digest for row in uploads
                if (row.silo, row.round, row.kind) == (name, number - 1, "public.responses")
            }))
            for name in SILOS
        }  # fmt: skip
        assert json.loads(text).get("pool") == (expected if number > 1 else None), "all sign which answers they are"
    record = house.record()
    assert [row["donors_sent"].get("hospital_b", 0) for row in record["rounds"]] == [0, 12, 12]


def test_a_coordinator_killed_again_and_again_makes_the_same_run(tmp_path: Path, whole: tuple[House, Any]) -> None:
    house, trained = whole
    killer = Killer(3, 53)
    played = Federation(tmp_path, killer, plan=ROUND_END)
    kept: dict[str, list[Any]] = {silo.name: [] for silo in played.silos}
    for silo in played.silos:
        watch(silo, kept[silo.name], 99)
    played.play()
    assert min(killer.kills.values()) > 1 and set(killer.kills) == {"before", "after"}
    assert (played.house.run().state, played.house.run().adapter_digest) == ("finished", house.run().adapter_digest)
    for name in SILOS:
        assert public_steps(kept[name]) == public_steps(trained[name]), "the pool outlives the coordinator"
    stored = played.house.rows(lambda session: stored_events(session, "run-1"))
    told = Counter(each for each in stored if isinstance(each, rounds.Contribution))
    assert max(told.values()) == 1 and len(told) == len(SILOS) * (2 * 2 + 3 + 4)
    played.house.close()
    assert [result["problems"] for result in verify_logs([tmp_path / "audit"])] == [[]]


def test_a_silo_that_dropped_out_donates_what_it_gave_and_no_more(tmp_path: Path) -> None:
    house, trained = play(tmp_path, gone={"hospital_c": 2})
    run = house.record()
    assert [row["participants"] for row in run["rounds"]] == [
        list(SILOS), *[[name for name in SILOS if name != "hospital_c"]] * 2,
    ]  # fmt: skip
    steps = public_steps(trained["hospital_a"])
    assert "hospital_c" in origins(steps[2, 2]) + origins(steps[2, 4]), "given in the first round, with its update"
    assert set(origins(steps[3, 2]) + origins(steps[3, 4])) == {"hospital_b", "hospital_d"}


def test_answers_are_taken_to_the_next_rounds_prompts_and_to_no_others(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    house.submit(ROUND_END.replace("rounds: 3", "rounds: 2"))
    silo = silos[0]
    silo.mute |= {"lora.factors", "public.responses"}
    for each in silos:
        each.join()
    until_quiet(silos)

    def answered(step: int, rows: tuple[int, ...], text: str = "") -> bool:
        number, body = house.driver.runs["run-1"].life.open_round, silo.answers(rows)
        if text:
            body.prompts[0].responses.add(text=text, finish=pb.FINISH_STOP)
        return isinstance(silo.say("public.responses", body, run="run-1", number=number, step=step), pb.Ack)

    assert silo.plan is not None and house.driver.runs["run-1"].life.open_round == 1
    rows, this_round = rows_ahead(silo.plan, 1), public_batch(silo.plan, 1, 2)
    assert set(this_round) != set(rows[2])
    assert not answered(2, this_round), "each silo answers this round's for itself"
    assert not answered(3, rows[2]), "no public step"
    assert not answered(2, rows[2], "wrong"), "the coordinator grades them too"
    assert answered(2, rows[2], REFERENCES[rows[2][0]])
    silo.mute.clear()
    silo.offer("lora.factors", 1, 0, None)
    until_quiet(silos[1:])
    assert house.driver.runs["run-1"].life.open_round == 2
    assert not answered(2, public_batch(silo.plan, 2, 2)), "after the last round there is none to answer for"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_only_balanced_exchanges_at_the_rounds_end(tmp_path: Path, name: str) -> None:
    house, _ = federation(tmp_path)
    text = ROUND_END.replace("method: pubswap", f"method: {name}")
    if name == "pubswap":
        house.submit(text)
    else:
        with pytest.raises(FedSiloError, match=f"{name} has no exchange 'round_end'"):
            house.submit(text)
