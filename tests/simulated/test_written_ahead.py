"""An update goes to the disk while it is still judged: what leaves is durable before it does, as without that, and of
what does not leave nothing is left (T39)."""

from __future__ import annotations

import errno
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.files import durable as files
from fedsilo.files.durable import WrittenAhead
from fedsilo.protocol.codec import decode_factors, sha256_hex
from fedsilo.protocol.errors import OperationError
from silo.guard import archive as archive_module
from silo.guard import ledger as payloads_module
from silo.guard.ledger import Payloads
from silo.guard.messages import Allowed, Denied
from tests.simulated.test_offered_as_rebuilt import BFLOAT16, FLOAT32, body_of, drawn
from tests.world import Bench

DATA = bytes(range(256)) * 8192  # 2 MiB, so that whole pages go past the page cache


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Whatever its size, a payload is written ahead; those that were."""
    begun = list[bytes]()

    class Noted(WrittenAhead):
        def __init__(self, folder: Path, data: Any, mode: int) -> None:
            begun.append(bytes(data))
            super().__init__(folder, data, mode)

    monkeypatch.setattr(payloads_module, "AHEAD_BYTES_MIN", 1)
    monkeypatch.setattr(payloads_module, "WrittenAhead", Noted)
    return begun


# ---- one file ----------------------------------------------------------------------------------------


def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)


@pytest.mark.parametrize("threads", [True, False], ids=["thread", "no-thread"])
@pytest.mark.parametrize("data", [DATA, DATA[:-100], b"little"], ids=["pages", "more", "little"])
def test_what_was_written_ahead_is_there_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, threads: bool
) -> None:
    if not threads:
        no_thread(monkeypatch)
    written = WrittenAhead(tmp_path, data, 0o600)
    assert all(name.startswith(".") and name.endswith(".tmp") for name in names(tmp_path))
    written.keep(tmp_path / "name")
    assert names(tmp_path) == ["name"] and (tmp_path / "name").read_bytes() == data
    assert stat.S_IMODE((tmp_path / "name").stat().st_mode) == 0o600


@pytest.mark.parametrize("threads", [True, False], ids=["thread", "no-thread"])
def test_of_what_was_abandoned_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: bool) -> None:
    if not threads:
        no_thread(monkeypatch)
    WrittenAhead(tmp_path, DATA, 0o600).abandon()
    assert names(tmp_path) == []


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "write", full)


def test_T39_a_full_disk_is_told_when_it_is_to_be_kept_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch)
    WrittenAhead(tmp_path, DATA, 0o600).abandon()
    written = WrittenAhead(tmp_path, DATA, 0o600)
    with pytest.raises(OperationError, match="No space left on device"):
        written.keep(tmp_path / "name")
    assert names(tmp_path) == []


@pytest.mark.parametrize("threads", [True, False], ids=["thread", "no-thread"])
def test_T39_a_part_is_never_kept_for_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: bool) -> None:
    def cut_short(path: Path, data: bytes, *_: object, **__: object) -> bool:
        path.write_bytes(data[:10])
        raise MemoryError

    monkeypatch.setattr(files, "_write_new", cut_short)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    if not threads:
        no_thread(monkeypatch)
    written = WrittenAhead(tmp_path, DATA, 0o600)
    with pytest.raises(OperationError if threads else MemoryError):
        written.keep(tmp_path / "name")
    assert names(tmp_path) == []


def test_what_nobody_wants_any_more_is_not_written_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on, pieces = threading.Event(), threading.Event(), list[int]()

    def slow(_descriptor: int, piece: Any) -> None:
        pieces.append(len(piece))
        began.set()
        assert goes_on.wait(30)

    monkeypatch.setattr(files, "write_past_cache", slow)
    monkeypatch.setattr(files, "FLUSHED_BYTES", 1 << 20)
    written = WrittenAhead(tmp_path, DATA, 0o600)
    assert began.wait(30)
    ending = threading.Thread(target=written.abandon)
    ending.start()
    while written._is_wanted:
        assert ending.is_alive()
    goes_on.set()
    ending.join(30)
    assert pieces == [1 << 20] and names(tmp_path) == []


# ---- payloads ----------------------------------------------------------------------------------------


def test_only_these_very_bytes_are_taken_for_what_was_begun(tmp_path: Path, ahead: list[bytes]) -> None:
    payloads = Payloads(tmp_path / "payloads")
    one, other = bytes(DATA), bytes(bytearray(DATA))
    payloads.begin(one)
    payloads.begin(one)
    assert ahead == [DATA], "begun once"
    payloads.write(sha256_hex(other), other)
    assert names(tmp_path / "payloads")[-1] == sha256_hex(DATA)
    payloads.drop_begun()
    assert names(tmp_path / "payloads") == [sha256_hex(DATA)]
    payloads.drop_begun()
    assert payloads.read(sha256_hex(DATA)) == DATA


def test_what_a_kill_left_of_it_goes_at_the_next_start(tmp_path: Path, ahead: list[bytes]) -> None:
    Payloads(tmp_path / "payloads").begin(DATA)
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread() and thread.name.startswith("Thread-"):
            thread.join(10)
    assert len(names(tmp_path / "payloads")) == 1
    Payloads(tmp_path / "payloads")
    assert names(tmp_path / "payloads") == [] and len(ahead) == 1


# ---- the gate ----------------------------------------------------------------------------------------


def offer(bench: Bench, body: bytes) -> Any:
    factors = decode_factors(body)
    return bench.gate.offer(
        bench.gate.view.place("lora.factors", 1), factors.header, tensors=factors.tensors, read_from=factors.payload
    )


@pytest.mark.parametrize(
    ("policy", "body", "begun"),
    [
        (FLOAT32, body_of(drawn()), 1),  # as it came
        (FLOAT32, body_of(drawn(10.0)), 2),  # clipped: what it came as is dropped
        (BFLOAT16, body_of(drawn()), 1),  # rounded, as was to be expected
    ],
    ids=["as-it-came", "clipped", "rounded"],
)
def test_T39_what_leaves_was_written_ahead_and_is_kept_once(
    tmp_path: Path, ahead: list[bytes], policy: Any, body: bytes, begun: int
) -> None:
    bench = Bench(tmp_path / "a", policy)
    made = offer(bench, body)
    assert isinstance(made, Allowed)
    assert len(ahead) == begun and ahead[-1] == bytes(made.payload)
    assert names(bench.folder / "payloads") == [made.digest]
    assert (bench.folder / "payloads" / made.digest).read_bytes() == bytes(made.payload)
    bench.close()


def nothing_finite() -> bytes:
    tensors = drawn()
    next(iter(tensors.values())).flat[0] = np.inf
    return body_of(tensors)


def test_T39_what_is_denied_is_off_the_disk_before_that_is_recorded(
    tmp_path: Path, ahead: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "a", FLOAT32)
    record, there = bench.gate._judge.record_decision, list[list[str]]()

    def recorded(*of: Any, **more: Any) -> Any:
        there.append(names(bench.folder / "payloads"))
        return record(*of, **more)

    monkeypatch.setattr(bench.gate._judge, "record_decision", recorded)
    assert isinstance(offer(bench, nothing_finite()), Denied)
    assert there == [[]] and len(ahead) == 1
    assert isinstance(offer(bench, body_of(drawn())), Allowed)  # the counterpart: what leaves is there by then
    assert len(there[1]) == 1
    bench.close()


@pytest.mark.parametrize("policy", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_T39_of_what_is_denied_nothing_is_left(tmp_path: Path, ahead: list[bytes], policy: Any) -> None:
    bench = Bench(tmp_path / "a", policy)
    assert isinstance(offer(bench, nothing_finite()), Denied)
    assert names(bench.folder / "payloads") == []
    assert len(ahead) == (policy is FLOAT32)
    assert isinstance(offer(bench, body_of(drawn())), Allowed)  # the counterpart
    bench.close()


def test_T39_a_disk_that_refuses_it_halts_the_gate(
    tmp_path: Path, ahead: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "a", FLOAT32)
    body = body_of(drawn())

    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "_write_new", full)
        with pytest.raises(OperationError, match="No space left") as raised:
            offer(bench, body)
    assert raised.value.code == "PAYLOADS_UNWRITABLE" == bench.gate.halt_code
    assert names(bench.folder / "payloads") == [] and bench.channel.sent == []
    bench.close()


def test_where_room_has_to_be_made_first_nothing_is_written_before(
    bench: Bench, ahead: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = body_of(drawn())
    gigabytes = bench.gate.policy.file.retention.outbox_max_gb
    monkeypatch.setattr(archive_module, "_GB", (len(body) - 1) / gigabytes)
    with pytest.raises(OperationError) as raised:
        offer(bench, body)
    assert raised.value.code == "OUTBOX_FULL" and ahead == []
    monkeypatch.setattr(archive_module, "_GB", len(body) / gigabytes)  # the counterpart: just enough
    again = bench.restart()
    assert isinstance(offer(again, body), Allowed) and len(ahead) == 1
    again.close()
    assert len(names(bench.folder / "payloads")) == 1
