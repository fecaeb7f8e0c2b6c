"""How a silo stands with the coordinator: one word, for the console, the commands and the start of a run alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.answers.rounds import RoundView
from coordinator.control import Control
from coordinator.ingress import SILENT_SECONDS, standing
from fedsilo.control.answers import to_json
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, WireCode
from fedsilo.views.lines import UNICODE
from fedsilo.views.overview import needs_of, round_lines, silos_lines
from fedsilo.views.state import CoordinatorState, Link, Snapshot, state_of
from tests.simulated.coordinator_parts import SILOS, House, SimulatedSilo, federation, until_quiet
from tests.simulated.test_coordinator_queries import desk_of

CONFIG: Any = SimpleNamespace(coordinator="main", site="main", federation="cardio-net", state_dir="state", silos=SILOS)


def control_of(house: House) -> Control:
    return Control(desk_of(), house.driver, house.submissions, None, CONFIG, "c" * 64)  # type: ignore[arg-type]


def words(house: House) -> dict[str, str]:
    return {row["silo"]: row["state"] for row in to_json(control_of(house).silos())}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[tuple[House, list[SimulatedSilo]]]:
    house, silos = federation(tmp_path)
    with closing(house):
        for silo in silos:
            silo.join()
            silo.poll()
        yield house, silos


def all_poll_but_one(house: House, silos: list[SimulatedSilo], seconds: float = SILENT_SECONDS) -> None:
    """The last silo says nothing for that long."""
    house.clock.seconds += seconds
    for silo in silos[:-1]:
        silo.poll()


def test_a_silo_is_joined_until_nothing_came_from_it_for_long_and_again_when_it_is_heard(here: Any) -> None:
    house, silos = here
    all_poll_but_one(house, silos, SILENT_SECONDS - 1)
    assert set(words(house).values()) == {"joined"}
    all_poll_but_one(house, silos, 1)
    assert words(house) == {**dict.fromkeys(SILOS, "joined"), SILOS[-1]: "silent"}
    row = to_json(control_of(house).silos())[-1]
    assert row["age_seconds"] == SILENT_SECONDS
    silos[-1].poll()
    assert set(words(house).values()) == {"joined"}


def test_what_a_restart_does_not_know_yet_it_says_so_and_then_says_silent(here: Any, tmp_path: Path) -> None:
    house, _ = here
    house.close()
    with closing(House(tmp_path, house.clock)) as again:
        assert set(words(again).values()) == {"not_heard_yet"}
        assert {row["age_seconds"] for row in to_json(control_of(again).silos())} == {None}
        again.clock.seconds += SILENT_SECONDS
        assert set(words(again).values()) == {"silent"}


def test_a_silo_with_a_large_message_on_its_way_is_not_silent(here: Any) -> None:
    house, silos = here
    all_poll_but_one(house, silos)
    house.driver.sending = lambda: frozenset({SILOS[-1]})
    assert words(house)[SILOS[-1]] == "joined"
    house.driver.sending = frozenset
    all_poll_but_one(house, silos)
    assert words(house)[SILOS[-1]] == "silent"


def test_a_silo_that_is_refused_at_hello_is_not_joined_whatever_refused_it(here: Any) -> None:
    house, silos = here
    other = silos[0].join(base_model_sha256="ee" * 32)  # another base model than agreed
    assert other.code == WireCode.BASE_MODEL_MISMATCH.value
    silos[1].sequences[""] = 0  # its numbers begin anew, as after a restore from a backup
    assert silos[1].join().code == WireCode.SEQUENCE_REPLAYED.value
    rows = {row["silo"]: row for row in to_json(control_of(house).silos())}
    assert [rows[silo]["state"] for silo in SILOS[:3]] == ["refused", "refused", "joined"]
    assert rows[SILOS[0]]["refusal"]["field"] == "base_model_sha256"
    assert rows[SILOS[1]]["refusal"]["code"] == WireCode.SEQUENCE_REPLAYED.value
    silos[1].sequences[""] = 9
    for silo in silos[:2]:
        silo.join()
    rows = {row["silo"]: row for row in to_json(control_of(house).silos())}
    assert [(rows[silo]["state"], rows[silo]["refusal"]) for silo in SILOS[:2]] == [("joined", None)] * 2


def test_a_silo_that_says_hello_again_and_nothing_else_has_not_joined(here: Any) -> None:
    house, silos = here
    silos[0].join()
    assert words(house)[SILOS[0]] == "joined"
    silos[0].join()
    assert words(house)[SILOS[0]] == "only_greets"
    silos[0].poll()
    assert words(house)[SILOS[0]] == "joined"


def test_nobody_expects_to_hear_a_silo_whose_messages_come_in_files() -> None:
    facts: dict[str, Any] = {"refused": False, "silent_seconds": 9e9, "up_seconds": 9e9, "greetings": 1}
    assert standing("joined", by_files=True, **facts) == "by_files"
    assert standing("joined", by_files=False, **facts) == "silent"
    assert standing("", by_files=True, **facts) == "absent"
    assert standing("refused", by_files=True, **facts) == "refused"


def test_a_run_does_not_begin_with_a_silo_that_is_silent_and_begins_when_it_is_heard(here: Any) -> None:
    house, silos = here
    all_poll_but_one(house, silos)
    house.submit()
    assert house.run().state == "waiting"
    with pytest.raises(ConflictError) as caught:
        house.submissions.start_now("run-1", shown=sorted(SILOS))  # as on a screen before it fell silent
    assert caught.value.code == "STALE_VIEW"
    silos[-1].poll()
    assert house.run().plan and not house.submissions.waiting


def test_a_person_begins_it_without_the_silent_one(here: Any) -> None:
    house, silos = here
    all_poll_but_one(house, silos)
    house.submit()
    begun = house.submissions.start_now("run-1", shown=sorted(SILOS[:-1]))
    assert begun["silos"] == list(SILOS[:-1])


def test_a_round_tells_a_silent_silo_from_one_that_is_awaited(here: Any) -> None:
    house, silos = here
    silos[-1].mute = {"lora.factors"}
    house.submit()
    until_quiet(silos)
    ask = RoundView(house.driver, "c" * 64).round
    assert {row["silo"]: row["state"] for row in ask({})["silos"]}[SILOS[-1]] == "awaited"
    all_poll_but_one(house, silos)
    rows = {row["silo"]: row for row in ask({})["silos"]}
    assert rows[SILOS[-1]]["state"] == rows[SILOS[-1]]["joined"] == "silent"
    assert rows[SILOS[0]]["state"] == "waits" and rows[SILOS[0]]["joined"] == "joined"


def test_the_console_shows_the_dead_in_red_and_names_them(here: Any) -> None:
    house, silos = here
    silos[-1].mute = {"lora.factors"}
    house.submit()
    until_quiet(silos)
    all_poll_but_one(house, silos)
    state = to_json(control_of(house).state())
    read = state_of(state, {})
    assert isinstance(read, CoordinatorState)
    shown = Snapshot(link=Link("live", received_at=0.0), server_time=house.clock(), state=read)
    rows = {silo: next(row for row in silos_lines(shown, 0.0, 100, UNICODE) if any(silo in text for text, _ in row))
            for silo in SILOS}  # fmt: skip
    styles = {
        silo: {style for text, style in row if text.strip() in ("silent", "joined")} for silo, row in rows.items()
    }
    assert styles == {silo: {"bad" if silo == SILOS[-1] else "ok"} for silo in SILOS}
    assert [need.key for need in needs_of(shown, 0.0)] == [f"silent {SILOS[-1]}"]
    told = "".join(text for row in round_lines(shown, 100, UNICODE) for text, _ in row)
    assert f"{len(SILOS) - 1} of {len(SILOS)} here" in told and SILOS[-1] in told


def test_a_hello_that_the_halted_coordinator_refuses_says_nothing_of_the_silo(here: Any) -> None:
    house, silos = here
    house.driver.halted = "DISK_FULL"
    answer = silos[0].join()
    assert isinstance(answer, pb.Refusal) and answer.code == WireCode.HALTED.value
    assert words(house)[SILOS[0]] == "joined"


@pytest.mark.parametrize(("ahead", "told"), [(60, ""), (-60, ""), (3600, "1 h ahead of"), (-200, "3 min 20 s behind")])
def test_T41_a_silo_whose_clock_differs_is_named_in_status_and_console(here: Any, ahead: int, told: str) -> None:
    house, _ = here
    house.driver.effects.relay.clocks[SILOS[0]] = ahead
    control = control_of(house)
    rows = {row["silo"]: row for row in to_json(control.silos())}
    assert rows[SILOS[0]].get("clock", "").startswith(told) and "clock" not in rows[SILOS[1]]
    assert ("clock" in rows[SILOS[0]]) == bool(told)
    read = state_of(to_json(control.state()), {})
    assert isinstance(read, CoordinatorState)
    found = [need.text for need in needs_of(Snapshot(state=read), 0.0) if need.key.startswith("clock")]
    assert len(found) == bool(told) and all(SILOS[0] in text and told in text for text in found)
