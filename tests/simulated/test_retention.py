"""What left is kept as long as the policy says, within its space, readable on the record; records shrink to hashes."""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from certs.roles import may
from fedsilo.audit import log as audit_log
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.checkpoint import open_checkpoint, parse_verifier_key
from fedsilo.audit.log import AuditLog
from fedsilo.audit.merkle import leaf_hash, verify_inclusion
from fedsilo.audit.segments import segments
from fedsilo.cli.audit import app
from fedsilo.control.answers import to_json
from fedsilo.files.durable import remove_durably, write_durably
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.envelope import parsed
from fedsilo.protocol.errors import (
    DeniedError,
    NotAllowedError,
    NotFoundError,
    OperationError,
    UnreachableError,
    VerificationError,
)
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from policies.model import Policy
from silo.guard import archive as archive_module
from silo.guard import ledger as payloads_module
from silo.guard.messages import Allowed, Held
from tests.policies import setting
from tests.protocol.audit_parties import Clock, append_send, open_log
from tests.world import Bench, Killed, MemoryChannel, at_once, command

DAY, YEAR = 86_400.0, 365.25 * 86_400.0


def policy(**changes: object) -> Policy:
    text = setting.policy_text().replace("until: ", "until: ")
    for name, value in changes.items():
        before = next(line for line in text.splitlines() if line.strip().startswith(f"{name}: "))
        text = text.replace(before, f"{before.partition(':')[0]}: {value}")
    return setting.policy_of(text)


def bench_of(folder: Path, **changes: object) -> Bench:
    return Bench(folder, policy(**changes))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut leaves is tested in tests/protocol/test_audit_durability.py; here flushing only costs time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = bench_of(tmp_path / "a")
    yield made
    made.close()


def released(bench: Bench, step: int = 2) -> Allowed:
    offered = bench.responses() if step == 2 else bench.factors()
    assert isinstance(offered, Allowed)
    bench.gate.transmit(offered)
    return offered


def keep(bench: Bench, payload: bytes) -> bool:
    return bench.archive.keep(payload, sha256_hex(payload))


def kept(bench: Bench) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (bench.folder / "payloads").iterdir()}


# ---- payloads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "count"), [("true", 2), ("false", 0)])
def test_what_left_is_kept_byte_for_byte_if_the_policy_says_so(tmp_path: Path, wanted: str, count: int) -> None:
    bench = bench_of(tmp_path / "a", payload_archive=wanted)
    sent = [released(bench), released(bench, step=0)]
    assert kept(bench) == ({item.digest: item.payload for item in sent} if count else {})
    assert len(kept(bench)) == count
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (bench.folder / "payloads").iterdir()}
    assert modes <= {0o600}
    flags = [record["payload"].get("archived", False) for record in bench.events("egress.decision")]
    assert flags == [bool(count)] * 2
    bench.close()


def test_what_cannot_be_kept_does_not_leave(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes, mode: int = 0o644) -> None:
        raise OperationError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(payloads_module, "write_durably", full)
    with pytest.raises(OperationError) as raised:
        bench.responses()
    assert raised.value.code == "PAYLOADS_UNWRITABLE" == bench.judge.halt_code and bench.judge.halted
    assert bench.channel.sent == [] and bench.events("egress.decision") == []
    # the counterpart: with room the same answers leave
    monkeypatch.setattr(payloads_module, "write_durably", write_durably)
    again = bench.restart()
    assert isinstance(again.responses(), Allowed)
    again.close()


@pytest.mark.parametrize(("days", "left"), [(89.9, 1), (90.1, 0)])
def test_payloads_go_when_they_are_too_old_and_the_log_says_so(bench: Bench, days: float, left: int) -> None:
    sent = released(bench)
    bench.clock_now += days * DAY
    bench.archive.expire()
    assert len(kept(bench)) == left
    told = [record["detail"] for record in bench.events("retention.payloads")]
    assert told == ([] if left else [{"payloads": 1, "bytes": len(sent.payload), "why": "age"}])
    bench.archive.expire()
    assert len(bench.events("retention.payloads")) == len(told)


def test_what_was_not_answered_is_never_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path / "a", policy(), MemoryChannel(fails=UnreachableError("down")))
    offered = bench.responses()
    assert isinstance(offered, Allowed)
    with pytest.raises(UnreachableError):
        bench.gate.transmit(offered)
    bench.clock_now += 400 * DAY
    bench.archive.expire()
    assert list(kept(bench)) == [offered.digest]
    monkeypatch.setattr(archive_module, "_GB", len(offered.payload) / 50)  # 50 of them: just what is there
    with pytest.raises(OperationError, match="outbox_max_gb"):
        bench.archive.keep(b"x", sha256_hex(b"x"))
    assert list(kept(bench)) == [offered.digest]
    bench.close()


def test_the_oldest_answered_payload_makes_room_and_without_room_nothing_leaves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = released(bench)
    factors = released(bench, step=0)
    room = len(answers.payload) + len(factors.payload) + 100
    monkeypatch.setattr(archive_module, "_GB", (room + 49) // 50)  # in all 50 of them
    assert keep(bench, b"x" * 100)
    assert {factors.digest, answers.digest} <= kept(bench).keys()
    assert keep(bench, b"y" * 100)
    assert factors.digest in kept(bench) and answers.digest not in kept(bench)  # the older one went
    (told,) = bench.events("retention.payloads")
    assert told["detail"] == {"payloads": 1, "bytes": len(answers.payload), "why": "space"}
    with pytest.raises(OperationError) as raised:
        keep(bench, b"z" * room)
    assert raised.value.code == "OUTBOX_FULL"


@pytest.mark.parametrize(("gigabyte", "leaves"), [(1, False), (10**9, True)])
def test_T39_a_full_outbox_halts_the_gate_with_its_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, gigabyte: int, leaves: bool
) -> None:
    monkeypatch.setattr(archive_module, "_GB", gigabyte)
    if leaves:
        assert isinstance(bench.responses(), Allowed)
        return
    with pytest.raises(OperationError):
        bench.responses()
    assert bench.judge.halt_code == "OUTBOX_FULL" and "waits for an answer" in bench.judge.halted
    assert bench.channel.sent == [] and bench.ledger.outbox() == []


@pytest.mark.parametrize(("wanted", "count"), [("true", 1), ("false", 0)])
def test_bytes_wait_on_the_disk_until_they_are_answered_and_then_go_unless_archived(
    tmp_path: Path, wanted: str, count: int
) -> None:
    bench = bench_of(tmp_path / "a", payload_archive=wanted)
    offered = bench.responses()
    assert isinstance(offered, Allowed) and kept(bench) == {offered.digest: offered.payload}
    bench.gate.transmit(offered)
    assert len(kept(bench)) == count
    bench.close()


def test_bytes_that_two_messages_share_stay_until_both_are_answered(tmp_path: Path) -> None:
    bench = bench_of(tmp_path / "a", payload_archive="false")
    first = bench.responses()
    bench.judge.view = replace(bench.judge.view, round=2)
    second = bench.gate.offer(
        bench.judge.view.place("public.responses", 2, 2), parsed(first.kind, first.payload, OUTBOUND_KINDS)[0]
    )
    assert isinstance(first, Allowed) and isinstance(second, Allowed) and first.digest == second.digest
    bench.gate.transmit(first)
    assert kept(bench) == {second.digest: second.payload}
    bench.gate.transmit(second)
    assert kept(bench) == {}
    bench.close()


def test_what_was_written_just_before_a_kill_and_never_left_is_gone_at_the_next_start(bench: Bench) -> None:
    sent = released(bench)
    assert keep(bench, b"never decided")
    again = bench.restart()
    assert list(kept(again)) == [sent.digest]
    again.close()


@pytest.mark.parametrize("damage", ["changed", "removed", "none"])
def test_bytes_that_changed_while_they_waited_are_not_sent(tmp_path: Path, damage: str) -> None:
    bench = Bench(tmp_path / "a", policy(), MemoryChannel(fails=UnreachableError("down")))
    offered = bench.responses()
    assert isinstance(offered, Allowed)
    with pytest.raises(UnreachableError):
        bench.gate.transmit(offered)
    bench.channel.fails = None
    path = bench.folder / "payloads" / offered.digest
    if damage == "none":
        bench.gate.retry(bench.ledger.outbox("allowed")[0])
        assert [payload for _, payload in bench.channel.sent][-1] == offered.payload
    else:
        path.write_bytes(b"other") if damage == "changed" else path.unlink()
        with pytest.raises(DeniedError):
            bench.gate.retry(bench.ledger.outbox("allowed")[0])
        reasons = [record["reasons"] for record in bench.events("egress.indeterminate") if "reasons" in record]
        assert reasons[-1] == ["PAYLOAD_CHANGED" if damage == "changed" else "NOT_FOUND"]
        assert bench.ledger.outbox("allowed") == []
        assert [payload for _, payload in bench.channel.sent] == [offered.payload]  # the first try
    bench.close()


@pytest.mark.parametrize("gigabyte", [1, 10**9])
def test_what_is_held_takes_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabyte: int) -> None:
    monkeypatch.setattr(archive_module, "_GB", gigabyte)
    bench = Bench(tmp_path / "a", setting.policy_of(setting.policy_text(first_rounds=1)))
    if gigabyte == 1:
        with pytest.raises(OperationError) as raised:
            bench.factors()
        assert raised.value.code == "OUTBOX_FULL" and kept(bench) == {}
    else:
        offered = bench.factors()
        assert isinstance(offered, Held) and list(kept(bench).values()) == [offered.payload]
        release = bench.releases.hold(offered, deadline_seconds=None)
        bench.archive.expire()
        assert list(kept(bench)) == [release.digest]  # waits for persons, however old
        bench.clock_now += 400 * DAY
        bench.releases.expire()
        assert kept(bench) == {}
    bench.close()


def test_the_archive_is_found_again_after_a_restart(bench: Bench) -> None:
    sent = released(bench)
    (bench.folder / "payloads" / f".{sent.digest}.0.tmp").write_bytes(b"half")  # a kill in the middle of a write
    again = bench.restart()
    assert list(kept(again)) == [sent.digest]
    again.clock_now += 91 * DAY
    again.archive.expire()
    assert kept(again) == {}
    again.close()


# ---- reading ----------------------------------------------------------------------------------------------


def test_T40_reading_a_payload_is_recorded_first_and_a_ticket_is_good_once(bench: Bench) -> None:
    sent = released(bench)
    answer = bench.archive.ask(command("payload.read", {"seq": sent.decision_seq}, person="carol"), at_once)
    assert answer.keys() == {"ticket"}  # what the desk remembers of the command holds no content
    (record,) = bench.events("payload.read")
    assert record["detail"] == {"person": "carol", "certificate": "f" * 64}
    assert record["link"]["decision"] == sent.decision_seq and record["kind"] == "public.responses"
    shown = to_json(bench.archive.fetch(answer))
    assert [row["text"] for prompt in shown["content"]["prompts"] for row in prompt.get("responses", ())] == ["12"] * 3
    with pytest.raises(NotAllowedError):
        bench.archive.fetch(answer)
    with pytest.raises(NotAllowedError):
        bench.archive.fetch({})
    (outcome,) = [record["seq"] for record in bench.events("egress.sent")]
    left = bench.archive.fetch(bench.archive.ask(command("payload.read", {"seq": outcome}), at_once))
    assert to_json(left)["sha256"] == sent.digest


def test_of_tensors_names_and_shapes_are_shown(bench: Bench) -> None:
    sent = released(bench, step=0)
    shown = to_json(
        bench.archive.fetch(bench.archive.ask(command("payload.read", {"seq": sent.decision_seq}), at_once))
    )
    assert shown["bytes"] == len(sent.payload)
    assert [entry["name"] for entry in shown["content"]["tensors"]] == [name for name, _ in setting.SCHEMA.tensors]
    assert len(json.dumps(shown)) < 4096


def test_what_is_not_there_or_not_the_same_is_not_shown(bench: Bench) -> None:
    sent = released(bench)
    for seq in (bench.events("ingress.decision")[0]["seq"], 999):
        with pytest.raises(NotFoundError):
            bench.archive.ask(command("payload.read", {"seq": seq}), at_once)
    path = bench.folder / "payloads" / sent.digest
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(VerificationError):
        bench.archive.ask(command("payload.read", {"seq": sent.decision_seq}), at_once)
    bench.clock_now += 91 * DAY
    bench.archive.expire()
    with pytest.raises(NotFoundError, match="not archived"):
        bench.archive.ask(command("payload.read", {"seq": sent.decision_seq}), at_once)
    assert bench.events("payload.read") == []


def test_who_may_read_payloads() -> None:
    assert [
        role for role in ("viewer", "auditor", "operator", "approver", "site-admin") if may([role], "payload.read")
    ] == [
        "auditor",
        "approver",
    ]


# ---- records ----------------------------------------------------------------------------------------------


def old_log(folder: Path, **changes: Any) -> tuple[AuditLog, Clock]:
    """A log of several segments, one record a day."""
    clock = Clock()
    log = open_log(folder, clock=clock, segment_bytes_max=1200, **changes)
    for number in range(12):
        clock.now += DAY
        append_send(log, number)
    return log, clock


def reduced(folder: Path, days: float = 6.5) -> int:
    log, clock = old_log(folder)
    with log:
        return log.remove_old(int((clock.now - days * DAY) * 1000))


def problems(folder: Path) -> list[str]:
    (result,) = verify_logs([folder])
    found: list[str] = result["problems"]
    return found


def test_T38_old_records_shrink_to_leaf_hashes_and_all_proofs_still_hold(tmp_path: Path) -> None:
    whole, _ = old_log(tmp_path / "whole")
    whole.close()
    size = reduced(tmp_path / "log")
    left = [first for first, _ in segments(tmp_path / "log")]
    log_records = {first: [json.loads(line)["t"] for line in path.read_bytes().splitlines()]
                   for first, path in segments(tmp_path / "whole")}  # fmt: skip
    cut = (Clock().now + (12 - 6.5) * DAY) * 1000
    assert left[0] == next(first for first, times in log_records.items() if max(times) >= cut)
    assert min(log_records[left[0]]) < cut  # a segment of both old and young records stays whole
    assert 0 < size == left[0] and len(left) < len(segments(tmp_path / "whole"))
    (result,) = verify_logs([tmp_path / "log"])
    assert (result["problems"], result["hashes_only"]) == ([], size)
    runner, options = CliRunner(), ["--log", str(tmp_path / "log"), "--json"]
    proof = json.loads(runner.invoke(app, ["prove", str(size), *options]).stdout)["data"]
    checkpoint = open_checkpoint(proof["note"], parse_verifier_key(proof["keys"][0]))
    path = [bytes.fromhex(part) for part in proof["inclusion"]]
    assert verify_inclusion(leaf_hash(proof["record"].encode()), size, checkpoint.size, path, checkpoint.root)
    for verb in ("show", "prove"):
        gone = runner.invoke(app, [verb, str(size - 1), *options])
        assert gone.exit_code == 8 and "leaf hash" in gone.stdout
    told = runner.invoke(app, ["verify", str(tmp_path / "log")])
    assert told.exit_code == 0 and f"leaf hashes only of the first {size} records" in told.stderr


def test_T38_a_reduced_log_goes_on_and_is_reduced_again(tmp_path: Path) -> None:
    size = reduced(tmp_path / "log")
    clock = Clock(Clock().now + 40 * DAY)
    with open_log(tmp_path / "log", clock=clock, segment_bytes_max=1200) as log:
        append_send(log, 99)
        more = log.remove_old(int((clock.now - DAY) * 1000))
        assert more > size
        assert log.remove_old(int((clock.now - DAY) * 1000)) == 0
    assert problems(tmp_path / "log") == []
    assert open_and_read(tmp_path / "log")[0]["seq"] == more


def open_and_read(folder: Path) -> list[dict[str, Any]]:
    with open_log(folder) as log:
        return list(log.records())


def test_nothing_young_and_never_the_open_segment_is_removed(tmp_path: Path) -> None:
    log, clock = old_log(tmp_path / "log")
    with log:
        assert log.remove_old(0) == 0
        newest = segments(tmp_path / "log")[-1][0]
        assert log.remove_old(int((clock.now + YEAR) * 1000)) == newest
    assert segments(tmp_path / "log")[0][0] == newest
    assert problems(tmp_path / "log") == []


def test_T38_removing_records_oneself_is_not_retention(tmp_path: Path) -> None:
    """Somebody with write access reduces a segment without the log saying so, or changes a hash, or a later segment."""
    log, _ = old_log(tmp_path / "log")
    log.close()
    assert problems(tmp_path / "log") == []
    (_, path), (second, later), *_ = segments(tmp_path / "log")
    lines = path.read_bytes().splitlines()
    leaves = b"".join(map(leaf_hash, lines))
    path.with_suffix(".leaves").write_bytes(leaves)
    kept_lines = path.read_bytes()
    path.unlink()
    assert problems(tmp_path / "log") == [f"of the first {second} records leaf hashes are left, and no record says why"]
    path.write_bytes(kept_lines)
    path.with_suffix(".leaves").unlink()
    later.with_suffix(".leaves").write_bytes(b"".join(map(leaf_hash, later.read_bytes().splitlines())))
    later.unlink()
    assert any("stands behind records" in problem for problem in problems(tmp_path / "log"))


def test_T38_a_changed_leaf_hash_is_found(tmp_path: Path) -> None:
    reduced(tmp_path / "log")
    path = min((tmp_path / "log").glob("*.leaves"))
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    assert any("does not fit" in problem for problem in problems(tmp_path / "log"))
    with pytest.raises(VerificationError):
        open_log(tmp_path / "log")


def dying(call: Any, counter: Iterator[int], steps: int) -> Any:
    """The same function until `steps` calls were made of all that share the counter; then the process is gone."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if next(counter) >= steps:
            raise Killed
        return call(*arguments, **options)

    return wrapped


def test_T39_a_kill_between_the_steps_of_a_removal_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step the log opens, verifies, and the next call finishes."""
    for steps in range(5):
        folder = tmp_path / str(steps)
        log, clock = old_log(folder)
        with monkeypatch.context() as patch:
            counter = itertools.count()
            for step in (remove_durably, write_durably):
                patch.setattr(audit_log, step.__name__, dying(step, counter, steps))
            with pytest.raises(Killed):
                log.remove_old(int((clock.now - DAY) * 1000))
        log._lock.release()
        assert problems(folder) == []
        with open_log(folder, clock=clock, segment_bytes_max=1200) as again:
            again.remove_old(int((clock.now - DAY) * 1000))
        assert problems(folder) == []
        assert len(segments(folder)) <= 3


def test_a_policy_says_how_long(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (bench.policy.file.retention.records_years, bench.policy.file.retention.payload_days) == (6, 90)
    asked: list[int] = []
    monkeypatch.setattr(bench.audit, "remove_old", asked.append)
    bench.archive.expire()
    assert asked == [int((setting.NOW - 6 * YEAR) * 1000)]
