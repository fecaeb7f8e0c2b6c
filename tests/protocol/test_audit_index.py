"""The index of a log, whatever becomes of its file, and a log checked beside its writer: they say what the log says."""

from __future__ import annotations

import itertools
import json
import logging
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.audit import index as audit_index
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.checkpoint import log_key
from fedsilo.audit.index import STRIDE, LogIndex, index_path
from fedsilo.audit.log import AuditLog, Broken, LogCheck
from fedsilo.audit.reader import read_lines, read_records
from fedsilo.audit.record import link_of
from fedsilo.audit.segments import segments
from fedsilo.protocol.errors import NotFoundError
from tests.protocol.audit_parties import KEYS, OTHER_KEY, SILO, Clock, open_log

MESSAGES = 300


@pytest.fixture
def log(tmp_path: Path) -> Iterator[AuditLog]:
    with open_log(tmp_path / "audit") as opened:
        for number in range(MESSAGES):
            send(opened, number)
        yield opened


def send(log: AuditLog, number: int) -> None:
    """A decision and its outcome; every third message is denied."""
    message: dict[str, Any] = {"run": "r", "round": 1 + number % 2, "kind": "metrics.eval"}
    message["payload"] = {"bytes": number}
    decision = log.append("egress.decision", decision="allow" if number % 3 else "deny", **message)
    if number % 3:
        log.append("egress.sent", link={"decision": decision}, **message)


def told(log: AuditLog) -> tuple[Any, ...]:
    """What a fresh index lists."""
    index = LogIndex(log.directory, lambda: log.size)
    rows = index.page("egress", limit=1_000).rows
    return rows, index.totals("egress"), index.rounds_of("r"), index.marks("r", 1), index.marks("r", 2)


def read_by(log: AuditLog) -> int:
    """How many lines it takes to answer after a restart."""
    index = LogIndex(log.directory, lambda: log.size)
    index.totals("egress")
    return index.lines_read


def told_to(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)


def overwritten(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 : len(data) // 2] = b"\xff" * (len(data) // 2 - 4096)
    path.write_bytes(data)


MADE_UP = "UPDATE messages SET outcome = 'made up'"
HARMS: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 3]),
    "foreign": lambda path: path.write_bytes(b"no database of anybody " * 400),
    "overwritten": overwritten,
    "of another version": lambda path: told_to(path, "PRAGMA user_version = 99", MADE_UP),
    "of another log": lambda path: told_to(path, "UPDATE head SET link = '00'", MADE_UP),
    "ahead of its log": lambda path: told_to(path, "UPDATE head SET records = records + 1", MADE_UP),
    "lacking a table": lambda path: told_to(path, "DROP TABLE marks"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_an_index_that_was_harmed_is_made_anew_from_the_log(log: AuditLog, harm: str) -> None:
    before = told(log)
    assert len(before[0]) == MESSAGES and before[1] == {"total": MESSAGES, "held": 0, "denied": MESSAGES // 3}
    assert before[2] == [1, 2] and before[3] and before[4]
    assert read_by(log) <= STRIDE  # it is kept
    HARMS[harm](index_path(log.directory))
    assert told(log) == before
    if harm != "lacking a table":  # which is no fault of the file: it is not trusted with anything from then on
        assert read_by(log) <= STRIDE


def test_where_none_can_be_kept_lists_are_the_same_and_the_cause_is_told(
    log: AuditLog, caplog: pytest.LogCaptureFixture
) -> None:
    before = told(log)
    path = index_path(log.directory)
    for leftover in path.parent.glob(f"{path.name}*"):
        leftover.unlink()
    path.mkdir()  # as on a read-only file system, SQLite can make no file there
    with caplog.at_level(logging.WARNING, "fedsilo.audit"):
        assert told(log) == before
    assert str(path) in caplog.text
    assert read_by(log) >= log.size and list(path.iterdir()) == []


def test_a_link_in_its_place_is_not_followed(log: AuditLog, tmp_path: Path) -> None:
    aim = tmp_path / "elsewhere"
    aim.write_bytes(b"somebody's")
    index_path(log.directory).symlink_to(aim)
    assert len(told(log)[0]) == MESSAGES and aim.read_bytes() == b"somebody's"


def test_two_readers_take_in_each_record_once(log: AuditLog) -> None:
    one, other = (LogIndex(log.directory, lambda: log.size) for _ in range(2))
    for number in range(6):
        assert (one if number % 2 else other).totals("egress")["total"] == MESSAGES + number
        send(log, number)
    assert one.totals("egress") == other.totals("egress")
    assert one.lines_read + other.lines_read <= log.size + 10 * STRIDE


def test_an_older_copy_of_the_log_has_no_newer_index(log: AuditLog, tmp_path: Path) -> None:
    (_, path), *_ = segments(log.directory)
    older, size = path.read_bytes(), log.size
    before = told(log)
    send(log, 1)
    assert told(log) != before
    path.write_bytes(older)  # as a backup would be
    index = LogIndex(log.directory, lambda: size)
    assert index.page("egress", limit=1_000).rows == before[0]


SOUND = {"seq": "@", "t": 1, "mono": 1, "boot": "b", "event": "egress.decision", "kind": "k", "decision": "allow"}
HOSTILE = (
    b"", b"{", b"[]", b"7", b"\xff\xfe", b'{"event":"egress.decision"}', b'{"seq":%d,"event":"round.result"}',
    *(
        json.dumps(SOUND | more).encode().replace(b'"@"', b"%d")
        for more in (
            {"t": 10**30}, {"t": "x"}, {"mono": -1}, {"mono": 1 << 70}, {"boot": None}, {"kind": "\ud800"}, {"kind": 7},
            {"decision": []}, {"rules": 3}, {"rules": [{}]}, {"payload": 1}, {"facts": []}, {"reasons": 1},
            {"event": "egress.sent", "link": 4}, {"event": "egress.sent", "link": {"decision": 1 << 80}},
            {"event": "round.result", "run": "r", "round": 1 << 70}, {"event": "round.agreed", "detail": 5},
            {"event": "approval.deny", "payload": "x"}, {"event": "egress.decision", "decision": "hold", "run": {}},
        )
    ),
)  # fmt: skip


def test_T38_lines_that_are_no_records_are_left_out_and_the_others_listed(log: AuditLog) -> None:
    before = told(log)
    size = log.size
    (_, path), *_ = segments(log.directory)
    lines = (line % number if b"%d" in line else line for number, line in enumerate(HOSTILE, size))
    path.write_bytes(path.read_bytes() + b"".join(line.replace(b"\n", b"") + b"\n" for line in lines))
    index = LogIndex(log.directory, lambda: size + len(HOSTILE))
    rows = index.page("egress", limit=1_000).rows
    assert [row for row in rows if row["seq"] < size] == before[0]
    assert index.complete and index.marks("r", 1) == before[3]
    assert not verify_logs([log.directory])[0]["verified"]


def test_verification_takes_no_word_of_the_index(log: AuditLog) -> None:
    told(log)
    told_to(index_path(log.directory), "UPDATE places SET offset = offset + 1")
    log.checkpoint()
    assert verify_logs([log.directory])[0]["verified"]
    index = LogIndex(log.directory, lambda: log.size)
    assert index.records(40, 50) == list(read_records(log.directory, 40))[:10]


def test_what_retention_removed_is_in_no_index_either(tmp_path: Path) -> None:
    clock = Clock()
    with open_log(tmp_path / "audit", segment_bytes_max=4_000, clock=clock) as log:
        for number in range(40):
            log.append("egress.decision", decision="allow", kind="metrics.eval", run=f"run-{number:04d}", round=1)
            clock.now += 86_400
        index = LogIndex(log.directory, lambda: log.size)
        assert len(index.page("egress", limit=100).rows) == 40 and index.marks("run-0001", 1)
        removed = log.remove_old(int((clock.now - 20 * 86_400) * 1000))
        assert removed > 0
        files = [index_path(log.directory).with_name(f"audit-index.sqlite3{end}") for end in ("", "-wal", "-shm")]
        assert not any(path.exists() for path in files)
        for asking in (index, LogIndex(log.directory, lambda: log.size)):
            assert [row["seq"] for row in asking.page("egress", limit=100).rows][-1] >= removed
            assert not asking.marks("run-0001", 1) and asking.rounds_of("run-0039") == [1]
        assert not any(b"run-0001" in path.read_bytes() for path in files if path.exists())


# ---- rounds: who may make a mark, and what is kept of very many ----


def test_T23_T37_messages_that_were_not_let_in_displace_no_round(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        index = LogIndex(log.directory, lambda: log.size)
        opened: dict[str, Any] = {"run": "run-1", "round": 1, "kind": "round.open"}
        log.append("ingress.decision", decision="allow", reasons=[], **opened)
        for number in range(audit_index.ROUNDS_MAX + 8):
            made_up = {**opened, "run": f"x{number}", "round": 9}
            log.append("ingress.decision", decision="deny", reasons=["RUN_NOT_OPEN"], **made_up)
            log.append("ingress.decision", decision="deny", reasons=["RUN_NOT_OPEN"], **opened)
        log.append("egress.decision", run="run-1", round=1, kind="lora.factors", decision="deny", reasons=["X"])
        assert index.rounds_of("run-1") == [1] and index.rounds_of("x3") == []
        assert [(mark.event, mark.verdict) for mark in index.marks("run-1", 1)] == [
            ("ingress.decision", "allow"), ("egress.decision", "deny"),
        ]  # fmt: skip


def test_the_end_of_a_round_is_kept_however_many_messages_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_index, "MARKS_MAX", 8)
    monkeypatch.setattr(audit_index, "OWN_MARKS_MAX", 4)
    with open_log(tmp_path / "log") as log:
        index = LogIndex(log.directory, lambda: log.size)
        for step in range(1, 21):
            log.append("egress.decision", run="run-1", round=1, step=step, kind="public.responses", decision="allow")
        for number in range(10):
            verdict = {"verdicts": {"hospital_a": f"word {number}"}}
            log.append("round.result", run="run-1", round=1, detail=verdict)
        found = index.marks("run-1", 1)
        assert [mark.step for mark in found] == [*range(1, 9), 0, 0, 0, 0]
        assert [dict(mark.detail)["hospital_a"] for mark in found[8:]] == ["word 0", "word 1", "word 2", "word 9"]


# ---- records by their number, and a log checked beside its writer ----

RECORDS = 40
KEY = log_key(SILO, KEYS[SILO].public_key())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A closed log of several segments with several checkpoints."""
    with open_log(tmp_path / "log", segment_bytes_max=4000, checkpoint_records=10) as log:
        for number in range(RECORDS):
            log.append("start" if number == 0 else "screen.hit", kind="public.responses", detail={"number": number})
    yield tmp_path / "log"


def quiet(number: int) -> None:
    """Nobody is told how far it is."""


def check(folder: Path, told: list[int] | None = None) -> Broken | None:
    size = sum(1 for _ in read_lines(folder))
    return LogCheck(folder, KEY, size, (told or []).append).run()


def rewritten(folder: Path, number: int, change: tuple[bytes, bytes], *, chained: bool) -> None:
    """One record changed on the disk; `chained` writes every later link anew, as a forger would."""
    previous = ""
    for _, path in segments(folder):
        lines = []
        for original in path.read_bytes().splitlines():
            line, record = original, json.loads(original)
            if record["seq"] == number:
                assert line.count(change[0]) == 1
                line = line.replace(*change)
            elif chained and record["seq"] > number:
                line = line.replace(record["link"]["previous"].encode(), previous.encode())
            previous = link_of(line)
            lines.append(line)
        path.write_bytes(b"".join(line + b"\n" for line in lines))


# ---- pages -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.binary(max_size=9).map(lambda data: data.replace(b"\n", b".")), max_size=30), max_size=4),
    st.integers(0, 99), st.integers(0, 40), st.booleans(),
)  # fmt: skip
def test_any_range_is_what_reading_from_the_beginning_gives(
    contents: list[list[bytes]], start: int, count: int, torn: bool
) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_index, "STRIDE", 4)  # several places a segment
        folder, first = Path(place) / "log", 0
        folder.mkdir()
        for number, lines in enumerate(contents):
            end = b"torn" if torn and number == len(contents) - 1 else b""
            numbered = (b'"seq":%d,%s' % item for item in enumerate(lines, first))
            (folder / f"{first:012d}.jsonl").write_bytes(b"".join(line + b"\n" for line in numbered) + end)
            first += len(lines) or 1  # a segment of nothing would have its follower's name
            if not lines:
                break
        whole = list(read_lines(folder))
        index = LogIndex(folder, lambda: len(whole))
        wanted = [item for item in whole if start <= item[0] < start + count]
        assert index.lines(start, start + count) == wanted
        index.catch_up()
        read = index.lines_read
        assert index.lines(start, start + count) == wanted  # by the places that are known by then
        assert index.lines_read - read <= len(wanted) + 4 * len(contents)


def test_lines_that_are_added_are_seen_and_a_file_that_was_changed_is_counted_anew(folder: Path) -> None:
    size = sum(1 for _ in read_lines(folder))
    index = LogIndex(folder, lambda: size)
    index.catch_up()
    last = segments(folder)[-1][1]
    whole = last.read_bytes()
    last.write_bytes(whole + b"one\ntwo\nthr")
    assert [line for _, line in index.lines(size, 999)] == [b"one", b"two"]
    last.write_bytes(whole + b"torn")
    assert index.lines(size - 1, 999) == list(read_lines(folder, size - 1))
    (_, first), *_ = segments(folder)
    first.write_bytes(b"another\n" + first.read_bytes())  # every record begins elsewhere
    assert index.lines(0, 5) == list(itertools.islice(read_lines(folder), 5))


def test_looking_back_finds_the_newest_and_says_where_to_go_on(folder: Path) -> None:
    numbers = [number for number, _ in read_lines(folder)]
    index = LogIndex(folder, lambda: len(numbers))
    found: list[int] = []
    before: int | None = len(numbers)
    while before is not None:
        back = index.back(before, lambda line: b"screen.hit" in line, limit=7, look_max=9)
        assert len(back.rows) <= 7
        found += [number for number, _ in back.rows]
        before = back.next
    assert found == [number for number, line in reversed(list(read_lines(folder))) if b"screen.hit" in line]
    assert index.back(0, lambda line: True, limit=7, look_max=9) == audit_index.Page([], None)
    with pytest.raises(NotFoundError):
        LogIndex(folder / "none", lambda: 1).lines(0, 1)


def test_a_damaged_line_is_shown_as_such_and_its_neighbours_whole(folder: Path) -> None:
    rewritten(folder, 7, (b'"number":', b'"number";'), chained=False)
    six, seven, eight = LogIndex(folder, lambda: RECORDS).records(6, 9)
    assert (six["seq"], eight["seq"]) == (6, 8) and six["event"] == eight["event"] == "screen.hit"
    assert (seven["seq"], seven["event"]) == (7, "damaged") and seven["why"]


def test_a_record_in_another_ones_place_is_shown_as_damaged(folder: Path) -> None:
    (_, path), *_ = segments(folder)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[2], *lines[2:]]))
    zero, one, two = LogIndex(folder, lambda: RECORDS).records(0, 3)
    assert (zero["event"], one["event"], two["event"]) == ("start", "damaged", "screen.hit")
    assert one["seq"] == 1 and "carries number 2" in one["why"]


# ---- checking --------------------------------------------------------------------------------------


def test_a_sound_log_is_checked_to_its_end_with_progress(folder: Path) -> None:
    told: list[int] = [0]
    assert check(folder, told) is None
    assert told == sorted(told) and told[-1] == sum(1 for _ in read_lines(folder))


@pytest.mark.parametrize(
    ("number", "change", "chained", "why", "where"),
    [
        (7, (b'"number":', b'"number";'), False, "damaged", range(7, 8)),
        (7, (b"public.responses", b"public.rewards"), False, "record 8 does not follow", range(7, 8)),
        # of a log chained anew, from the last checkpoint that fits on; one is made every ten records
        (26, (b"public.responses", b"public.rewards"), True, "checkpoint", range(11, 27)),
    ],
)
def test_T38_a_changed_record_is_named(
    folder: Path, number: int, change: tuple[bytes, bytes], chained: bool, why: str, where: range
) -> None:
    rewritten(folder, number, change, chained=chained)
    broken = check(folder)
    assert broken is not None and broken.seq in where and why in broken.why


def test_T38_lost_records_and_a_foreign_checkpoint_are_named(folder: Path, tmp_path: Path) -> None:
    size = sum(1 for _ in read_lines(folder))
    broken = LogCheck(folder, KEY, size + 5, quiet).run()
    assert broken is not None and broken.seq == size and "gone" in broken.why
    other = log_key(SILO, OTHER_KEY.public_key())
    broken = LogCheck(folder, other, size, quiet).run()
    assert broken is not None and "checkpoints/" in broken.why
    (_, second), (third, _) = segments(folder)[1], segments(folder)[2]
    second.unlink()
    broken = LogCheck(folder, KEY, size, quiet).run()
    assert broken is not None and f"to {third - 1} are gone" in broken.why


def test_a_log_that_retention_reduced_is_checked_over_its_leaf_hashes(tmp_path: Path) -> None:
    clock = Clock()
    with open_log(tmp_path / "log", segment_bytes_max=2000, clock=clock, checkpoint_records=10) as log:
        for _ in range(20):
            log.append("screen.hit", kind="public.responses")
            clock.now += 86_400
        removed = log.remove_old(int((clock.now - 5 * 86_400) * 1000))
        size = log.size
    assert removed > 0
    folder = tmp_path / "log"
    index = LogIndex(folder, lambda: size)
    assert index.first == removed and index.lines(0, removed) == []
    assert LogCheck(folder, KEY, size, quiet).run() is None
    leaves = next((tmp_path / "log").glob("*.leaves"))
    data = bytearray(leaves.read_bytes())
    data[40] ^= 1
    leaves.write_bytes(data)
    assert LogCheck(folder, KEY, size, quiet).run() is not None
