"""T39: a full disk or a halt stops a party and loses nothing: with space, or started again, it goes on where it was;
what a party wrote is on the disk when the call returns, also after a power cut.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import blobs as blobs_module
from coordinator.blobs import Blobs, BytesPayload, FilePayload
from coordinator.config import load_config as load_coordinator_config
from coordinator.main import check as check_coordinator
from fedsilo.audit.log import AuditLog
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.files import durable
from fedsilo.files import durable as files
from fedsilo.files.durable import DISK_BYTES_MIN, DiskFullError, disk_error, free_bytes, fsync_directory, write_durably
from fedsilo.files.transfer_file import TransferFile
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError, UnreachableError
from fedsilo.protocol.place import Place
from silo import sampling
from silo.guard import adapters
from silo.guard.ledger import Ledger
from silo.guard.loop import Command
from silo.guard.messages import Allowed
from silo.guard.trainer_process.supervisor import TrainerGone
from silo.guard.trainer_process.trainer_link import where_it_tells
from silo.link import LinkMessage
from silo.trainer.resume import StateStore
from tests.coordinator_folder import write_coordinator
from tests.policies import setting
from tests.simulated.coordinator_parts import played, started_again
from tests.simulated.test_coordinator_ingress import code_of
from tests.simulated.test_transfer_file import written
from tests.world import ADAPTER, Bench, Loop, failing

NEXT = codec.encode_factors(
    {name: values * 2 for name, values in codec.decode_factors(ADAPTER).tensors.items()},
    base_digest="", schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32",
)  # fmt: skip


def evaluated(loop: Loop, number: int, digest: str = "") -> None:
    body = pb.MetricsEval(split="held_out", adapter_digest=digest)
    body.metrics.add(name="pass_at_1", value=0.25)
    loop.trainer_says("done", codec.encode(body), task="Evaluate", round=number, metrics={})


def figures(loop: Loop) -> list[int]:
    """Rounds of the figures that left, by this process."""
    return [envelope.round for envelope, _ in loop.coordinator.bodies("metrics.eval")]


def begin(loop: Loop) -> None:
    loop.offer_plan()
    loop.open_round()
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()
    assert loop.trainer.tasks() == ["Evaluate", "LoadAdapter"] and figures(loop) == [0]


def end_round(loop: Loop, payload: bytes) -> None:
    """The round is over while the trainer still loads; what it is asked next is to measure the result."""
    digest = codec.sha256_hex(payload)
    loop.coordinator.script.clear()
    loop.coordinator.says("control.fetch", "global.adapter", payload, run="run-1", round=1)
    result = loop.ended(committed=True, adapter_digest=digest)
    loop.coordinator.says("control.poll", "round.result", result, run="run-1", round=1)
    loop.turn()
    loop.trainer_says("done", task="LoadAdapter", round=1, metrics={})


FULL = disk_error("cannot write", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def test_T39_a_full_disk_halts_and_after_the_restart_the_round_is_gone_on_with(loop: Loop) -> None:
    begin(loop)
    with failing(adapters, "write_durably", FULL):
        end_round(loop, NEXT)
    assert "No space left" in loop.bench.judge.halted and loop.guard.failure is None
    assert [row["reasons"] for row in loop.bench.events("halt")] == [["DISK_FULL"]]
    sent = len(loop.coordinator.sent)
    loop.turn(3)
    assert len(loop.coordinator.sent) == sent and not loop.coordinator.bodies("control.abstain")
    loop.guard._shut_down()  # and the process ends, in order
    assert len(loop.coordinator.sent) == sent
    loop.restart()
    loop.coordinator.says("control.fetch", "global.adapter", NEXT, run="run-1", round=1)
    loop.trainer_says("planned", overlong={}, private_prompts=40, resumed=None)
    assert loop.trainer.tasks() == ["LoadAdapter"] and figures(loop) == []
    loop.trainer_says("done", task="LoadAdapter", round=1, metrics={})
    assert loop.trainer.tasks() == ["LoadAdapter", "Evaluate"]
    evaluated(loop, 1, codec.sha256_hex(NEXT))
    assert figures(loop) == [1]


def test_T39_a_disk_with_space_halts_nothing(loop: Loop) -> None:
    begin(loop)
    end_round(loop, NEXT)
    assert loop.trainer.tasks() == ["Evaluate", "LoadAdapter", "Evaluate"] and not loop.bench.judge.halted
    evaluated(loop, 1, codec.sha256_hex(NEXT))
    assert figures(loop) == [0, 1]


def test_what_was_measured_and_offered_once_is_not_again_after_an_orderly_stop(loop: Loop) -> None:
    begin(loop)
    loop.guard._shut_down()
    loop.restart()
    loop.trainer_says("planned", overlong={}, private_prompts=40)
    judged = len(loop.bench.events("egress.decision"))
    loop.open_round(2)
    assert loop.trainer.tasks() == ["LoadAdapter"] and figures(loop) == []
    kinds = [row["kind"] for row in loop.bench.events("egress.decision")[judged:]]
    assert "metrics.eval" not in kinds and not loop.coordinator.bodies("control.declined")


def test_what_was_not_offered_before_a_stop_is_measured_after_it(loop: Loop) -> None:
    """The counterpart: stopped while the base model was measured."""
    loop.offer_plan()
    loop.open_round()
    loop.guard._trainer_said(loop.trainer.told[0].__class__("planned", {"overlong": {}, "private_prompts": 40}))
    assert loop.trainer.tasks() == ["Evaluate"]
    loop.guard._shut_down()
    loop.restart()
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=2)
    loop.open_round(2)
    loop.base_evaluated()
    assert loop.trainer.tasks() == ["Evaluate", "LoadAdapter"] and figures(loop) == [0]


@pytest.mark.parametrize(("number", "is_full"), [
    (errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EFBIG, True), (errno.EIO, False), (errno.EACCES, False),
])  # fmt: skip
def test_T39_only_a_lack_of_space_is_called_a_full_disk(tmp_path: Path, number: int, is_full: bool) -> None:
    with failing(os, "write", OSError(number, os.strerror(number))), pytest.raises(OperationError) as told:
        write_durably(tmp_path / "file", b"content")
    assert isinstance(told.value, DiskFullError) == is_full
    assert told.value.code == ("DISK_FULL" if is_full else "FAILED")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("free", [DISK_BYTES_MIN - 1, DISK_BYTES_MIN])
def test_T39_a_trainer_that_ended_where_the_disk_is_full_ends_no_run(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    begin(loop)
    monkeypatch.setattr(durable, "free_bytes", lambda folder: free)
    loop.events.put(TrainerGone(1))
    loop.turn()
    full_disk = free < DISK_BYTES_MIN
    assert (f"has {free} bytes left" in loop.bench.judge.halted) == full_disk
    assert bool(loop.coordinator.bodies("control.abstain")) == (loop.guard.failure is not None) == (not full_disk)
    loop.restart()
    assert [message.type for message in loop.trainer.told] == (["plan"] if full_disk else [])


@pytest.mark.parametrize(("launch", "free", "told"), [
    ("child", DISK_BYTES_MIN, r"see \S+/logs/trainer\.log"),
    ("child", 4096, r"see \S+/logs/trainer\.log, where little can have been written: \S+ has 4096 bytes left; .*"),
    ("external", 4096, "see its own output, where it was started"),
])  # fmt: skip
def test_a_trainer_that_ended_is_told_with_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: str, free: int, told: str
) -> None:
    monkeypatch.setattr(durable, "free_bytes", lambda folder: free)
    config: Any = SimpleNamespace(state_dir=tmp_path, trainer=SimpleNamespace(launch=launch))
    assert re.fullmatch(told, where_it_tells(config))


def test_T39_a_trainer_that_breaks_the_rules_is_recorded_whatever_space_there_is(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes below the same folder, and could else hide by filling it."""
    begin(loop)
    monkeypatch.setattr(durable, "free_bytes", lambda folder: 0)
    loop.events.put(TrainerGone(None, "no message"))
    loop.turn()
    denied = [row["reasons"] for row in loop.bench.events("egress.decision") if row["decision"] == "deny"]
    assert denied == [["TRAINER_CONFUSED"]]
    assert loop.guard.failure is not None and not loop.bench.judge.halted


def test_T39_a_ledger_that_finds_no_room_halts_like_any_other_file(loop: Loop) -> None:
    begin(loop)
    database = loop.bench.ledger._database
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count={pages}")
    number = 0
    with pytest.raises(OperationError, match="database or disk is full"):
        while True:
            number += 1
            loop.bench.ledger.remember_of_run("run-1", f"filler {number}", "x" * 500)
    end_round(loop, NEXT)
    assert "database or disk is full" in loop.bench.judge.halted and loop.guard.failure is None
    assert not loop.coordinator.bodies("control.abstain")
    assert [row["reasons"] for row in loop.bench.events("halt")] == [["LEDGER_UNWRITABLE"]]


def test_T39_a_full_disk_under_a_persons_order_halts_and_its_rows_are_drawn_again(loop: Loop) -> None:
    begin(loop)
    run = loop.guard.runs.run
    assert run is not None
    run.paused = True
    loop.trainer_says("done", task="LoadAdapter", round=1, metrics={})
    run.paused = False
    with failing(sampling, "write_durably", FULL):
        loop.events.put(order := Command(run.advance))
        loop.turn()
    assert isinstance(order.result.exception(), DiskFullError) and "No space left" in loop.bench.judge.halted
    whole = sampling.PrivateSampler(40, b"s" * 32, setting.PLAN.seed)
    whole.start_round(1)
    run.advance()
    assert loop.trainer.told[-1].fields["rows"] == whole.draw(setting.PLAN.prompts_per_step)


@pytest.mark.parametrize("is_full", [True, False])
def test_T39_a_plan_that_a_full_disk_keeps_from_beginning_comes_again(loop: Loop, is_full: bool) -> None:
    code = errno.ENOSPC if is_full else errno.EIO
    with failing(loop.trainer, "send", disk_error("cannot write", OSError(code, os.strerror(code)))):
        loop.offer_plan()
    assert bool(loop.bench.judge.halted) == is_full == (loop.bench.ledger.run_state("run-1") != "declined")
    assert bool(loop.coordinator.bodies("control.abstain")) == (not is_full)
    loop.restart()
    loop.offer_plan()
    assert (loop.guard.runs.run is not None) == is_full


def test_T39_a_log_on_a_full_disk_costs_the_trainer_its_words_and_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class State:
        answered: object = None

    file: Any = SimpleNamespace(is_written_here=True, save=None)
    session: Any = SimpleNamespace(state=State)
    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=None))
    with failing(file, "save", DiskFullError("no space")), failing(sys.stderr, "write", no_space):
        StateStore(session, file).keep(LinkMessage("task", {"task": "PrivateStep"}), LinkMessage("done"))


@pytest.mark.parametrize("free", [DISK_BYTES_MIN - 1, DISK_BYTES_MIN])
def test_T39_a_coordinator_does_not_start_below_what_a_record_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    init_ca(tmp_path / "ca", name="cardio-net", kind="federation")
    people = {"alice": ["operator"]}
    provision_site(tmp_path / "main", site="main", federation_ca=tmp_path / "ca", people=people, is_coordinator=True)
    config = load_coordinator_config(write_coordinator(tmp_path / "main", ("hospital_a", "hospital_b")))
    monkeypatch.setattr(durable, "free_bytes", lambda folder: free)
    if free >= DISK_BYTES_MIN:
        assert check_coordinator(config).config == config
        return
    with pytest.raises(DiskFullError) as error:
        check_coordinator(config)
    assert f"{config.state_dir} has {free} bytes left" in error.value.message and error.value.hint


def test_T39_a_kept_payload_is_found_after_a_power_cut_also_as_the_first_of_its_folder(
    tmp_path: Path, disk: PowerCut
) -> None:
    blobs = Blobs(tmp_path)
    numbered = [BytesPayload(str(number).encode()) for number in range(40)]
    folders = {payload.digest[:2] for payload in numbered}
    assert 1 < len(folders) < len(numbered)  # one is the first of its folder, another is not
    for payload in numbered:
        assert disk.finds(Path(blobs.keep(payload).path), tmp_path)
    # the counterpart: what was spooled and not kept has no name that lasts
    with blobs.spool() as spool:
        spool.write(b"x")
        assert not disk.finds(Path(spool.finish().path), tmp_path)


@pytest.mark.parametrize("folder_only", [True, False])
def test_T39_a_payload_whose_names_a_kill_left_unflushed_is_flushed_when_it_comes_again(
    tmp_path: Path, disk: PowerCut, folder_only: bool
) -> None:
    payload = BytesPayload(b"payload")
    place = tmp_path / "blobs" / payload.digest[:2] / payload.digest
    Blobs(tmp_path)
    place.parent.mkdir()
    if not folder_only:
        place.write_bytes(payload.data)
    assert not disk.finds(place, tmp_path)
    kept = Blobs(tmp_path).keep(payload)
    assert isinstance(kept, FilePayload) and kept.read_at(0, kept.size_bytes) == payload.data
    assert disk.finds(place, tmp_path)


def test_T39_a_disk_that_fails_while_a_payload_is_spooled_is_told_of_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a fault once, to the flush that runs while more comes: it gets no name all the same."""
    monkeypatch.setattr(blobs_module, "FLUSHED_BYTES", 1 << 14)
    blobs, first = Blobs(tmp_path), iter([True])
    with (
        failing(os, "fdatasync", OSError(errno.EIO, os.strerror(errno.EIO)), when=lambda _: next(first, False)),
        blobs.spool() as spool,
    ):
        spool.write(b"x" * 20_000)
        with pytest.raises(OperationError, match="Input/output"):
            spool.finish()
    assert not any(blobs.arriving.iterdir())
    with blobs.spool() as spool:  # its counterpart
        spool.write(b"x" * 20_000)
        assert blobs.keep(spool.finish()).size_bytes == 20_000


def test_T39_a_commit_of_the_ledger_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def remembered(*arguments: Any, **options: Any) -> sqlite3.Connection:
        made.append(connect(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", remembered)
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    (connection,) = made
    settings = {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")}
    assert settings == {"journal_mode": "wal", "synchronous": 2}  # 2: FULL, of "PRAGMA synchronous" in SQLite's pages
    ledger.close()


class PowerCut:
    """What the disk holds after a power cut: file contents and folder listings as they were at their last flush."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._contents: dict[int, bytes] = {}  # by inode, which a rename keeps
        self._names: dict[Path, dict[str, int]] = {}
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._flush)

    def _flush(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            self._names[path] = {each.name: each.stat().st_ino for each in path.iterdir()}
        else:
            self._contents[path.stat().st_ino] = path.read_bytes()

    def left(self, path: Path) -> bytes | None:
        """The content found under a name; None where the name, or the content, is lost."""
        return self._contents.get(self._names.get(path.parent, {}).get(path.name, -1))

    def finds(self, path: Path, above: Path) -> bool:
        """Whether a name is still found from the folder `above`."""
        names = path.relative_to(above).parts
        return all(name in self._names.get(above.joinpath(*names[:depth]), {}) for depth, name in enumerate(names))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> PowerCut:
    return PowerCut(monkeypatch)


WRITERS: dict[str, Callable[[Path, bytes], object]] = {
    "private": files.write_private,
    "replaced": lambda path, data: (path.write_bytes(b"old"), write_durably(path, data)),
    "in two parts": lambda path, data: write_durably(path, data[:3], tail=data[3:]),
    "ahead": lambda path, data: files.WrittenAhead(path.parent, data, 0o600).keep(path),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_T39_what_was_written_is_found_after_a_power_cut(
    tmp_path: Path, disk: PowerCut, write: Callable[[Path, bytes], object]
) -> None:
    write(tmp_path / "file", b"content")
    assert disk.left(tmp_path / "file") == b"content"
    (tmp_path / "other").write_bytes(b"content")  # the counterpart
    assert disk.left(tmp_path / "other") is None


def test_T39_what_was_removed_does_not_come_back(tmp_path: Path, disk: PowerCut) -> None:
    for name in ("removed", "unlinked"):
        write_durably(tmp_path / name, b"content")
    files.remove_durably(tmp_path / "removed")
    assert disk.left(tmp_path / "removed") is None
    (tmp_path / "unlinked").unlink()  # the counterpart: its folder was not flushed
    assert disk.left(tmp_path / "unlinked") == b"content"


def test_T39_a_file_for_carrying_is_found_after_a_power_cut(tmp_path: Path, disk: PowerCut) -> None:
    path = written(tmp_path / "x.zip", b"payload")
    assert disk.left(path) == path.read_bytes()
    with TransferFile(path) as file:
        file.copy_to(tmp_path / "copy.zip")
    fsync_directory(tmp_path)  # as its caller does, after a rename
    assert disk.left(tmp_path / "copy.zip") == path.read_bytes()


def test_T39_each_record_of_the_audit_log_is_found_after_a_power_cut(tmp_path: Path, disk: PowerCut) -> None:
    key = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
    with AuditLog(tmp_path / "audit", origin="spiffe://x/silo/a", key=key, actor="spiffe://x/silo/a") as log:
        for number in range(3):
            log.append("start")
            left = disk.left(tmp_path / "audit" / "000000000000.jsonl")
            assert left is not None and left.count(b"\n") == number + 1


@pytest.mark.parametrize("code", ["HALTED", "ROUND_CLOSED"])
def test_T39_what_a_halted_coordinator_did_not_take_stays_in_the_outbox(bench: Bench, code: str) -> None:
    offered = bench.responses()
    assert isinstance(offered, Allowed)
    bench.channel.answer = ("control.refusal", pb.Refusal(code=code))
    if code != "HALTED":  # the counterpart: a refusal that says something about the message is the end of it
        assert isinstance(bench.gate.transmit(offered).body, pb.Refusal)
        assert bench.ledger.outbox("allowed") == []
        return
    counted = bench.ledger.book
    with pytest.raises(UnreachableError, match=r"halted or stopping.*public\.responses"):
        bench.gate.transmit(offered)
    [item] = bench.ledger.outbox("allowed")
    assert isinstance(bench.gate.retry(item).body, pb.Ack)
    assert bench.ledger.outbox("allowed") == [] and bench.ledger.book == counted
    assert [len(bench.events(f"egress.{name}")) for name in ("decision", "sent", "acked")] == [1, 2, 1]


def test_T39_a_poll_that_a_halted_coordinator_refuses_is_answered_and_waits_for_nothing(bench: Bench) -> None:
    bench.channel.answer = ("control.refusal", pb.Refusal(code="HALTED"))
    offered = bench.gate.offer(Place("", 0, 0, "control.heartbeat"), pb.Heartbeat())
    assert isinstance(offered, Allowed)
    assert isinstance(bench.gate.transmit(offered).body, pb.Refusal)


@pytest.mark.parametrize("why", ["halted", "stopping"])
def test_T39_a_coordinator_that_halted_takes_the_same_upload_after_a_restart(tmp_path: Path, why: str) -> None:
    house, (silo, *_) = played(tmp_path, mute={0: {"lora.factors"}})
    payload = silo.delta_payload(1)
    setattr(house.driver, why, "DISK_FULL" if why == "halted" else True)
    assert code_of(silo.say("lora.factors", payload, run="run-1", number=1)) == "HALTED"
    started_again(house, [silo])
    assert isinstance(silo.say("lora.factors", payload, run="run-1", number=1), pb.Ack)


def test_the_space_of_a_folder_that_is_not_there_yet_is_that_of_where_it_will_lie(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "there") > 0
