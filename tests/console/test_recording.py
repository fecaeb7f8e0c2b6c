"""Recordings: what is in them, what is not, and playing them back by a hand clock."""

from __future__ import annotations

import json
import os
import queue
import re
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.release_cases import site as made
from benchmarks.release_site import DeskSource, Site
from console import recording
from console.feed import Feed
from console.recording import Header, Recorder, RecordingFile, Replay
from console.sharing import (
    COORDINATOR,
    EVENTS,
    QUERIES,
    SILO,
    Open,
    Question,
    Rows,
    Rule,
    Share,
    released_answer,
    released_event,
)
from fedsilo.control.client import Event
from fedsilo.protocol.errors import ConflictError, FedSiloError, NotFoundError, UnreachableError, UsageError
from fedsilo.views.state import Snapshot
from tests.console import states
from tests.console.daemon import Daemon
from tests.console.states import unclassified
from tests.simulated.test_T24_pipes_refused import outcome

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 20
SECRET = "only-for-this-site"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


LOGGED, TICKET = "a line of the log", "ticket-0815"


def recorded(path: Path, clock: Clock, **options: Any) -> tuple[Daemon, Recorder, RecordingFile]:
    daemon, file = Daemon(states.silo(states.release()), stays=False), RecordingFile(path, clock=clock, **options)
    daemon.sequence = 5
    return daemon, Recorder(daemon, file), file


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


# ---- writing and playing back ----------------------------------------------------------------------


def test_a_recording_says_what_the_daemon_said_when_it_said_it(tmp_path: Path) -> None:
    path, clock = tmp_path / "a.fedrec", Clock()
    daemon, recorder, file = recorded(path, clock, include_local=True)
    first = recorder.snapshot()
    daemon.answers["outbox"] = {"messages": [], "next": None}
    clock.now += 1
    recorder.query("outbox", {"limit": 100})
    daemon.events.append(Event(6, "2026-12-01T10:00:02.000Z", "sent", {"kind": "lora.factors", "round": 1}))
    clock.now += 1
    list(recorder.watch())
    daemon.state = states.silo(round=2)
    clock.now += 8
    recorder.snapshot()
    daemon.answers["outbox"] = {"messages": [{"seq": 9}], "next": None}
    recorder.query("outbox", {"limit": 100})
    file.close()

    clock.now = 0.0
    replay = Replay(path, clock=clock)
    assert replay.duration == 10.0 and not replay.torn
    assert replay.header == Header("cardio-net", "hospital_a", "silo", False, "2026-12-01T10:00:00.000Z")
    assert replay.snapshot().state == first.state and replay.snapshot().sequence == 5
    watcher = replay.watch(5)
    clock.now = 2.5
    assert next(watcher).name == "sent"
    seen = replay.snapshot()
    assert (seen.sequence, seen.time) == (6, "2026-12-01T10:00:02.500Z")  # ages grow while nothing changes
    assert replay.query("outbox", {"limit": 100}) == {"messages": [], "next": None}
    clock.now = 10.0
    assert replay.snapshot().state["round"] == 2
    assert replay.query("outbox", {"limit": 100}) == {"messages": [{"seq": 9}], "next": None}
    clock.now = 99.0
    assert replay.position == 10.0 and "at its end" in replay.banner()


def test_it_can_be_paused_moved_and_played_faster(tmp_path: Path) -> None:
    path, clock = tmp_path / "a.fedrec", Clock()
    daemon, recorder, file = recorded(path, clock, include_local=True)
    recorder.snapshot()
    for second in range(1, 101):
        clock.now += 1
        daemon.state = states.silo(step=second)
        recorder.snapshot()
    file.close()
    clock.now = 0.0
    replay = Replay(path, speed=10, clock=clock)
    clock.now = 2.0
    assert replay.snapshot().state["step"] == 20
    replay.pause()
    clock.now = 5.0
    assert replay.snapshot().state["step"] == 20 and "paused" in replay.banner()
    replay.seek(70.5)
    assert replay.snapshot().state["step"] == 70 and replay.paused
    replay.resume()
    clock.now = 6.0
    assert replay.snapshot().state["step"] == 80
    replay.seek(-5)
    assert replay.position == 0.0 and replay.snapshot().state["step"] == 6  # of the fixture
    with pytest.raises(UsageError):
        Replay(path, speed=0)


def test_after_a_seek_back_events_happen_again(tmp_path: Path) -> None:
    path, clock = tmp_path / "a.fedrec", Clock()
    daemon, recorder, file = recorded(path, clock)
    recorder.snapshot()
    for number in range(6, 9):
        clock.now += 10
        daemon.events.append(Event(number, "", "sent", {"kind": "lora.factors", "round": number}))
        list(recorder.watch())
    file.close()
    clock.now = 0.0
    replay = Replay(path, clock=clock)
    watcher = replay.watch(5)
    replay.seek(25)
    assert [next(watcher).sequence for _ in range(2)] == [6, 7]
    replay.seek(15)
    clock.now += 5.0
    assert next(watcher).sequence == 7
    replay.close()
    assert list(watcher) == []


def test_what_did_not_change_is_written_once(tmp_path: Path) -> None:
    path, clock = tmp_path / "a.fedrec", Clock()
    daemon, recorder, file = recorded(path, clock)
    daemon.answers["ledger"] = {"dp": "off", "runs": []}
    for _ in range(5):
        clock.now += 1
        recorder.snapshot()
        recorder.query("ledger")
    daemon.state = states.silo(round=2)
    recorder.snapshot()
    file.close()
    kinds = [next(iter(line.keys() - {"at"})) for line in lines_of(path)[1:]]
    assert sorted(kinds) == ["answer", "end", "snapshot", "snapshot"]


def test_a_lost_daemon_is_lost_in_the_replay_and_comes_back(tmp_path: Path) -> None:
    path, clock = tmp_path / "a.fedrec", Clock()
    daemon, recorder, file = recorded(path, clock)
    recorder.snapshot()
    clock.now += 10
    daemon.error = UnreachableError(f"cannot reach {SECRET}")
    for _ in range(3):
        with pytest.raises(UnreachableError):
            recorder.snapshot()
    clock.now += 10
    daemon.error = None
    recorder.snapshot()
    file.close()
    assert SECRET not in path.read_text() and sum("lost" in line for line in lines_of(path)) == 1
    replay = Replay(path, clock=clock)
    replay.seek(9)
    replay.snapshot()
    replay.seek(15)
    with pytest.raises(UnreachableError) as lost:
        replay.snapshot()
    assert "00:20" in lost.value.hint
    replay.seek(20)
    assert replay.snapshot().state["silo"] == "hospital_a"


def test_a_question_nobody_asked_is_not_answered(tmp_path: Path) -> None:
    path, clock = tmp_path / "a.fedrec", Clock()
    daemon, recorder, file = recorded(path, clock, include_local=True)
    recorder.snapshot()
    clock.now += 20
    daemon.answers["limits"] = {"rows": []}
    recorder.query("limits")
    with pytest.raises(NotFoundError):
        recorder.query("audit", {"limit": 1})
    file.close()
    replay = Replay(path, clock=clock)
    with pytest.raises(NotFoundError, match=r"not in this recording: limits.*00:20"):
        replay.query("limits")
    replay.seek(20)
    assert replay.query("limits", {}) == {"rows": []}
    with pytest.raises(NotFoundError, match="not in this recording"):
        replay.query("limits", {"before": 3})
    with pytest.raises(FedSiloError) as refused:
        replay.query("audit", {"limit": 1})
    assert refused.value.code == "NOT_FOUND" and "there is no query" in refused.value.message


def test_the_feed_reads_a_replay_like_a_daemon(tmp_path: Path) -> None:
    path, clock = tmp_path / "a.fedrec", Clock()
    daemon, recorder, file = recorded(path, clock, include_local=True)
    recorder.snapshot()
    for number in (6, 7):
        clock.now += 0.2
        daemon.events.append(Event(number, "", "sent", {"kind": "lora.factors", "round": number}))
        list(recorder.watch())
    daemon.state = states.silo(round=2)
    recorder.snapshot()
    file.close()
    replay = Replay(path)
    arrived: queue.Queue[Snapshot] = queue.Queue()
    feed = Feed(lambda: replay, arrived.put)
    feed.start()
    try:
        assert arrived.get(timeout=WAIT_SECONDS).release("r1/hospital_a/0") is not None
        while True:
            seen = arrived.get(timeout=WAIT_SECONDS)
            assert seen.link.state == "live"
            if len(seen.events) == 2 and not seen.held:
                break
    finally:
        feed.stop()
    assert [event.sequence for event in seen.events] == [6, 7]


# ---- files that are not as they should be ----------------------------------------------------------


def whole(path: Path) -> bytes:
    daemon, recorder, file = recorded(path, Clock(), include_local=True)
    recorder.snapshot()
    daemon.state = states.silo(round=2)
    recorder.snapshot()
    file.close()
    return path.read_bytes()


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    data = whole(tmp_path / "a.fedrec")
    last = data.rstrip(b"\n").rindex(b"\n") + 1
    for torn in (data[:last] + b'{"at":0.0,"snap', data[:last] + b'{"at":0.0,\n'):
        (tmp_path / "torn.fedrec").write_bytes(torn)
        replay = Replay(tmp_path / "torn.fedrec", clock=Clock())
        assert replay.torn and "torn" in replay.banner() and replay.snapshot().state["silo"] == "hospital_a"
    assert not Replay(tmp_path / "a.fedrec", clock=Clock()).torn


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data.replace(b'{"at":0.0,"snapshot"', b'{"at":0.0"snapshot"', 1), "a.fedrec:2: not a line"),
        (lambda data: data.replace(b'"at":0.0', b'"at":NaN', 1), "a.fedrec:2: not a line"),
        (lambda data: data.replace(b'"at":0.0', b'"at":7.0', 1), "a.fedrec:3: earlier"),
        (lambda data: data.replace(b'"at":0.0', b'"at":true', 1), "a.fedrec:2: not a line"),
        (lambda data: data.replace(b'"snapshot":', b'"else":'), "a.fedrec:2: not a line"),
        (lambda data: data.replace(b'"fedrec":1', b'"fedrec":2'), "version 2"),
        (lambda data: data.partition(b"\n")[2], "a.fedrec:1: not a recording"),
        (lambda data: data.partition(b"\n")[0] + b"\n", "no reading"),
        (lambda data: b"", "a.fedrec:1: not a recording"),
        (lambda data: b"[" * 100_000 + b"\n", "a.fedrec:1: not a line"),
    ],
)
def test_what_is_no_recording_is_refused_by_its_line(tmp_path: Path, damage: Any, said: str) -> None:
    path = tmp_path / "a.fedrec"
    data = whole(path)
    Replay(path, clock=Clock())
    path.write_bytes(damage(data))
    with pytest.raises(UsageError, match=re.escape(said)):
        Replay(path, clock=Clock())


def test_a_missing_recording_and_one_that_would_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        Replay(tmp_path / "no.fedrec")
    (tmp_path / "there").write_text("mine")
    with pytest.raises(ConflictError):
        RecordingFile(tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    daemon, recorder, file = recorded(tmp_path / "empty", Clock())
    daemon.error = UnreachableError("nobody there")
    with pytest.raises(UnreachableError):
        recorder.snapshot()
    file.close()
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(
    ("kind", "said"), [("pipe", "it is a pipe"), ("folder", "it is a folder"), ("large", "larger than")]
)
def test_no_pipe_is_waited_for_and_no_file_read_beyond_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, said: str
) -> None:
    path = tmp_path / "a.fedrec"
    data = whole(path)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(data)
        monkeypatch.setattr("console.recording.RECORDING_BYTES_MAX", len(data))
        Replay(path, clock=Clock())
        monkeypatch.setattr("console.recording.RECORDING_BYTES_MAX", len(data) - 1)
    assert said in outcome(lambda named: Replay(named, clock=Clock()), path)


def test_a_full_recording_stops_and_the_console_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "a.fedrec", Clock()
    daemon, recorder, file = recorded(path, clock, include_local=True)
    recorder.snapshot()
    monkeypatch.setattr(recording, "RECORDING_BYTES_MAX", path.stat().st_size + 10)
    daemon.state = states.silo(round=2)
    assert recorder.snapshot().state["round"] == 2
    assert "MiB" in file.trouble and "STOPPED" in file.banner()
    monkeypatch.undo()
    assert Replay(path, clock=clock).snapshot().state["round"] == 1


# ---- what may be in it -----------------------------------------------------------------------------


def spoiled(value: Any, rule: Rule) -> Any:
    """The same value with `SECRET` in the place of everything that is local."""
    if isinstance(rule, Share):
        return SECRET if rule is Share.LOCAL else value
    if isinstance(rule, Rows):
        if isinstance(value, dict):
            return {key: spoiled(item, rule.rule) if _kept(item, rule) else SECRET for key, item in value.items()}
        return [spoiled(item, rule.rule) if _kept(item, rule) else SECRET for item in value]
    rules = dict.fromkeys(rule.released, Share.RELEASED) if isinstance(rule, Open) else rule
    return {key: spoiled(item, rules.get(key, Share.LOCAL)) for key, item in value.items()}


def _kept(item: Any, rows: Rows) -> bool:
    return rows.only is None or item.get(rows.only[0]) in rows.only[1]


def test_a_share_safe_recording_holds_nothing_local(tmp_path: Path) -> None:
    path, clock = tmp_path / "a.fedrec", Clock()
    daemon, recorder, file = recorded(path, clock)
    daemon.state = spoiled(states.silo(states.release()), SILO)
    assert json.dumps(daemon.state).count(SECRET) > 15
    recorder.snapshot()
    for number, (name, rule) in enumerate(EVENTS.items(), 10):
        known = rule if isinstance(rule, dict) else ["kind", "round", "run"]
        spoilt = SECRET if isinstance(rule, Share) else spoiled(dict.fromkeys(known, 1), rule)
        fields = {"reason": spoilt} if isinstance(spoilt, str) else spoilt
        daemon.events.append(Event(number, "", name, {**fields, "unheard": SECRET}))
    list(recorder.watch())
    row = {"seq": 1, "outcome": "", "reasons": [SECRET], "kind": SECRET}
    daemon.answers = {name: {"messages": [row], "unheard": SECRET, "rows": [SECRET]} for name in [*QUERIES, "unheard"]}
    for name in daemon.answers:
        recorder.query(name)
        recorder.query(name, {"text": SECRET})
    file.close()
    assert SECRET not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600
    assert lines_of(path)[0]["share_safe"] is True
    replay = Replay(path, clock=clock)
    assert "share-safe" in replay.banner()
    with pytest.raises(NotFoundError) as refused:
        replay.query("logs")
    assert "--include-local" in refused.value.hint


@pytest.mark.parametrize("include_local", [False, True], ids=["share-safe", "local"])
def test_what_would_leave_is_in_no_recording_while_a_person_looks_at_it(tmp_path: Path, include_local: bool) -> None:
    path, clock = tmp_path / "a.fedrec", Clock()
    daemon, recorder, file = recorded(path, clock, include_local=include_local)
    recorder.snapshot()
    secret = "a record's own words 4711"
    daemon.answers = {
        "approvals.payload": {"answers": [{"row": 3, "answers": [secret], "prompt": secret}]},
        "payload": {"payload": secret}, "logs": {"lines": [LOGGED]},
    }  # fmt: skip
    for name in daemon.answers:  # as the console sees them: all are shown
        assert recorder.query(name, {"ticket": TICKET}) == daemon.answers[name]
    daemon.answers = {}
    for name in ("approvals.payload", "payload"):
        with pytest.raises(NotFoundError):
            recorder.query(name, {"ticket": TICKET})
    file.close()
    text = path.read_text()
    assert secret not in text and "4711" not in text and "approvals.payload" not in text
    assert (LOGGED in text) is include_local  # the good case: other local data is there where it was asked for
    assert text.count(TICKET) == include_local
    with pytest.raises(NotFoundError) as refused:
        Replay(path, clock=clock).query("approvals.payload", {"ticket": TICKET})
    assert "in none" in refused.value.message


def test_with_local_data_the_file_is_private_and_says_so(tmp_path: Path) -> None:
    path, clock = tmp_path / "a.fedrec", Clock()
    daemon, recorder, file = recorded(path, clock, include_local=True)
    daemon.state = spoiled(states.silo(states.release()), SILO)
    recorder.snapshot()
    file.close()
    assert path.read_text().count(SECRET) > 15
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    header = lines_of(path)[0]
    assert header["share_safe"] is False and "did not release" in header["warning"]
    assert "WITH LOCAL DATA" in Replay(path, clock=clock).banner()


@pytest.fixture(scope="module")
def silo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A guard with a release that left, one that was denied by nobody yet, and figures."""
    with closing(made(tmp_path_factory.mktemp("silo"), "run-1", 1)) as site:
        site.let_go(site.hold_responses(6, 9))
        site.hold_factors(1.0)
        site.show()
        yield site


def test_every_field_of_a_real_silo_is_classified(silo: Site) -> None:
    state = DeskSource(silo.desk).snapshot().state
    assert state["held"] and state["left"]
    assert list(unclassified(state, SILO)) == []
    state["held"][0]["near"] = 1
    state["metrics"]["loss"] = {"value": 1.0}
    state["neighbours"] = []
    assert list(unclassified(state, SILO)) == ["held[].near", "neighbours"]
    assert list(unclassified(states.coordinator(), COORDINATOR)) == []


def test_every_query_of_a_real_guard_is_classified(silo: Site) -> None:
    source = DeskSource(silo.desk)
    assert silo.desk._queries.keys() <= QUERIES.keys()
    asked = 0
    for name, question in QUERIES.items():
        if isinstance(question, Share) or name not in silo.desk._queries:
            continue
        answer = source.query(name)
        assert list(unclassified(answer, question.answer)) == [], name
        assert released_answer(name, {}, answer) is not None
        asked += 1
    assert asked >= 4
    for seq in (record["seq"] for record in silo.bench.events("egress.decision")):
        question = QUERIES["outbox"]
        assert isinstance(question, Question)
        assert list(unclassified(source.query("outbox", {"seq": seq}), question.answer)) == []
        assert released_answer("outbox", {"seq": seq}, {"message": {}}) is None


def test_every_event_of_the_source_is_classified() -> None:
    told = set()
    for folder in ("silo", "coordinator", "fedsilo"):
        for path in (ROOT / folder).rglob("*.py"):
            told |= set(re.findall(r'publish\(\s*"([a-z.]+)"', path.read_text()))
    assert len(told) > 20
    assert told <= EVENTS.keys()


def test_of_messages_only_those_that_left_are_released() -> None:
    row = {"seq": 3, "kind": "lora.factors", "bytes": 7, "digest": "ab", "rule": "approvals", "outcome": "sent"}
    answer = {"messages": [row, {**row, "seq": 4, "outcome": ""}, {**row, "seq": 5, "outcome": "acked"}], "held": 2}
    kept = released_answer("outbox", {"limit": 3}, answer)
    shown = {"kind": "lora.factors", "bytes": 7}
    assert kept == ({"messages": [{**shown, "seq": 3, "outcome": "sent"}, {**shown, "seq": 5, "outcome": "acked"}]},)
    for chosen_by in ({"text": "x"}, {"verdict": "deny"}):  # which rows there are would tell what is local in them
        assert released_answer("outbox", chosen_by, answer) is None
    assert released_answer("a query that nobody classified", {}, answer) is None
    assert released_event("task.done", {"round": 1, "metrics": {"reward_mean": 0.5}}) == {"round": 1}
    # what is held did not leave; of what was sent the kind did
    assert released_event("release.held", {"release": "r2/a/0", "kind": "lora.factors"}) == {"release": "r2/a/0"}
    assert released_event("sent", {"kind": "lora.factors", "round": 2}) == {"kind": "lora.factors", "round": 2}
