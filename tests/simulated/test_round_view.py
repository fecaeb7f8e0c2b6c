"""What people see of a round: the queries `round` and `curves` against what was recorded, and drift between silos in
the run record against the factors of each written out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from coordinator import store as db
from coordinator.aggregate import NAME, LazyTensors, drift_note
from coordinator.answers.rounds import RoundView
from coordinator.blobs import FilePayload
from fedsilo.audit import index as audit_index
from fedsilo.audit.index import LogIndex
from fedsilo.control.answers import to_json
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import FactorsReader
from fedsilo.protocol.errors import NotFoundError, OperationError, UsageError
from fedsilo.protocol.intervals import wilson_interval
from fedsilo.protocol.plan import plan_from_canonical
from silo.guard.answers import curves
from silo.guard.answers.curves import FigureHistory, prompts_answered
from silo.link import LinkMessage
from tests.policies import setting
from tests.policies.setting import SCHEMA
from tests.simulated.coordinator_parts import (
    SILOS,
    House,
    SimulatedSilo,
    federation,
    played,
    started_again,
    until_quiet,
)
from tests.simulated.queries import CHARTER, as_json, long_log, rounds_of
from tests.simulated.test_aggregate import drawn, factors
from tests.world import ADAPTER, Loop


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[House, list[SimulatedSilo], Any, Any]]:
    """Round 1 open: three silos are through, hospital_d never sends its update and is slow."""
    house, silos = federation(tmp_path / "house")
    silos[3].mute = {"lora.factors"}
    house.submit()
    for silo in silos:
        silo.join()
    for silo in silos:
        silo.live()
    for _ in range(4):
        for place, silo in enumerate(silos):
            house.clock.seconds += 40 if place == 3 else 2 + place
            silo.live()
    curves = RoundView(house.driver, "c" * 64).curves
    yield house, silos, rounds_of(house), lambda arguments: to_json(curves(arguments))
    house.close()


def by_silo(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["silo"]: row for row in answer["silos"]}


def test_a_coordinator_tells_each_phase_as_its_own_records_have_it(running: Any) -> None:
    house, _, ask, _ = running
    answer = ask({})
    assert (answer["run"], answer["round"], answer["state"], answer["rounds_planned"]) == ("run-1", 1, "open", 2)
    rows = by_silo(answer)
    assert {silo: row["state"] for silo, row in rows.items()} == {
        "hospital_a": "waits", "hospital_b": "waits", "hospital_c": "waits", "hospital_d": "awaited",
    }  # fmt: skip
    assert answer["awaited"] == [{"silo": "hospital_d", "phase": "update", "step": 0}]
    # read another way: from the rows themselves
    opened = house.round(1).opened_at
    uploads = house.rows(lambda session: [(each.silo, each.kind, each.step, each.received_at, each.payload_bytes)
                                          for each in session.query(db.Upload).filter_by(round=1)])  # fmt: skip
    for silo, row in rows.items():
        ends = {
            (phase["phase"], phase["step"]): phase["to_seconds"] for phase in row["phases"] if phase["state"] == "done"
        }
        for kind, step, received_at in ((kind, step, at) for name, kind, step, at, _ in uploads if name == silo):
            phase = ("train", step) if kind == "public.responses" else ("update", 0)
            assert ends[phase] == _seconds(received_at) - _seconds(opened)
        assert row["received_bytes"] == sum(size for name, _, _, _, size in uploads if name == silo)
        assert all(phase["seconds"] >= 0 for phase in row["phases"] if phase["seconds"] is not None)
    agreed = [record for record in house.audit.records() if record["event"] == "round.agreed"]
    assert rows["hospital_a"]["phases"][0]["to_seconds"] == agreed[0]["t"] / 1000 - _seconds(opened)
    assert answer["quorum"] == {
        "needed": 2,
        "of": 4,
        "given": 3,
        "reached_seconds": sorted(_update_at(row) for row in rows.values() if _update_at(row))[1],
    }


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def _update_at(row: dict[str, Any]) -> float:
    return next(
        (phase["to_seconds"] for phase in row["phases"] if phase["phase"] == "update" and phase["to_seconds"]), 0.0
    )


def test_what_nobody_recorded_is_null_and_not_made_up(running: Any) -> None:
    _, _, ask, _ = running
    for row in by_silo(ask({})).values():
        assert row["plan"] == "accepted" and row["plan_at"] is None
    late = by_silo(ask({}))["hospital_d"]
    assert [(each["phase"], each["state"], each["to_seconds"], each["seconds"]) for each in late["phases"][-1:]] == [
        ("update", "open", None, None)
    ]
    assert late["update_norm"] is None and late["update_digest"] == ""


def test_deadlines_run_and_stand_still_while_paused(running: Any) -> None:
    house, _, ask, _ = running
    (deadline,) = ask({})["deadlines"]
    # 1,000 from the last answer of hospital_d, which is awaited; by the clock of the test, to a float's last digits
    assert deadline["for"] == "round" and deadline["at_seconds"] == pytest.approx(1100.0)
    with house.driver.changing(), house.store.transaction() as session:
        house.driver.runs["run-1"].pause(session)
    house.clock.seconds += 100
    paused = ask({})
    assert paused["paused"] and paused["deadlines"][0]["left_seconds"] == deadline["left_seconds"]
    with house.driver.changing(), house.store.transaction() as session:
        house.driver.runs["run-1"].resume(session)
    house.clock.seconds += 100
    assert ask({})["deadlines"][0]["left_seconds"] == deadline["left_seconds"] - 100


def test_a_straggler_is_named_by_the_phase_that_it_is_late_in(running: Any) -> None:
    house, _, ask, _ = running
    usual = sorted(_update_at(row) for row in by_silo(ask({})).values() if _update_at(row))
    house.clock.seconds += 2 * usual[-1]
    marked = {silo: row["straggler"] for silo, row in by_silo(ask({})).items() if row["straggler"]}
    assert set(marked) == {"hospital_d"} and marked["hospital_d"]["phase"] == "update"
    assert marked["hospital_d"]["seconds"] > 2 * marked["hospital_d"]["median_seconds"]


@pytest.mark.slow
def test_a_round_that_is_over_says_who_was_accepted_and_who_was_absent(running: Any) -> None:
    house, silos, ask, _ = running
    house.advance(1000.0)
    until_quiet(silos)
    over = ask({"round": 1})
    assert over["state"] == "committed" and over["closed_seconds"] == over["rounds"][0]["seconds"]
    assert {silo: row["state"] for silo, row in by_silo(over).items()} == {
        "hospital_a": "accepted", "hospital_b": "accepted", "hospital_c": "accepted", "hospital_d": "absent",
    }  # fmt: skip
    assert [each["state"] for each in by_silo(over)["hospital_d"]["phases"] if each["phase"] == "update"] == ["missed"]
    assert [each["state"] for each in by_silo(over)["hospital_a"]["phases"]][-1] == "done"  # evaluated
    (planned,) = over["deadlines"]
    assert planned == {"name": "round/1", "for": "round", "left_seconds": None, "at_seconds": 1000.0}
    assert [each["round"] for each in ask({})["rounds"]] == [1, 2]
    assert over["digests"]["adapter"] == ask({"round": 2})["digests"]["base_adapter"] != ""
    assert over["digests"]["charter"] == CHARTER and over["parameters"]["local_steps"] == 4


def test_a_restart_changes_nothing_of_what_is_told(running: Any) -> None:
    house, _, ask, _ = running
    before = ask({})
    house.close()
    again = House(house.folder, clock=house.clock)
    after = rounds_of(again)({})
    for name in ("round", "rounds", "state", "quorum", "awaited", "digests", "elapsed_seconds"):
        assert after[name] == before[name], name
    phases = {silo: row["phases"] for silo, row in by_silo(before).items()}
    assert {silo: row["phases"] for silo, row in by_silo(after).items()} == phases
    again.close()
    house.audit, house.store = again.audit, again.store


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"run": "none"}, NotFoundError), ({"round": 9}, NotFoundError), ({"round": 0}, UsageError),
     ({"round": "1"}, UsageError), ({"step": 1}, UsageError), ({"run": "a\x1bb"}, UsageError)],
)  # fmt: skip
def test_a_wrong_question_is_refused_and_a_right_one_answered(running: Any, arguments: Any, error: Any) -> None:
    _, _, ask, _ = running
    with pytest.raises(error):
        ask(arguments)
    assert ask({"run": "run-1", "round": 1})["round"] == 1


def test_before_any_run_and_before_the_first_round(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    ask = rounds_of(house)
    assert (ask({})["state"], ask({})["silos"]) == ("no run yet", [])
    assert RoundView(house.driver, "c" * 64).curves({}).series == ()
    with pytest.raises(NotFoundError):
        ask({"run": "run-1"})
    house.submit()
    for silo in silos:
        silo.join()
    answer = ask({})
    assert (answer["round"], answer["state"], answer["rounds"]) == (0, "no round yet", [])
    assert [each["for"] for each in answer["deadlines"]] == ["join"]
    assert {row["plan"] for row in answer["silos"]} == {"not yet"}


# ---- curves at a coordinator -----------------------------------------------------------------------


def test_released_figures_come_with_the_plans_number_and_its_interval(running: Any) -> None:
    house, silos, _, ask = running
    house.advance(1000.0)
    until_quiet(silos)
    answer = ask({})
    assert answer["names"] == ["gap", "pass_at_1", "update_norm"] and answer["x"] == "round"
    series = {(each["name"], each["silo"]): each["points"] for each in answer["series"]}
    assert {silo for name, silo in series if name == "pass_at_1"} == {silo.name for silo in silos}
    first, second = series["pass_at_1", "hospital_a"][:2]
    assert (first["round"], first["value"], second["value"]) == (0, 0.25, 0.35)  # as every simulated silo reports
    assert (second["n"], second["n_exact"]) == (512, False)
    assert (second["low"], second["high"]) == tuple(round(end, 6) for end in wilson_interval(0.35, 512))
    assert {point["value"] for point in series["gap", ""]} == {0.0} and series["gap", ""][0]["silos"] == 4
    norms = house.rows(lambda session: {each.silo: each.norm for each in session.query(db.Upload).filter_by(
        round=1, kind="lora.factors")})  # fmt: skip
    assert {silo: points[0]["value"] for (name, silo), points in series.items() if name == "update_norm"} == norms
    assert {each["value"] for each in answer["baseline"]} == {0.25}
    only = ask({"names": "gap", "x": "step"})
    assert {each["name"] for each in only["series"]} == {"gap"} and only["names"] == answer["names"]
    assert only["series"][0]["points"][1]["x"] == 4  # the round's last step
    for wrong in ({"x": "time"}, {"names": 3}, {"silo": "x"}):
        with pytest.raises(UsageError):
            ask(wrong)


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [(0.5, 10, 0.236593, 0.763407), (0.0, 20, 0.0, 0.161125), (1.0, 20, 0.838875, 1.0)],
)
def test_the_interval_is_wilsons(share: float, count: int, low: float, high: float) -> None:
    # closed forms, with z = 1.959964: one end at 0 and 1 is z²/(n+z²); around 0.5 the half width is z/(2 sqrt(n+z²));
    # six places are written down
    assert wilson_interval(share, count) == pytest.approx((low, high), abs=1e-6)


def test_a_share_of_no_draw_has_no_interval() -> None:
    for share, count in ((0.5, 0), (1.1, 5), (-0.1, 5)):
        with pytest.raises(ValueError, match="share"):
            wilson_interval(share, count)


# ---- a silo ----------------------------------------------------------------------------------------


def in_round(loop: Loop) -> None:
    """Round 1 is open, the base was evaluated with 487 held-out prompts of which 3 are too long, a step is done."""
    loop.offer_plan()
    loop.open_round()
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.trainer.ready = {"held_out_rows": 487}
    told = LinkMessage("planned", {"overlong": {"held_out": 3}, "private_prompts": 40})
    loop.guard._trainer_said(told)
    body = pb.MetricsEval(split="held_out")
    body.metrics.add(name="pass_at_1", value=0.25)
    loop.trainer_says("done", codec.encode(body), task="Evaluate", round=0, metrics={"pass_at_1": 0.25})
    loop.trainer_says("done", task="LoadAdapter", round=1, metrics={})
    loop.bench.clock_now += 30
    loop.trainer_says("done", task="PrivateStep", round=1, metrics={"reward_mean": 0.4, "kl": 0.01})


def test_a_silo_tells_its_own_phases_and_of_others_what_it_was_told(loop: Loop) -> None:
    ask = as_json(loop.guard.queries)["round"]
    assert ask({})["state"] == "no run yet"
    with pytest.raises(NotFoundError):
        ask({"run": "run-1"})
    empty = ask({}).keys()
    in_round(loop)
    assert ask({}).keys() == empty
    answer = ask({})
    assert (answer["party"], answer["run"], answer["round"], answer["state"]) == ("silo", "run-1", 1, "open")
    rows = by_silo(answer)
    assert [(each["phase"], each["state"]) for each in rows["hospital_a"]["phases"]] == [
        ("sign", "done"),
        ("train", "open"),
    ]
    assert answer["elapsed_seconds"] == 30.0 and all(each["source"] == "local" for each in rows["hospital_a"]["phases"])
    others = [row for row in rows.values() if not row["own"]]
    assert len(others) == 3 and {row["state"] for row in others} == {"signed"}
    told = {"silo", "own", "state", "round"}
    for row in others:
        assert {name for name, value in row.items() if value not in (None, [])} == told
    assert answer["quorum"]["given"] is None and "quorum.given" in answer["hidden"] and answer["awaited"] == []
    loop.coordinator.says("control.poll", "round.result", loop.ended(committed=False), run="run-1", round=1)
    loop.turn(3)
    over = ask({})
    assert over["state"] == "closed" and over["rounds"][0]["state"] == "closed"
    assert by_silo(over)["hospital_a"]["phases"][-1] == {
        "phase": "update", "step": 0, "state": "missed", "from_seconds": 0.0, "to_seconds": 30.0, "seconds": 30.0,
        "source": "local",
    }  # fmt: skip
    with pytest.raises(NotFoundError):
        ask({"round": 2})


def test_the_last_finished_step_of_a_round_is_shown_until_the_next_round(loop: Loop) -> None:
    def step() -> int:
        return int(loop.state()["step"])

    in_round(loop)
    assert loop.state()["task"] == "GeneratePublic" and step() == 2  # what is at work comes first
    answers = codec.encode(setting.responses_body((0, ("4",))))
    while (now := loop.state())["task"] != "ExportDelta":
        body, done = answers if now["task"] == "GeneratePublic" else b"", step()
        loop.trainer_says("done", body, task=now["task"], round=1, step=done, metrics={})
    assert step() == done
    loop.coordinator.says("control.poll", "round.result", loop.ended(committed=False), run="run-1", round=1)
    loop.turn(3)
    assert step() == done
    loop.open_round(2)
    assert loop.bench.judge.view.round == 2 and step() == 0
    loop.guard.runs.change_view(open_step=2)
    loop.restart()  # while its answers are held, nothing is at work
    assert step() == 2


def test_a_silos_curves_outlive_a_restart(loop: Loop) -> None:
    in_round(loop)
    answer = as_json(loop.guard.queries)["curves"]({})
    series = {each["name"]: each["points"] for each in answer["series"]}
    assert set(series) == {"pass_at_1", "reward_mean", "kl"} and series["kl"][0]["x"] == 1
    assert (series["pass_at_1"][0]["n"], series["pass_at_1"][0]["n_exact"]) == (484, True)
    assert answer["baseline"] == [{"name": "pass_at_1", "silo": "hospital_a", "value": 0.25}]
    loop.restart()
    assert as_json(loop.guard.queries)["curves"]({}) == answer
    assert as_json(loop.guard.queries)["curves"]({"names": "kl"})["names"] == answer["names"]
    with pytest.raises(NotFoundError):
        as_json(loop.guard.queries)["curves"]({"run": "another"})


def test_without_the_number_of_prompts_there_is_no_interval(loop: Loop) -> None:
    plan = plan_from_canonical(setting.PLAN.canonical())
    assert prompts_answered(plan, {}, {}) is None
    assert prompts_answered(plan, {"held_out_rows": "9"}, {}) is None
    assert prompts_answered(plan, {"held_out_rows": 9}, {"held_out": 9}) is None
    assert prompts_answered(plan, {"held_out_rows": 9000}, {"held_out": 2}) == plan.evaluation.prompts - 2
    loop.offer_plan()
    loop.open_round()
    loop.guard._trainer_said(LinkMessage("planned", {"overlong": {}, "private_prompts": 40}))
    loop.trainer_says("done", codec.encode(pb.MetricsEval(split="held_out")), task="Evaluate", round=0,
                      metrics={"pass_at_1": 0.25})  # fmt: skip
    ((point,),) = [each["points"] for each in as_json(loop.guard.queries)["curves"]({})["series"]]
    assert (point["value"], point["n"], point["low"], point["high"]) == (0.25, None, None, None)


# ---- the history -----------------------------------------------------------------------------------


def add(history: FigureHistory, step: int, **figures: Any) -> None:
    history.add(run="run-1", task="PrivateStep", number=1, step=step, at=1.0, figures=figures or {"kl": step / 8})


def test_a_line_that_a_kill_tore_costs_itself_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    history = FigureHistory(path)
    for step in range(1, 4):
        add(history, step)
    whole = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    for cut in range(1, len(whole.splitlines()[-1]) + 1):
        path.write_bytes(whole[:-cut])
        again = FigureHistory(path)
        assert [entry["step"] for entry in again.of("run-1")] == [1, 2]
        add(again, 9)
        assert [entry["step"] for entry in FigureHistory(path).of("run-1")] == [1, 2, 9]
    path.write_bytes(whole)
    assert [entry["step"] for entry in FigureHistory(path).of("run-1")] == [1, 2, 3]


def test_the_file_stays_bounded_and_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "LINES_MAX", 16)
    path = tmp_path / "figures.jsonl"
    history = FigureHistory(path)
    for step in range(1, 101):
        add(history, step)
        assert len(path.read_bytes().splitlines()) <= 16
    kept = [entry["step"] for entry in history.of("run-1")]
    assert kept[-1] == 100 and kept == list(range(kept[0], 101)) and len(kept) >= 8
    assert FigureHistory(path).of("run-1") == history.of("run-1") and history.runs() == ["run-1"]


def test_what_is_no_number_is_not_kept_and_a_damaged_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    history = FigureHistory(path)
    add(history, 1, kl=0.5, donors_rejected={"a": 1}, reward_mean=None, nan=float("nan"), flag=True)
    add(history, 2, reward_mean=None)
    assert [entry["figures"] for entry in history.of("run-1")] == [{"kl": 0.5}]
    path.write_bytes(b"[1]\n{}\nnot json\n" + b"[" * 5000 + b"\n" + path.read_bytes() + b'{"run":"run-1"}\n')
    assert [entry["figures"] for entry in FigureHistory(path).of("run-1")] == [{"kl": 0.5}]


def test_T23_while_the_file_cannot_be_rewritten_it_does_not_outgrow_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "LINES_MAX", 16)
    path = tmp_path / "figures.jsonl"
    history = FigureHistory(path)
    with monkeypatch.context() as patch:
        patch.setattr(curves, "write_durably", refused_by_the_disk)
        for step in range(1, 101):
            add(history, step)
            assert len(path.read_bytes().splitlines()) <= 16
        add(FigureHistory(path), 0)  # nor after a restart
        assert len(path.read_bytes().splitlines()) == 16
        assert [entry["step"] for entry in history.of("run-1")][-8:] == list(range(93, 101))
    add(history, 101)
    assert [entry["step"] for entry in FigureHistory(path).of("run-1")] == list(range(94, 102))
    path.write_bytes(b"damaged\n" * 40)
    add(FigureHistory(path), 1)
    assert len(path.read_bytes().splitlines()) == 1


def refused_by_the_disk(path: Path, data: bytes, mode: int) -> None:
    raise OperationError(f"cannot write {path}: no space")


def test_T23_a_line_beyond_its_bound_is_not_kept(tmp_path: Path) -> None:
    history = FigureHistory(tmp_path / "figures.jsonl")
    add(history, 1, **{"n" * 1_800: 1.0})
    add(history, 2, **{"n" * 2_000: 1.0})
    assert [entry["step"] for entry in history.of("run-1")] == [1]
    assert len((tmp_path / "figures.jsonl").read_bytes()) <= curves.LINE_BYTES_MAX == 2_048


def test_T31_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "figures.jsonl"
    elsewhere.write_text("")
    history = FigureHistory(path)
    path.symlink_to(elsewhere)
    add(history, 1)
    assert elsewhere.read_text() == "" and len(history.of("run-1")) == 1
    path.unlink()
    add(history, 2)
    assert [entry["step"] for entry in FigureHistory(path).of("run-1")] == [2]


def test_a_disk_that_takes_nothing_costs_the_curve_and_not_the_run(tmp_path: Path, caplog: Any) -> None:
    history = FigureHistory(tmp_path / "nowhere" / "figures.jsonl")
    add(history, 1)
    add(history, 2)
    assert [entry["step"] for entry in history.of("run-1")] == [1, 2]
    assert sum("are not kept" in record.message for record in caplog.records) == 1


# ---- marks -----------------------------------------------------------------------------------------


def test_over_a_log_that_is_not_read_to_its_end_the_answer_says_so(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    in_round(loop)
    ask = as_json(loop.guard.queries)["round"]
    with monkeypatch.context() as patch:
        patch.setattr(audit_index, "ASKED_RECORDS", 1)
        with pytest.raises(NotFoundError, match="read so far") as early:
            ask({"round": 1})
        assert early.value.code == "NOT_READ_YET" and "ask again" in early.value.hint
        answer = ask({})
        assert (answer["state"], answer["round"]) == ("the log is not read to its end yet", 0)
    assert ask({"round": 1})["state"] == ask({})["state"] == "open"
    with pytest.raises(NotFoundError, match="knows of no round 2"):
        ask({"round": 2})


def test_a_long_log_is_folded_a_part_at_a_time_and_never_beyond_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_index, "ASKED_RECORDS", 900)
    monkeypatch.setattr(audit_index, "ROUNDS_MAX", 2)
    monkeypatch.setattr(audit_index, "MARKS_MAX", 40)
    with closing(long_log(tmp_path / "log", 4_000)) as audit:
        index = LogIndex(audit.directory, lambda: audit.size)
        asked = 0
        while not index.complete:
            before = index.lines_read
            index.marks("run-1", 0)
            assert index.lines_read - before <= 900 + 64
            asked += 1
        assert asked == 5 and index.rounds_of("run-1") == [2, 3]
        assert all(len(index.marks("run-1", number)) == 40 for number in index.rounds_of("run-1"))
        assert {mark.kind for mark in index.marks("run-1", 3)} == {"metrics.eval"}
        assert json.dumps([mark.at for mark in index.marks("run-1", 3)]) == json.dumps(
            sorted(mark.at for mark in index.marks("run-1", 3))
        )


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
    house, _ = played(tmp_path)
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


@pytest.mark.slow
def test_a_committed_round_has_its_drift_noted_once_also_after_a_restart(tmp_path: Path) -> None:
    house, _ = one_round_committed(tmp_path)
    assert {number: len(notes) for number, notes in drifts(house).items()} == {1: 1}
    again = started_again(house)
    assert {number: len(notes) for number, notes in drifts(again).items()} == {1: 1}


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError(5, "the disk"), ValueError("no payload"), MemoryError(), KeyError("lora_A")])
def test_a_drift_that_cannot_be_computed_costs_the_note_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def unreadable(*_: Any) -> dict[str, Any]:
        raise error

    monkeypatch.setattr("coordinator.runs.drift_note", unreadable)
    house, _ = one_round_committed(tmp_path)
    assert drifts(house) == {} and not house.driver.halted and house.round(1).state == "committed"


@pytest.mark.slow
def test_what_was_averaged_leaves_memory_when_its_drift_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base and the uploads of the round: a run reads them no more. The new adapter stays: it is read next."""
    left: list[str] = []
    leave = FilePayload.leave_memory
    monkeypatch.setattr(FilePayload, "leave_memory", lambda payload: left.append(payload.digest) or leave(payload))
    house, _ = one_round_committed(tmp_path)
    uploads = house.rows(lambda session: session.scalars(select(db.Upload).where(db.Upload.round == 1)).all())
    updates = [upload.digest for upload in uploads if upload.kind == "lora.factors"]
    assert len(updates) == len(SILOS)
    assert sorted(left) == sorted([house.round(1).base_digest, *updates])


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
