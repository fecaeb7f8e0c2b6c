"""A trainer that died and was started again, or could not be: the audit log says so, before what follows from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.audit.record import Record
from fedsilo.audit.segments import LogFullError
from fedsilo.audit.statistics import LogStatistics
from silo.guard import main
from silo.guard.main import SupervisedTrainer
from silo.guard.trainer_process.supervisor import Restart
from silo.link import LinkMessage
from tests.policies import setting
from tests.world import Loop

STEP = LinkMessage("task", {"task": "PrivateStep", "round": 1, "step": 2, "rows": [3]})


@pytest.mark.parametrize(
    ("restart", "reasons", "detail"),
    [
        (Restart(137, 1, task=STEP), ["TRAINER_DIED"],
         {"outcome": "resumed", "number": 1, "repeated": 0, "exit_status": 137, "task": "PrivateStep"}),
        (Restart(137, 2, repeated=3, task=STEP), ["TRAINER_DIED"],
         {"outcome": "round_repeated", "number": 2, "repeated": 3, "exit_status": 137, "task": "PrivateStep"}),
        (Restart(None, 2, "ISOLATION", task=STEP), ["TRAINER_DIED", "ISOLATION"],
         {"outcome": "failed", "number": 2, "repeated": 0, "task": "PrivateStep"}),
        (Restart(1, 1, "TRAINER_DIED"), ["TRAINER_DIED"],
         {"outcome": "failed", "number": 1, "repeated": 0, "exit_status": 1}),
    ],
)  # fmt: skip
def test_what_the_record_says(restart: Restart, reasons: list[str], detail: dict[str, Any]) -> None:
    fields = restart.fields()
    assert (fields["reasons"], fields["detail"]) == (reasons, detail)
    assert (fields["round"], fields["step"]) == ((1, 2) if restart.task else (None, None))


def supervised(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The `restarted` that a real `SupervisedTrainer` gives its supervisor, over this loop's queue and gate."""
    given: dict[str, Any] = {}

    def supervisor(config: Any, events: Any, **options: Any) -> Any:
        given.update(options)
        ready = SimpleNamespace(ready={})
        return SimpleNamespace(start=lambda *asked, **named: ready, state=ready)

    monkeypatch.setattr(main, "Supervisor", supervisor)
    monkeypatch.setattr(main, "probe_fields", lambda config, process_id: {})
    monkeypatch.setattr(main, "never_shown", lambda config: [])
    judge = loop.bench.judge
    config = SimpleNamespace(trainer=SimpleNamespace(launch="guard"))
    site: Any = SimpleNamespace(config=config, schema=setting.SCHEMA, site_secret=b"")
    trainer = SupervisedTrainer(
        site, loop.events, lambda: False,
        record=lambda event, **fields: judge.record(event, run=judge.view.run or None, **fields),
    )  # fmt: skip
    trainer.start()
    return given["restarted"]


def test_a_restart_is_recorded_on_the_loops_thread_and_counted_as_an_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path / "a", setting.policy_of(setting.policy_text()))
    try:
        restarted = supervised(loop, monkeypatch)
        loop.offer_plan()
        restarted(Restart(137, 1, task=STEP))
        assert loop.bench.events("trainer.restart") == []  # not by the thread that reads the link
        loop.turn()
        (record,) = loop.bench.events("trainer.restart")
        assert (record["run"], record["round"], record["step"]) == (setting.PLAN.run, 1, 2)
        assert record["reasons"] == ["TRAINER_DIED"] and record["detail"]["outcome"] == "resumed"
        counted = LogStatistics()
        for record in loop.bench.audit.records(0):
            counted.add(Record(record))
        assert [row["event"] for row in counted.incidents.rows] == ["trainer.restart"]
    finally:
        loop.close()


def test_T39_a_restart_that_cannot_be_recorded_halts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path / "a", setting.policy_of(setting.policy_text()))
    try:
        restarted = supervised(loop, monkeypatch)

        def full(event: str, **fields: Any) -> int:
            raise LogFullError("no space left")

        monkeypatch.setattr(loop.bench.audit, "append", full)
        assert not loop.bench.judge.halted
        restarted(Restart(137, 1, task=STEP))
        loop.turn()
        assert loop.bench.judge.halted and loop.guard._failure is None
    finally:
        loop.close()
