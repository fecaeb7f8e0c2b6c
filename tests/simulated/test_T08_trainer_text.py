"""T08: words that a trainer chooses are in no state, no event and on one line; its restarts are recorded."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.audit.record import Record
from fedsilo.audit.segments import LogFullError
from fedsilo.audit.statistics import LogStatistics
from fedsilo.control.answers import to_json
from fedsilo.files.logs import keep_to_one_line
from fedsilo.files.task_files import read_tasks, refuse_bad_references
from fedsilo.protocol.errors import OperationError, UsageError
from fedsilo.protocol.tasks import PrivateStep
from fedsilo.protocol.text import harmless
from silo.guard import main
from silo.guard.answers.queries import log_lines
from silo.guard.answers.state import RunStatus
from silo.guard.main import SupervisedTrainer, prepare_logging
from silo.guard.screens import Screens
from silo.guard.trainer_process.supervisor import Restart, Supervisor
from silo.guard.trainer_report import OTHER, REASONS, ValuesUnusable, counts, ready_facts
from silo.link import LinkMessage
from tests.policies import setting
from tests.simulated import screening
from tests.world import Loop

PRIVATE = "Jane Doe, positive"
IN_OUR_FORM = f"first\n2026-11-22T17:00:00.000Z INFO hospital_a {PRIVATE}\r{PRIVATE}\u2028{PRIVATE}\x1b[2J\u202e\x9b2J"


@pytest.fixture
def loop(loop: Loop) -> Loop:
    loop.offer_plan()
    loop.turn()
    return loop


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Any]:
    """A site whose guard logs as `silo start` makes it; the root logger is as before afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.raiseExceptions, logging.Formatter.converter
    config: Any = SimpleNamespace(state_dir=tmp_path / "state", silo="hospital_a", log_level="info", log_format="text")
    for handler in before[0]:  # those of the tests stay open
        root.removeHandler(handler)
    prepare_logging(config, to_stderr=False)
    yield SimpleNamespace(config=config)
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.handlers[:], root.level, logging.raiseExceptions = before[:3]
    logging.Formatter.converter = before[3]


def logs_of(site: Any) -> Any:
    for handler in logging.getLogger().handlers:
        handler.flush()
    return to_json(log_lines(site, {}))


def test_T08_a_failure_that_the_trainer_words_is_one_line_without_its_words(loop: Loop, site: Any) -> None:
    said = LinkMessage("failed", {"code": IN_OUR_FORM, "message": IN_OUR_FORM})
    with pytest.raises(OperationError) as caught:
        loop.guard._trainer_said(said)
    assert caught.value.message.isprintable() and PRIVATE in caught.value.message
    loop.guard._trainer_failed(caught.value)
    shown = logs_of(site)
    assert PRIVATE not in json.dumps(shown)
    assert "the trainer reports (left out)" in [line.partition("hospital_a ")[2] for line in shown["lines"]]
    assert PRIVATE in (site.config.state_dir / "logs" / "guard.log").read_text()  # for the daemon's own user


@pytest.mark.parametrize(
    "words",
    [
        "the trainer refuses to configure: {}", "the trainer is gone: the link ended; its last words: {}",
        "the trainer went away while it was asked to probe; its last words: {}", "what the trainer offers is no x: {}",
        "the trainer ended with status 1 before it connected: {}", "the trainer's 'planned' says what cannot be: {}",
        "policy.yaml:3: metrics.eval is denied while its screen overlap cannot run: it made none: {}", "{} the trainer",
    ],
)  # fmt: skip
def test_T08_whoever_quotes_it_the_line_ends_with_our_words(site: Any, words: str) -> None:
    log = logging.getLogger("fedsilo.silo")
    log.warning("policy 1234 is in force")
    log.error("%s", words.format(IN_OUR_FORM) if not words.startswith("{}") else words.format("ours:"))
    shown = logs_of(site)
    assert PRIVATE not in json.dumps(shown) and len(shown["lines"]) == 2
    assert shown["lines"][0].endswith("policy 1234 is in force")
    assert shown["left_out"] == (0 if words.startswith("{}") else 1)


def test_T08_T37_every_record_is_one_line_a_traceback_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logger = logging.Logger("apart")
    logger.addHandler(logging.FileHandler(path, encoding="utf-8"))
    keep_to_one_line(logger)
    try:
        raise ValueError(IN_OUR_FORM)
    except ValueError:
        logger.exception("%s \ud800", IN_OUR_FORM)
    logger.handlers[0].close()
    (line, end) = path.read_text(encoding="utf-8").split("\n")
    assert line.isprintable() and end == "" and "\\n" in line and "\\u009b" in line and "\\u202e" in line
    assert harmless("Grüße, 1 von 2, gut") == "Grüße, 1 von 2, gut"


def test_T08_names_that_the_trainer_makes_up_are_in_no_state_and_no_event(loop: Loop) -> None:
    status, task = loop.guard.status, PrivateStep(1, 2)
    made_up = {f"{PRIVATE} {number}": 1 for number in range(8)}
    figures = {"reward_mean": 1.0, "donors_rejected": {"hospital_b": 2, **made_up}}
    status.metrics({"metrics": figures}, task, setting.PLAN, {})
    status.planned({"overlong": {"private": 3, **made_up}})
    status.step({"phase": PRIVATE}, task)
    loop.trainer.got = "user"
    loop.trainer.ready = {
        "private_rows": 9, "held_out_rows": True, "public_rows": PRIVATE, "left_out": [PRIVATE], "note": PRIVATE,
        "split": "ab" * 32, "device": PRIVATE, "screen_index": {"why": PRIVATE},
        "versions": {"python": "3.11.4", "torch": PRIVATE, PRIVATE: "1"},
        "dropped": {"broken JSON": 2, PRIVATE: 1},
    }  # fmt: skip
    moment = replace(loop.guard.moment(), run=RunStatus(setting.PLAN, task, paused=False, adapter_held=""))
    status.show(moment)
    state = to_json(status.state(moment))
    assert state["phase"] == "training"
    assert PRIVATE not in json.dumps(state)
    assert state["metrics"]["donors_rejected"]["value"] == {"hospital_b": 2, OTHER: 8}
    assert state["overlong"] == {"private": 3, OTHER: 8}
    assert state["trainer"] == {
        "isolation": "user",
        "ready": {
            "private_rows": 9, "split": "ab" * 32, "versions": {"python": "3.11.4"},
            "dropped": {"broken JSON": 2, OTHER: 1},
        },
    }  # fmt: skip
    status.step({"phase": "rollout"}, task)
    assert to_json(status.state(moment))["phase"] == "rollout"
    said = json.dumps(loop.desk.published)
    assert "donors_rejected" in said and PRIVATE not in said


def test_T08_why_there_is_no_index_stands_in_the_log_file_and_in_no_state(site: Any, tmp_path: Path) -> None:
    policy, screens = screening.policy(["overlap"]), Screens(key=b"k" * 32)
    screens.take_index(tmp_path, {"why": IN_OUR_FORM})
    told = screens.troubles(policy) + screens.lacking(policy.file, ["overlap"])
    assert len(told) == 2 and PRIVATE not in str(told)
    assert all("cannot run: the trainer has made no overlap index; the guard's log says why" in each for each in told)
    shown = logs_of(site)
    assert PRIVATE not in json.dumps(shown) and shown["left_out"] == 1
    assert PRIVATE in (site.config.state_dir / "logs" / "guard.log").read_text()
    screens.take_index(tmp_path, {})  # nothing is said to be in the log where nothing was told
    assert all(each.endswith("the trainer has made no overlap index") for each in screens.troubles(policy))


@pytest.mark.parametrize("input_is_wrong", [True, False])
def test_T08_T37_what_a_trainer_refuses_with_is_printable_and_short(input_is_wrong: bool) -> None:
    words = IN_OUR_FORM * 200
    said = LinkMessage("failed", {"message": words, "hint": words, "code": words, "input": input_is_wrong})
    supervisor: Any = Supervisor.__new__(Supervisor)
    supervisor._link = SimpleNamespace(send=lambda message: None, receive=lambda: said)
    with pytest.raises(UsageError if input_is_wrong else OperationError) as caught:
        supervisor._ask("configure", {}, "ready")
    error = caught.value
    for text, most in ((error.message, 2_050), (error.hint, 500), (error.code, 64)):
        assert text.isprintable() and len(text) <= most
    assert error.message.startswith("the trainer refuses to configure: first") and PRIVATE in error.message


def test_what_is_no_count_is_refused_and_a_ready_of_no_shape_tells_nothing() -> None:
    for wrong in ([1], {"private": "x"}, {str(number): 1 for number in range(65)}):
        with pytest.raises(ValuesUnusable):
            counts("overlong", wrong, ("private",))
    assert ready_facts([PRIVATE]) == {} and ready_facts({"dropped": [PRIVATE]}) == {}
    versions = {"python": "3.11.14", "torch": "2.5.1+cpu", "transformers": "4.57.0.dev0"}
    told = {"versions": versions, "device": "cuda:0", "dropped": {}}
    assert ready_facts(told) == told


def test_every_reason_for_leaving_out_a_line_has_its_name(tmp_path: Path) -> None:
    good = {"id": "1", "prompt": "p", "answer": "a", "topic": "t"}
    lines = [
        "x" * ((1 << 20) + 1), "{", "[]", json.dumps(good | {"prompt": "\ud800"}), json.dumps(good | {"id": "3"}),
        json.dumps(good | {"id": "3"}), json.dumps(good | {"group": 1.5}),
        *(json.dumps({key: good[key] for key in good if key != name}) for name in good),
        *(json.dumps(good | {name: 1.5}) for name in good),
        *(json.dumps(good | {"id": f"g{number}"}) for number in range(600)),
    ]  # fmt: skip
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\xff\n" + "\n".join(lines).encode())
    file = refuse_bad_references(read_tasks(path), lambda answer: True)
    assert set(file.reasons) | {"unparseable reference answer"} == set(REASONS)
    read = refuse_bad_references(replace_first(tmp_path), lambda answer: answer != "bad")
    assert set(read.reasons) == {"unparseable reference answer"}


def replace_first(folder: Path) -> Any:
    good = {"id": "1", "prompt": "p", "answer": "a", "topic": "t"}
    path = folder / "more.jsonl"
    rows = [good | {"id": "bad", "answer": "bad"}, *(good | {"id": str(number)} for number in range(40))]
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_tasks(path)


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
        assert loop.bench.judge.halted and loop.guard.failure is None
    finally:
        loop.close()
