"""Recordings: what is in them, what is not, and playing them back by a hand clock."""

from __future__ import annotations

import json
import os
import queue
import re
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.release_cases import site as made
from benchmarks.release_site import DeskSource, Site
from console import recording
from console.feed import Feed
from console.recording import Recorder, RecordingFile, Replay
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


def test_a_recording_says_what_the_daemon_said_when_it_said_it(rec: Made) -> None:
    first = rec.read()
    for _ in range(3):  # what did not change is written once
        rec.read()
    rec.daemon.answers["outbox"] = {"messages": [], "next": None}
    rec.clock.now += 1
    rec.recorder.query("outbox", {"limit": 100})
    rec.recorder.query("outbox", {"limit": 100})
    rec.happens(6, 1.0, time="2026-12-01T10:00:02.000Z")
    rec.read(8.0, round=2)
    rec.daemon.answers["outbox"] = {"messages": [{"seq": 9}], "next": None}
    rec.recorder.query("outbox", {"limit": 100})
    replay = rec.replay()
    kinds = sorted(next(iter(line.keys() - {"at"})) for line in rec.lines[1:])
    assert kinds == ["answer", "answer", "end", "event", "snapshot", "snapshot"]
    assert replay.duration == 10.0 and not replay.torn
    header = {"federation": "cardio-net", "site": "hospital_a", "party": "silo", "began": "2026-12-01T10:00:00.000Z"}
    assert header.items() <= rec.lines[0].items() and not replay.share_safe
    assert replay.snapshot().state == first.state and replay.snapshot().sequence == 5
    watcher = replay.watch(5)
    rec.clock.now = 2.5
    assert next(watcher).name == "sent"
    seen = replay.snapshot()
    assert (seen.sequence, seen.time) == (6, "2026-12-01T10:00:02.500Z")  # ages grow while nothing changes
    assert replay.query("outbox", {"limit": 100}) == {"messages": [], "next": None}
    rec.clock.now = 10.0
    assert replay.snapshot().state["round"] == 2
    assert replay.query("outbox", {"limit": 100}) == {"messages": [{"seq": 9}], "next": None}
    rec.clock.now = 99.0
    assert replay.position == 10.0 and "at its end" in replay.banner()


# ---- writing and playing back ----------------------------------------------------------------------


def test_it_can_be_paused_moved_and_played_faster(rec: Made) -> None:
    rec.read()
    for second in range(1, 101):
        rec.read(1.0, step=second)
    for number in (6, 7, 8):
        rec.happens(number, 10.0)
    replay = rec.replay(speed=10)

    def step(at: float) -> int:
        rec.clock.now = at
        return int(replay.snapshot().state["step"])

    assert step(2.0) == 20
    replay.pause()
    assert step(5.0) == 20 and "paused" in replay.banner()
    replay.seek(70.5)
    assert step(5.0) == 70 and replay.paused
    replay.resume()
    assert step(6.0) == 80
    replay.seek(-5)
    assert replay.position == 0.0 and step(6.0) == 6  # of the fixture
    watcher = replay.watch(5)
    replay.seek(125)
    assert [next(watcher).sequence for _ in range(2)] == [6, 7]
    replay.seek(115)
    rec.clock.now += 0.5
    assert next(watcher).sequence == 7  # after a seek back events happen again
    replay.close()
    assert list(watcher) == []
    with pytest.raises(UsageError):
        Replay(rec.path, speed=0)


def test_a_lost_daemon_is_lost_in_the_replay_and_comes_back(shared: Made) -> None:
    shared.read()
    shared.daemon.error = UnreachableError(f"cannot reach {SECRET}")
    for seconds in (10.0, 0.0, 0.0):
        with pytest.raises(UnreachableError):
            shared.read(seconds)
    shared.daemon.error = None
    shared.read(10.0)
    replay = shared.replay()
    assert SECRET not in shared.path.read_text() and sum("lost" in line for line in shared.lines) == 1
    replay.seek(9)
    replay.snapshot()
    replay.seek(15)
    with pytest.raises(UnreachableError) as lost:
        replay.snapshot()
    assert "00:20" in lost.value.hint
    replay.seek(20)
    assert replay.snapshot().state["silo"] == "hospital_a"


def test_a_question_nobody_asked_is_not_answered(rec: Made) -> None:
    rec.read()
    rec.clock.now += 20
    rec.daemon.answers["limits"] = {"rows": []}
    rec.recorder.query("limits")
    with pytest.raises(NotFoundError):
        rec.recorder.query("audit", {"limit": 1})
    replay = rec.replay()
    with pytest.raises(NotFoundError, match=r"not in this recording: limits.*00:20"):
        replay.query("limits")
    replay.seek(20)
    assert replay.query("limits", {}) == {"rows": []}
    with pytest.raises(NotFoundError, match="not in this recording"):
        replay.query("limits", {"before": 3})
    with pytest.raises(FedSiloError, match="there is no query") as refused:
        replay.query("audit", {"limit": 1})
    assert refused.value.code == "NOT_FOUND"


def test_the_feed_reads_a_replay_like_a_daemon(rec: Made) -> None:
    rec.read()
    for number in (6, 7):
        rec.happens(number, 0.2)
    rec.read(round=2)
    rec.file.close()
    replay = Replay(rec.path)
    arrived: queue.Queue[Snapshot] = queue.Queue()
    feed = Feed(lambda: replay, arrived.put)
    feed.start()
    try:
        assert arrived.get(timeout=WAIT_SECONDS).release("r1/hospital_a/0") is not None
        while len((seen := arrived.get(timeout=WAIT_SECONDS)).events) < 2 or seen.held:
            assert seen.link.state == "live"
    finally:
        feed.stop()
    assert [event.sequence for event in seen.events] == [6, 7]


# ---- files that are not as they should be ----------------------------------------------------------


def whole(path: Path) -> bytes:
    made = Made(path)
    made.read()
    made.read(round=2)
    made.file.close()
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
    empty = Made(tmp_path / "empty")
    empty.daemon.error = UnreachableError("nobody there")
    with pytest.raises(UnreachableError):
        empty.read()
    empty.file.close()
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


def test_a_full_recording_stops_and_the_console_goes_on(rec: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    rec.read()
    monkeypatch.setattr(recording, "RECORDING_BYTES_MAX", rec.path.stat().st_size + 10)
    assert rec.read(round=2).state["round"] == 2
    assert "MiB" in rec.file.trouble and "STOPPED" in rec.file.banner()
    monkeypatch.undo()
    assert rec.replay().snapshot().state["round"] == 1


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


@pytest.mark.parametrize("include_local", [False, True], ids=["share-safe", "local"])
def test_what_would_leave_is_in_no_recording_while_a_person_looks_at_it(tmp_path: Path, include_local: bool) -> None:
    made = Made(tmp_path / "a.fedrec", include_local)
    made.read()
    secret, payload = "a record's own words 4711", {"ticket": TICKET}
    made.daemon.answers = {
        "approvals.payload": {"answers": [{"row": 3, "answers": [secret], "prompt": secret}]},
        "payload": {"payload": secret},
        "logs": {"lines": [LOGGED]},
    }
    for name in made.daemon.answers:  # as the console sees them: all are shown
        assert made.recorder.query(name, payload) == made.daemon.answers[name]
    made.daemon.answers = {}
    for name in ("approvals.payload", "payload"):
        with pytest.raises(NotFoundError):
            made.recorder.query(name, payload)
    replay, text = made.replay(), made.path.read_text()
    assert secret not in text and "4711" not in text and "approvals.payload" not in text
    assert (LOGGED in text) is include_local  # the good case: other local data is there where it was asked for
    assert text.count(TICKET) == include_local
    with pytest.raises(NotFoundError, match="in none"):
        replay.query("approvals.payload", payload)


@pytest.fixture(scope="module")
def silo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A guard with a release that left, one that was denied by nobody yet, and figures."""
    with closing(made(tmp_path_factory.mktemp("silo"), "run-1", 1)) as site:
        site.let_go(site.hold_responses(6, 9))
        site.hold_factors(1.0)
        site.show()
        yield site


def test_every_field_of_a_real_silo_is_classified(silo: Site) -> None:
    source = DeskSource(silo.desk)
    state = source.snapshot().state
    assert state["held"] and state["left"] and list(unclassified(state, SILO)) == []
    state["held"][0]["near"] = 1
    state["metrics"]["loss"] = {"value": 1.0}
    state["neighbours"] = []
    assert list(unclassified(state, SILO)) == ["held[].near", "neighbours"]
    assert list(unclassified(states.coordinator(), COORDINATOR)) == []
    known = silo.desk._queries.keys()
    assert known <= QUERIES.keys()
    asked = 0
    for name, question in QUERIES.items():
        if not isinstance(question, Share) and name in known:
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


@dataclass
class Made:
    """A recording that is made by hand: its clock, the daemon that is recorded, and the file."""

    path: Path
    include_local: bool = True

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.daemon = Daemon(states.silo(states.release()), stays=False)
        self.daemon.sequence = 5
        self.file = RecordingFile(self.path, clock=self.clock, include_local=self.include_local)
        self.recorder = Recorder(self.daemon, self.file)

    def read(self, seconds: float = 0.0, **state: Any) -> Any:
        """Have the console read a state after so long."""
        self.clock.now += seconds
        if state:
            self.daemon.state = states.silo(**state)
        return self.recorder.snapshot()

    def happens(self, number: int, seconds: float = 0.0, *, time: str = "") -> None:
        self.clock.now += seconds
        self.daemon.events.append(Event(number, time, "sent", {"kind": "lora.factors", "round": number}))
        list(self.recorder.watch())

    def replay(self, **options: Any) -> Replay:
        self.file.close()
        self.clock.now = 0.0
        return Replay(self.path, clock=self.clock, **options)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.path.read_text().splitlines()]


@pytest.fixture
def rec(tmp_path: Path) -> Made:
    return Made(tmp_path / "a.fedrec")


@pytest.fixture
def shared(tmp_path: Path) -> Made:
    """Without local data."""
    return Made(tmp_path / "a.fedrec", include_local=False)


@pytest.mark.parametrize("include_local", [False, True], ids=["share-safe", "local"])
def test_a_share_safe_recording_holds_nothing_local_and_one_with_local_data_says_so(
    tmp_path: Path, include_local: bool
) -> None:
    made = Made(tmp_path / "a.fedrec", include_local)
    made.daemon.state = spoiled(states.silo(states.release()), SILO)
    assert json.dumps(made.daemon.state).count(SECRET) > 15
    made.recorder.snapshot()
    for number, (name, rule) in enumerate(EVENTS.items(), 10):
        known = rule if isinstance(rule, dict) else ["kind", "round", "run"]
        spoilt = SECRET if isinstance(rule, Share) else spoiled(dict.fromkeys(known, 1), rule)
        fields = {"reason": spoilt} if isinstance(spoilt, str) else spoilt
        made.daemon.events.append(Event(number, "", name, {**fields, "unheard": SECRET}))
    list(made.recorder.watch())
    row = {"seq": 1, "outcome": "", "reasons": [SECRET], "kind": SECRET}
    answer = {"messages": [row], "unheard": SECRET, "rows": [SECRET]}
    made.daemon.answers = dict.fromkeys([*QUERIES, "unheard"], answer)
    for name in made.daemon.answers:
        made.recorder.query(name)
        made.recorder.query(name, {"text": SECRET})
    replay = made.replay()
    header, text = made.lines[0], made.path.read_text()
    assert (header["share_safe"], SECRET in text) == (not include_local, include_local)
    assert ("warning" in header) is include_local and stat.S_IMODE(made.path.stat().st_mode) & 0o600 == 0o600
    assert ("WITH LOCAL DATA" if include_local else "share-safe") in replay.banner()
    if include_local:
        assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    else:
        with pytest.raises(NotFoundError) as refused:
            replay.query("logs")
        assert "--include-local" in refused.value.hint
