"""What a policy change, a halt, a kill in the middle or a clock set back may not undo at the gate."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.audit.segments import LogFullError
from fedsilo.files import durable as files
from fedsilo.files.durable import WrittenAhead
from fedsilo.protocol import codec
from fedsilo.protocol.codec import decode_factors, sha256_hex
from fedsilo.protocol.errors import ConflictError, DeniedError, OperationError, PeerError, UnreachableError
from policies.model import Policy
from silo.guard import archive as archive_module
from silo.guard import ledger as payloads_module
from silo.guard.commands import Halts
from silo.guard.ledger import Approval, Payloads
from silo.guard.messages import Allowed, Denied
from silo.guard.releases import keep_recorded_noes
from tests.policies import setting
from tests.policies.messages import good
from tests.simulated import screening
from tests.simulated.test_gate import BFLOAT16, FLOAT32, body_of, drawn
from tests.world import Bench, Killed, command, failing

DAY = 86_400.0


def without_updates(text: str) -> Policy:
    """The same policy, but lora.factors is not named any more."""
    policy = setting.policy_of(re.sub(r"\n  lora\.factors:.*(\n    .*)*", "", text, count=1))
    assert policy.file.egress.lora_factors is None and policy.file.egress.public_responses is not None
    return policy


# ---- a message that waits to be sent -------------------------------------------------------------------


@pytest.mark.parametrize("change", ["kind removed", "expired", "kind halted", "none"])
def test_T34_what_waits_to_be_sent_is_judged_by_the_policy_in_force(bench: Bench, change: str) -> None:
    bench.channel.before_sending, bench.channel.fails = True, UnreachableError("down")
    with pytest.raises(UnreachableError):
        bench.gate.transmit(bench.factors())
    with closing(bench.restart(without_updates(setting.policy_text()) if change == "kind removed" else None)) as again:
        if change == "expired":
            again.clock_now += 500 * DAY
        if change == "kind halted":
            again.judge.book.screen_halts["lora.factors"] = again.judge.now()
        (item,) = again.ledger.outbox("allowed")
        if change == "none":
            again.gate.retry(item)
            assert again.channel.kinds() == ["lora.factors"]
        else:
            with pytest.raises(DeniedError):
                again.gate.retry(item)
            assert again.channel.sent == []
            codes = {
                "kind removed": "KIND_NOT_ALLOWED",
                "expired": "POLICY_NOT_VALID_NOW",
                "kind halted": "SCREEN_HALT",
            }
            assert again.events("egress.indeterminate")[-1]["reasons"] == [codes[change]]
        assert again.ledger.outbox("allowed") == []


def test_T39_what_was_allowed_before_a_halt_is_not_sent_in_it(bench: Bench) -> None:
    offered = bench.factors()
    bench.judge.halted = "the disk is full"
    with pytest.raises(OperationError, match="the disk is full"):
        bench.gate.transmit(offered)
    assert bench.channel.sent == []
    assert [item.state for item in bench.ledger.outbox()] == ["allowed"]  # it waits for the repair
    bench.judge.halted = ""
    bench.gate.transmit(offered)
    assert bench.channel.kinds() == ["lora.factors"]


def test_T39_in_a_halt_nothing_is_decided_since_nothing_could_be_recorded(bench: Bench) -> None:
    bench.judge.halted = "the disk is full"
    before = bench.audit.size
    with pytest.raises(OperationError, match="the disk is full"):
        bench.factors()
    with pytest.raises(OperationError, match="the disk is full"):
        bench.judge.record("stop")
    assert (bench.audit.size, bench.channel.sent, bench.ledger.outbox()) == (before, [], [])
    bench.judge.halted = ""
    assert isinstance(bench.factors(), Allowed)


def test_T41_the_gates_time_never_goes_back_nor_over_a_restart(bench: Bench) -> None:
    bench.clock_now += DAY
    latest = bench.judge.now()
    assert latest == bench.clock_now
    bench.clock_now -= DAY
    assert bench.judge.now() == latest
    with closing(bench.restart()) as again:
        assert again.judge.now() == latest  # the log holds nothing of that time, the ledger does


def test_T41_a_payload_is_as_old_as_the_time_that_never_goes_back_says(bench: Bench) -> None:
    bench.clock_now += 100 * DAY
    bench.judge.now()
    bench.clock_now -= 100 * DAY  # it was wrong, and is put right
    offered = bench.responses()
    bench.gate.transmit(offered)
    bench.archive.expire()
    assert offered.digest in bench.ledger.payloads


# ---- persons' answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["approve", "reject"])
def test_T36_an_answer_during_a_halt_is_refused_and_not_spent(holding: Bench, answer: str) -> None:
    release, give = holding.hold(holding.factors()), getattr(holding, answer)
    holding.judge.halted = "somebody signed two transcripts"
    with pytest.raises(OperationError) as refused:
        give(release)
    assert refused.value.code == "HALTED"
    holding.judge.halted = ""
    assert give(release)
    assert len(holding.events("approval.grant" if answer == "approve" else "approval.deny")) == 1


def test_a_hold_whose_time_is_over_during_a_halt_ends_on_record_afterwards(holding: Bench) -> None:
    holding.hold(holding.factors(), 10.0)
    holding.judge.halted = "somebody signed two transcripts"
    holding.clock_now += 1000
    assert holding.releases.expire() == [] and holding.ledger.releases("held")
    holding.judge.halted = ""
    (ended,) = holding.releases.expire()
    assert ended.outcome == "missed" and len(holding.events("approval.expire")) == 1
    assert holding.releases.expire() == []


@pytest.mark.parametrize("answer", ["approve", "reject"])
def test_T36_whoever_was_the_last_needed_before_a_kill_says_it_again(holding: Bench, answer: str) -> None:
    release, give = holding.hold(holding.factors()), getattr(holding, answer)
    with failing(type(holding.releases), "_record"), pytest.raises(Killed):
        give(release)
    assert holding.channel.sent == [] and holding.ledger.releases("held")
    assert give(release).outcome == ("allowed" if answer == "approve" else "denied")
    with pytest.raises(ConflictError):
        give(release)


@pytest.mark.parametrize("at", ["_answer", "_settle"])
@pytest.mark.parametrize("change", ["nothing", "policy"])
def test_T36_a_no_before_a_kill_is_neither_lost_nor_doubled(holding: Bench, at: str, change: str) -> None:
    release = holding.hold(holding.factors())
    yes = holding.answer(release)
    with failing(type(holding.releases), at), pytest.raises(Killed):
        holding.reject(release, reason="odd")
    tighter = setting.policy_of(setting.policy_text(first_rounds=1).replace("max_total_l2: 5.5", "max_total_l2: 5.4"))
    with closing(holding.restart(tighter if change == "policy" else None)) as bench:
        assert (bench.policy.digest != holding.policy.digest) == (change == "policy")
        keep_recorded_noes(bench.ledger, bench.audit.records())  # as the guard does at its start
        assert bench.releases.rejudge_held() == []
        with pytest.raises(ConflictError) as refused:
            bench.releases.approve(replace(yes, arguments=yes.arguments | {"policy_digest": bench.judge.policy.digest}))
        assert refused.value.code == ("NOT_HELD" if change == "nothing" else "STALE_VIEW")
        assert bench.events("approval.grant") == []
        (ended,) = bench.releases.expire()  # what the loop does with each turn
        assert (ended.outcome, ended.release.state) == ("denied", "rejected")
        (record,) = bench.events("approval.deny")
        assert (record["detail"]["person"], record["reasons"], record["seq"]) == ("bob", ["CONTENT"], ended.record)
        (no,) = bench.ledger.approvals(ended.release.id)
        assert (no.person, no.verdict, no.reason_code, no.record) == ("bob", "reject", "CONTENT", record["seq"])
        assert no.reason == ("odd" if at == "_settle" else "")  # which no log holds
        assert bench.releases.expire() == [] and bench.ledger.releases("held") == []


@pytest.mark.parametrize("at", ["_answer", "_settle"])
def test_T36_whoever_was_killed_with_his_no_may_say_it_again_and_it_is_recorded_once(holding: Bench, at: str) -> None:
    release = holding.hold(holding.factors())
    with failing(type(holding.releases), at), pytest.raises(Killed):
        holding.reject(release)
    with closing(holding.restart()) as bench:
        keep_recorded_noes(bench.ledger, bench.audit.records())
        settled = bench.reject(release)
        (record,) = bench.events("approval.deny")
        assert (settled.outcome, settled.release.state, settled.record) == ("denied", "rejected", record["seq"])


def test_T36_a_recorded_no_to_other_bytes_or_to_what_is_over_is_none(holding: Bench) -> None:
    release = holding.hold(holding.factors())
    detail = {"release": release.id, "person": "bob", "certificate": "f" * 64}
    told: dict[str, Any] = {
        "event": "approval.deny", "seq": 7, "t": 0, "reasons": ["CONTENT"], "payload": dict(release.recorded),
        "detail": detail,
    }  # fmt: skip
    others: list[dict[str, Any]] = [
        {"payload": {"bytes": 1, "sha256": "0" * 64}}, {"event": "approval.grant"},
        {"detail": detail | {"release": "r9/hospital_a/0"}}, {"detail": {"release": release.id}},
    ]  # fmt: skip
    keep_recorded_noes(holding.ledger, [told | other for other in others])
    assert holding.ledger.approvals(release.id) == []
    keep_recorded_noes(holding.ledger, [told])
    (no,) = holding.ledger.approvals(release.id)
    assert (no.person, no.record) == ("bob", 7)
    assert len(holding.releases.expire()) == 1
    keep_recorded_noes(holding.ledger, [told | {"detail": detail | {"person": "carol"}}])
    assert [each.person for each in holding.ledger.approvals(release.id)] == ["bob"]
    with pytest.raises(ConflictError) as refused:
        holding.approve(release)
    assert refused.value.code == "NOT_HELD"


def test_a_no_that_a_ledger_of_an_earlier_version_kept_first_is_recorded_with_its_effect(holding: Bench) -> None:
    release = holding.hold(holding.factors())
    kept = Approval(release.id, "bob", "f" * 64, release.digest, "reject", "", holding.judge.now())
    holding.ledger.approve(kept)
    (ended,) = holding.releases.expire()
    (record,) = holding.events("approval.deny")
    assert (record["detail"]["person"], record["reasons"], record["seq"]) == ("bob", ["INTERRUPTED"], ended.record)


def test_T39_a_no_that_the_log_does_not_take_is_not_kept(holding: Bench) -> None:
    release = holding.hold(holding.factors())
    with failing(holding.audit, "append", LogFullError("no space")), pytest.raises(LogFullError):
        holding.reject(release)
    assert holding.ledger.approvals(release.id) == []
    holding.judge.halted = ""  # as after a restart with space
    assert holding.releases.expire() == [] and holding.view(release)["approvers"]["given"] == []
    settled = holding.reject(release, reason_code="TIMING")
    (record,) = holding.events("approval.deny")
    assert (settled.record, record["reasons"]) == (record["seq"], ["TIMING"])


def test_T39_a_recorded_no_that_the_ledger_does_not_take_halts_until_a_restart_takes_it_up(holding: Bench) -> None:
    release = holding.hold(holding.factors())
    no = holding.answer(release, "reject", person="bob", reason_code="CONTENT")
    holding.ledger._database.execute("PRAGMA query_only=1")
    with pytest.raises(OperationError) as refused:
        holding.releases.reject(no)
    assert refused.value.code == "LEDGER_UNWRITABLE" and len(holding.events("approval.deny")) == 1
    holding.ledger._database.execute("PRAGMA query_only=0")
    with pytest.raises(OperationError) as refused:  # although the disk takes everything again
        holding.approve(release)
    assert refused.value.code == "HALTED" and holding.releases.expire() == []
    with closing(holding.restart()) as bench:
        keep_recorded_noes(bench.ledger, bench.audit.records())
        assert [ended.outcome for ended in bench.releases.expire()] == ["denied"]


def test_T36_a_hold_without_an_answer_waits_on_after_a_kill(holding: Bench) -> None:
    release = holding.hold(holding.factors())
    with closing(holding.restart()) as bench:
        assert bench.releases.expire() == []
        settled = bench.approve(release)
    assert settled is not None and settled.outcome == "allowed"


def release(halts: Halts, person: str) -> bool:
    (row,) = halts.rows()
    arguments = {"kind": row.kind, "digest": row.digest}
    return bool(halts.lift_halt(command("approvals.release", arguments, person=person))["released"])


def halt(bench: Bench) -> None:
    bench.judge.book.screen_halts["public.responses"] = bench.judge.now()


def test_T36_a_halt_is_released_although_the_guard_was_killed_after_the_yes(bench: Bench) -> None:
    halts = Halts(bench.judge, bench.ledger)
    halt(bench)
    with failing(bench.judge, "record"), pytest.raises(Killed):
        release(halts, "alice")
    assert bench.judge.book.screen_halts
    assert release(halts, "alice") and not bench.judge.book.screen_halts


def two_needed() -> Policy:
    text = setting.policy_text()
    assert text.count("release_after_halt: 1") == 1
    return setting.policy_of(text.replace("release_after_halt: 1", "release_after_halt: 2"))


def test_T39_a_yes_to_a_halt_that_the_log_does_not_take_counts_nothing(tmp_path: Path) -> None:
    with closing(Bench(tmp_path / "a", two_needed())) as bench:
        halts = Halts(bench.judge, bench.ledger)
        halt(bench)
        with failing(bench.audit, "append", LogFullError("no space")), pytest.raises(LogFullError):
            release(halts, "alice")
        bench.judge.halted = ""  # as after a restart with space
        assert halts.rows()[0].given == () and not release(halts, "bob") and bench.judge.book.screen_halts
        assert release(halts, "alice") and not bench.judge.book.screen_halts
        assert [each["detail"]["person"] for each in bench.events("approval.grant")] == ["bob", "alice"]


def test_a_yes_to_a_halt_names_its_own_record_also_where_the_end_of_the_halt_is_behind_it(tmp_path: Path) -> None:
    with closing(Bench(tmp_path / "a", two_needed())) as bench:
        halts = Halts(bench.judge, bench.ledger)
        halt(bench)
        arguments = {"kind": "public.responses", "digest": halts.rows()[0].digest}
        told = [halts.lift_halt(command("approvals.release", arguments, person=each)) for each in ("alice", "bob")]
        assert [each["record"] for each in told] == [each["seq"] for each in bench.events("approval.grant")]
        assert bench.audit.size - 1 == bench.events("release")[0]["seq"] > told[1]["record"]


def test_T41_no_yes_to_an_earlier_halt_counts_where_the_clock_stands_still(tmp_path: Path) -> None:
    with closing(Bench(tmp_path / "a", two_needed())) as bench:
        halts = Halts(bench.judge, bench.ledger)
        bench.judge.now()
        bench.clock_now -= 3600.0
        halt(bench)
        assert [release(halts, person) for person in ("alice", "bob")] == [False, True]
        halt(bench)
        assert halts.rows()[0].given == ()
        assert [release(halts, person) for person in ("carol", "dora")] == [False, True]


# ---- what comes in ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**53, 2**64 - 1])
def test_T29_an_answer_with_a_number_that_nobody_can_sign_is_refused_and_recorded(bench: Bench, number: int) -> None:
    bench.channel.tamper = lambda envelope: setattr(envelope, "sequence", number)
    with pytest.raises(PeerError) as refused:
        bench.poll()
    assert refused.value.wire_code == "MALFORMED"
    assert bench.events("ingress.decision")[-1]["reasons"] == ["MALFORMED"]
    bench.channel.tamper = None
    bench.poll()


GOOD = good("reft.aggregate")


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1.0])
def test_T04_a_scale_that_is_no_number_is_denied_and_recorded(tmp_path: Path, scale: float) -> None:
    with closing(Bench(tmp_path / "a", GOOD.policy)) as bench:
        payload = codec.encode_factors(
            dict(GOOD.message.tensors or {}), base_digest="", schema_sha256="", rank=8, scale=scale, dtype="bfloat16"
        )
        with pytest.raises(PeerError):
            bench.poll("reft.aggregate", payload)
        record = bench.events("ingress.decision")[-1]
        assert record["decision"] == "deny"
        assert record["facts"]["final"]["header_scale"] == (1.0 if scale == 1.0 else None)


@pytest.mark.parametrize(("characters", "runs"), [(20, 1), (400_000, 0)])
def test_T23_answers_of_others_that_are_too_large_are_denied_before_a_screen_reads_them(
    tmp_path: Path, characters: int, runs: int
) -> None:
    policy = screening.policy(["charset"], donor_screens=("charset",))
    body = setting.donors_message(*((row, "hospital_b", "x" * characters) for row in (1, 4, 7))).body
    with closing(screening.bench(tmp_path, policy)) as bench:
        with nullcontext() if runs else pytest.raises(PeerError):
            bench.poll("public.donors", body, step=2)
        assert bench.screens.runs == runs


DATA = bytes(range(256)) * 8192  # 2 MiB, so that whole pages go past the page cache


Threads = Callable[[], AbstractContextManager[None]]


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


def no_thread() -> AbstractContextManager[None]:
    return failing(threading.Thread, "start", RuntimeError("can't start new thread"))


@pytest.mark.parametrize("threads", [nullcontext, no_thread])
@pytest.mark.parametrize("data", [DATA, DATA[:-100], b"little"], ids=["pages", "more", "little"])
def test_what_was_written_ahead_is_there_under_its_name(tmp_path: Path, data: bytes, threads: Threads) -> None:
    with threads():
        written = WrittenAhead(tmp_path, data, 0o600)
    assert all(name.startswith(".") and name.endswith(".tmp") for name in names(tmp_path))
    written.keep(tmp_path / "name")
    assert names(tmp_path) == ["name"] and (tmp_path / "name").read_bytes() == data
    assert stat.S_IMODE((tmp_path / "name").stat().st_mode) == 0o600


@pytest.mark.parametrize("threads", [nullcontext, no_thread])
def test_of_what_was_abandoned_nothing_is_left(tmp_path: Path, threads: Threads) -> None:
    with threads():
        WrittenAhead(tmp_path, DATA, 0o600).abandon()
    assert names(tmp_path) == []


def test_T39_a_full_disk_is_told_when_it_is_to_be_kept_and_not_before(tmp_path: Path) -> None:
    with failing(os, "write", OSError(errno.ENOSPC, "No space left on device")):
        WrittenAhead(tmp_path, DATA, 0o600).abandon()
        written = WrittenAhead(tmp_path, DATA, 0o600)
        with pytest.raises(OperationError, match="No space left on device"):
            written.keep(tmp_path / "name")
    assert names(tmp_path) == []


@pytest.mark.parametrize("threads", [nullcontext, no_thread])
def test_T39_a_part_is_never_kept_for_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: Threads
) -> None:
    def cut_short(path: Path, data: bytes, *_: object, **__: object) -> bool:
        path.write_bytes(data[:10])
        raise MemoryError

    monkeypatch.setattr(files, "_write_new", cut_short)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with threads():
        written = WrittenAhead(tmp_path, DATA, 0o600)
    with pytest.raises(MemoryError if threads is no_thread else OperationError):
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
        bench.judge.view.place("lora.factors", 1), factors.header, tensors=factors.tensors, read_from=factors.payload
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
    with closing(Bench(tmp_path / "a", policy)) as bench:
        made = offer(bench, body)
        assert isinstance(made, Allowed)
        assert len(ahead) == begun and ahead[-1] == bytes(made.payload)
        assert names(bench.folder / "payloads") == [made.digest]
        assert (bench.folder / "payloads" / made.digest).read_bytes() == bytes(made.payload)


def nothing_finite() -> bytes:
    tensors = drawn()
    next(iter(tensors.values())).flat[0] = np.inf
    return body_of(tensors)


def test_T39_what_is_denied_is_off_the_disk_before_that_is_recorded(
    bench: Bench, ahead: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, there = bench.judge.record_decision, list[list[str]]()

    def recorded(*of: Any, **more: Any) -> Any:
        there.append(names(bench.folder / "payloads"))
        return record(*of, **more)

    monkeypatch.setattr(bench.judge, "record_decision", recorded)
    assert isinstance(offer(bench, nothing_finite()), Denied)
    assert there == [[]] and len(ahead) == 1
    assert isinstance(offer(bench, body_of(drawn())), Allowed)  # the counterpart: what leaves is there by then
    assert len(there[1]) == 1


def test_T39_of_what_is_denied_nothing_is_left(tmp_path: Path, ahead: list[bytes]) -> None:
    """With bfloat16 nothing is begun before it was judged: the bytes are not those that came."""
    with closing(Bench(tmp_path / "a", BFLOAT16)) as bench:
        assert isinstance(offer(bench, nothing_finite()), Denied)
        assert names(bench.folder / "payloads") == ahead == []
        assert isinstance(offer(bench, body_of(drawn())), Allowed)  # the counterpart


def test_T39_a_disk_that_refuses_it_halts_the_gate(bench: Bench, ahead: list[bytes]) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with failing(files, "_write_new", full), pytest.raises(OperationError) as raised:
        offer(bench, body_of(drawn()))
    assert raised.value.code == "PAYLOADS_UNWRITABLE" == bench.judge.halt_code
    assert names(bench.folder / "payloads") == [] and bench.channel.sent == []


def test_where_room_has_to_be_made_first_nothing_is_written_before(
    bench: Bench, ahead: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = body_of(drawn())
    gigabytes = bench.judge.policy.file.retention.outbox_max_gb
    monkeypatch.setattr(archive_module, "_GB", (len(body) - 1) / gigabytes)
    with pytest.raises(OperationError) as raised:
        offer(bench, body)
    assert raised.value.code == "OUTBOX_FULL" and ahead == []
    monkeypatch.setattr(archive_module, "_GB", len(body) / gigabytes)  # the counterpart: just enough
    again = bench.restart()
    assert isinstance(offer(again, body), Allowed) and len(ahead) == 1
    again.close()
    assert len(names(bench.folder / "payloads")) == 1
