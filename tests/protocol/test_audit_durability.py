"""T39, T41: kill -9 anywhere, a torn end, a full disk, rotation under load, a clock that goes back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedsilo.audit import segments as audit_segments
from fedsilo.audit.log import AuditLog, sent_by_kind
from fedsilo.audit.reader import read_records
from fedsilo.audit.record import Record, RecordError
from fedsilo.audit.segments import LogFullError, segments
from fedsilo.protocol.errors import ConflictError, OperationError, VerificationError
from tests.protocol.audit_parties import COORDINATOR, OTHER_KEY, SILO, Clock, append_send, open_log, problems, segment

REPOSITORY = Path(__file__).parents[2]


def events(folder: Path) -> list[str]:
    return [record["event"] for record in read_records(folder)]


# ---- kill -9 -----------------------------------------------------------------------------------------------


def run_child(folder: Path, fatal_call: int, how: str) -> tuple[int, list[str]]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.protocol.audit_fault_child", str(folder), str(fatal_call), how],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stderr == ""
    return result.returncode, result.stdout.split()


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize("how", ["before", "half", "after"])
def test_T39_kill_at_every_disk_call_loses_nothing_that_was_promised(
    tmp_path: Path, how: str, sampled: Callable[[Sequence[int], int], list[int]]
) -> None:
    """The child dies at its n-th disk call; each time the log is opened again."""
    code, told = run_child(tmp_path / "whole", 1 << 20, how)
    assert code == 0 and told[-2] == "done" and int(told[-1]) > 30

    def attempt(fatal_call: int) -> int:
        folder = tmp_path / f"{fatal_call}"
        code, promised = run_child(folder, fatal_call, how)
        with open_log(folder, segment_bytes_max=1500, checkpoint_records=3) as log:
            records = {record["seq"]: record for record in log.records()}
            for seq in promised:
                assert records[int(seq)]["event"] == "egress.decision", (fatal_call, how)
            outcomes = [
                record["link"]["decision"]
                for record in records.values()
                if record["event"] in ("egress.sent", "egress.indeterminate")
            ]
            decided = [seq for seq, record in records.items() if record["event"] == "egress.decision"]
            assert sorted(outcomes) == decided  # exactly one outcome each
            append_send(log, 99)
        assert problems(folder) == [[]], (fatal_call, how)
        return code

    # Every third call, so that the three parameters together meet each kind of call in every phase.
    calls = range({"before": 0, "half": 1, "after": 2}[how], int(told[-1]), 3)
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(attempt, sampled(calls, 8))) == {-signal.SIGKILL}  # it really died there


@pytest.mark.parametrize("kept", [1, 60, -1])
def test_T39_a_torn_end_is_put_aside_and_recorded(tmp_path: Path, kept: int) -> None:
    with open_log(tmp_path) as log:
        log.append("start")
        append_send(log, 1)
    whole = segment(tmp_path).read_bytes()
    for path in (tmp_path / "checkpoints").iterdir():
        if int(path.stem) > 1:
            path.unlink()
    last = whole.splitlines(keepends=True)[-1]
    segment(tmp_path).write_bytes(whole[: -len(last)] + last[:kept])
    with open_log(tmp_path) as log:
        repaired, lost = list(log.records(2))
        assert (repaired["event"], repaired["detail"]["bytes"]) == ("tail.repaired", len(last[:kept]))
        assert (tmp_path / "quarantine" / repaired["detail"]["quarantine"]).read_bytes() == last[:kept]
        assert (lost["event"], lost["link"]["decision"]) == ("egress.indeterminate", 1)
    assert problems(tmp_path) == [[]]
    with open_log(tmp_path) as log:
        assert log.size == 4  # repaired once


def test_T38_a_shortened_log_is_refused_at_start_and_left_untouched(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append("start")
        log.append("stop")
    whole = segment(tmp_path).read_bytes()
    for damaged in (whole[:-5], whole[: whole.index(b"\n") + 1], whole.replace(b'"stop"', b'"halt"')):
        segment(tmp_path).write_bytes(damaged)
        with pytest.raises(VerificationError):
            open_log(tmp_path)
        assert segment(tmp_path).read_bytes() == damaged
    segment(tmp_path).write_bytes(whole)
    open_log(tmp_path).close()


def test_an_allow_without_outcome_becomes_indeterminate_once(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    routing = {"run": "r1", "kind": "lora.factors", "direction": "egress"}
    linked = append_send(log, 1)
    by_sequence = log.append("egress.decision", decision="allow", sequence=2, **routing)
    log.append("egress.sent", sequence=2, payload={"bytes": 5}, **routing)
    log.append("egress.decision", decision="deny", sequence=3, **routing)
    log.append("egress.decision", decision="hold", sequence=4, **routing)
    open_allow = log.append("egress.decision", decision="allow", sequence=5, payload={"bytes": 77}, **routing)
    log.close()
    assert {linked, by_sequence} == {0, 2}
    for _ in range(2):
        with open_log(tmp_path) as log:
            (record,) = [item for item in log.records() if item["event"] == "egress.indeterminate"]
            assert record["link"]["decision"] == open_allow
            assert (record["kind"], record["sequence"], record["payload"]) == ("lora.factors", 5, {"bytes": 77})


# ---- full disk ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, kibibytes: int) -> Iterator[None]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Take what is left of the disk."""
    with path.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(b"x" * 4096)


def test_T39_a_full_disk_halts_the_log_and_space_lets_it_go_on(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 512):
        log = open_log(disk / "audit", reserve_bytes=64 << 10)
        log.append("start")
        fill(disk / "filler")
        before = log.size
        with pytest.raises(LogFullError):
            for sequence in range(200):
                append_send(log, sequence)
        newest = list(log.records())[-1]
        assert newest["event"] == "halt" and newest["reasons"] == ["LOG_FULL"]
        assert log.size > before
        fill(disk / "filler2")
        size = log.size
        with pytest.raises(LogFullError):
            append_send(log, 1000)
        assert log.size == size
        with pytest.raises(LogFullError):  # also after a restart
            log.close()
            open_log(disk / "audit", reserve_bytes=64 << 10)
        (disk / "filler").unlink()
        (disk / "filler2").unlink()
        with open_log(disk / "audit", reserve_bytes=64 << 10) as log:
            append_send(log, 1001)
            assert (disk / "audit" / "reserve").stat().st_blocks * 512 >= 64 << 10
        assert problems(disk / "audit") == [[]]


def test_T39_space_that_returns_while_running_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path, reserve_bytes=4096)
    log.append("start")
    full = {"write": True, "fallocate": True}
    real_write, real_fallocate = audit_segments.write_all, os.posix_fallocate

    def write_all(descriptor: int, data: bytes) -> None:
        if full["write"] and (tmp_path / "reserve").exists():
            os.write(descriptor, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        real_write(descriptor, data)

    def fallocate(*arguments: int) -> None:
        if full["fallocate"]:
            raise OSError(28, "No space left on device")
        real_fallocate(*arguments)

    monkeypatch.setattr(audit_segments, "write_all", write_all)
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(LogFullError, match=r"screen\.hit"):
        log.append("screen.hit")
    assert events(tmp_path) == ["start", "halt"]  # the half-written line was taken back, the reserve carried the halt
    with pytest.raises(LogFullError, match="still no space"):
        log.append("screen.hit")
    full["write"] = full["fallocate"] = False
    assert log.append("screen.hit") == 2
    log.close()
    assert problems(tmp_path) == [[]]


def test_T39_a_file_size_limit_counts_as_a_full_disk(tmp_path: Path) -> None:
    """Needs no mount: the child may not write files beyond 4 KiB."""
    script = """
import resource, sys
from pathlib import Path
from fedsilo.audit.log import LogFullError
from tests.protocol.audit_parties import append_send, open_log
log = open_log(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    for sequence in range(100):
        append_send(log, sequence)
except LogFullError:
    print("full", log.size)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    word, size = result.stdout.split()
    assert word == "full" and int(size) > 4
    assert segment(tmp_path).stat().st_size <= 4096
    with open_log(tmp_path) as log:
        assert log.size in (int(size), int(size) + 1)  # one more if an allow was left without outcome
    assert problems(tmp_path) == [[]]


def test_T39_after_a_failed_flush_nothing_is_written_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path)
    log.append("start")

    def failing(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        with pytest.raises(OperationError, match="Input/output"):
            log.append("screen.hit")
    with pytest.raises(OperationError, match="takes no records"):
        log.append("screen.hit")
    log.close()
    with open_log(tmp_path) as log:
        assert log.append("screen.hit") == log.size - 1
    assert problems(tmp_path) == [[]]


# ---- rotation, threads, clock, locks -----------------------------------------------------------------------


def test_T39_rotation_under_load_keeps_one_history(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes_max=2000, checkpoint_records=7)
    barrier = threading.Barrier(4)
    numbers: list[int] = []

    def worker(name: int) -> None:
        barrier.wait()
        for item in range(15):
            numbers.append(log.append("screen.hit", detail={"worker": name, "item": item}))

    threads = [threading.Thread(target=worker, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    root, size = log.root, log.size
    log.close()
    files = segments(tmp_path)
    assert len(set(numbers)) == 60 and len(files) > 5
    for first, _ in files[1:]:
        closing = next(read_records(tmp_path, first - 1))
        assert closing["event"] == "segment.close" and closing["detail"]["size"] == first - 1
    with open_log(tmp_path) as log:
        assert (log.size, log.root) == (size, root)
        assert [record["seq"] for record in log.records(17)] == list(range(17, size))
    assert problems(tmp_path) == [[]]
    files[2][1].rename(tmp_path / "elsewhere")
    assert problems(tmp_path) != [[]]
    with pytest.raises(VerificationError, match="starts at record"):
        open_log(tmp_path)


def test_checkpoints_come_by_number_of_records_and_at_start_and_stop(tmp_path: Path) -> None:
    with open_log(tmp_path, checkpoint_records=10) as log:
        log.append("start")
        for _ in range(25):
            log.append("screen.hit")
        log.append("stop")
        assert log.latest_note.split("\n")[1] == "27"
    sizes = sorted(int(path.stem) for path in (tmp_path / "checkpoints").iterdir())
    assert sizes == [1, 11, 21, 27]


def test_T41_a_clock_that_goes_back_is_recorded_and_expiry_time_does_not_follow(tmp_path: Path) -> None:
    clock = Clock(1_800_000_000.0)
    with open_log(tmp_path, clock=clock) as log:
        log.append("start")
        clock.now -= 0.5  # what time synchronisation does
        log.append("screen.hit")
        clock.now -= 86_400
        log.append("screen.hit")
        log.append("screen.hit")
        assert [record["event"] for record in log.records(1)] == [
            "screen.hit",
            "clock.jump",
            "screen.hit",
            "screen.hit",
        ]
        assert next(iter(log.records(2)))["detail"] == {"backward_milliseconds": 86_400_000}
        assert log.latest_time == 1_800_000_000.0
    clock.now -= 86_400
    with open_log(tmp_path, clock=clock) as log:  # also across a restart
        log.append("start")
        assert [record["event"] for record in log.records(5)] == ["clock.jump", "start"]
        assert log.latest_time == 1_800_000_000.0


def test_T42_a_second_writer_is_refused(tmp_path: Path) -> None:
    with open_log(tmp_path), pytest.raises(ConflictError, match=f"process {os.getpid()}"):
        open_log(tmp_path)
    open_log(tmp_path).close()


def test_a_log_keeps_its_key_and_its_name(tmp_path: Path) -> None:
    open_log(tmp_path).close()
    for changes in ({"key": OTHER_KEY}, {"origin": COORDINATOR}):
        with pytest.raises(ConflictError, match="another key or name"):
            open_log(tmp_path, **changes)
    with pytest.raises(ConflictError), open_log(tmp_path) as log:
        log.trust_peer(SILO, OTHER_KEY.public_key())


def test_a_refused_record_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append("start")
        root = log.root
        with pytest.raises(RecordError):
            log.append("screen.hit", detail={"text": "x" * 200})
        assert (log.size, log.root) == (1, root)
        assert log.append("screen.hit", actor="spiffe://site/operator/ann") == 1
        assert next(iter(log.records(1)))["actor"] == "spiffe://site/operator/ann"


def test_each_append_is_one_write_and_one_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_write, real_flush = os.write, os.fdatasync
    with open_log(tmp_path) as log:
        monkeypatch.setattr(os, "write", lambda *arguments: (calls.append("write"), real_write(*arguments))[1])
        monkeypatch.setattr(os, "fdatasync", lambda *arguments: (calls.append("flush"), real_flush(*arguments))[1])
        log.append("screen.hit")
        assert calls == ["write", "flush"]
        monkeypatch.undo()


def test_what_left_is_counted_from_the_records(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        append_send(log, 1, 100)
        append_send(log, 2, 20, "control.poll")
        append_send(log, 3, 30)
        log.append("egress.decision", decision="deny", kind="lora.factors")
        log.append("egress.indeterminate", kind="lora.factors", payload={"bytes": 9}, link={"decision": 0})
        assert sent_by_kind(map(Record, log.records())) == {"control.poll": (1, 20), "lora.factors": (2, 130)}
        assert sent_by_kind([]) == {}


def test_T40_the_folder_holds_no_private_key_and_no_loose_modes(tmp_path: Path) -> None:
    with open_log(tmp_path / "audit") as log:
        append_send(log, 1)
    secret = b"\x0a" * 32
    for path in (tmp_path / "audit").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert secret not in content and secret.hex().encode() not in content
            assert not path.stat().st_mode & 0o022
        else:
            assert path.stat().st_mode & 0o777 == 0o700


def test_defaults_are_real_clocks_and_random_salts(tmp_path: Path) -> None:
    from tests.protocol.audit_parties import KEYS

    with AuditLog(tmp_path, origin=SILO, key=KEYS[SILO], actor=SILO, reserve_bytes=1 << 20) as log:
        log.append("start")
        log.append("stop")
        first, second = log.records()
        assert first["salt"] != second["salt"] and second["t"] >= first["t"] > 1_700_000_000_000
        assert (tmp_path / "reserve").stat().st_size == 1 << 20
    assert json.loads(segment(tmp_path).read_bytes().splitlines()[0])["event"] == "start"
