"""A disk that is full halts a silo in its round; started again, with space, it goes on there, and what it measured and
offered before is neither measured nor offered again."""

from __future__ import annotations

import errno
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.config import load_config as load_coordinator_config
from coordinator.main import check as check_coordinator
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.files import durable
from fedsilo.files.durable import DISK_BYTES_MIN, DiskFullError, disk_error, free_bytes, write_durably
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError
from silo import sampling
from silo.guard import adapters
from silo.guard.loop import Command
from silo.guard.trainer_process.supervisor import TrainerGone
from silo.guard.trainer_process.trainer_link import where_it_tells
from silo.link import LinkMessage
from silo.trainer.resume import KeptState
from tests.coordinator_folder import write_coordinator
from tests.policies import setting
from tests.world import ADAPTER, Loop

NEXT = codec.encode_factors(
    {name: values * 2 for name, values in codec.decode_factors(ADAPTER).tensors.items()},
    base_digest="", schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32",
)  # fmt: skip
DIGEST = codec.sha256_hex(ADAPTER)


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


def full(path: Path, *_: object, **__: object) -> None:
    raise disk_error(f"cannot write {path}", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def test_T39_a_full_disk_halts_and_after_the_restart_the_round_is_gone_on_with(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(loop)
    monkeypatch.setattr(adapters, "write_durably", full)
    end_round(loop, NEXT)
    assert "No space left" in loop.bench.gate.halted and loop.guard._failure is None
    assert [row["reasons"] for row in loop.bench.events("halt")] == [["DISK_FULL"]]
    sent = len(loop.coordinator.sent)
    loop.turn(3)
    assert len(loop.coordinator.sent) == sent and not loop.coordinator.bodies("control.abstain")
    loop.guard._leave()  # and the process ends, in order
    assert len(loop.coordinator.sent) == sent
    monkeypatch.undo()
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
    assert loop.trainer.tasks() == ["Evaluate", "LoadAdapter", "Evaluate"] and not loop.bench.gate.halted
    evaluated(loop, 1, codec.sha256_hex(NEXT))
    assert figures(loop) == [0, 1]


def test_what_was_measured_and_offered_once_is_not_again_after_an_orderly_stop(loop: Loop) -> None:
    begin(loop)
    loop.guard._leave()
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
    loop.guard._leave()
    loop.restart()
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=2)
    loop.open_round(2)
    loop.base_evaluated()
    assert loop.trainer.tasks() == ["Evaluate", "LoadAdapter"] and figures(loop) == [0]


@pytest.mark.parametrize(("number", "is_full"), [
    (errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EFBIG, True), (errno.EIO, False), (errno.EACCES, False),
])  # fmt: skip
def test_T39_only_a_lack_of_space_is_called_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_full: bool
) -> None:
    def refuse(_descriptor: int, _data: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched, pytest.raises(OperationError, match="cannot write") as told:
        patched.setattr(os, "write", refuse)
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
    assert (f"has {free} bytes left" in loop.bench.gate.halted) == full_disk
    assert bool(loop.coordinator.bodies("control.abstain")) == (loop.guard._failure is not None) == (not full_disk)
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


def test_the_space_of_a_folder_that_is_not_there_yet_is_that_of_where_it_will_lie(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "there") == pytest.approx(free_bytes(tmp_path), rel=0.5)  # others write, too


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
    assert loop.guard._failure is not None and not loop.bench.gate.halted


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
    assert "database or disk is full" in loop.bench.gate.halted and loop.guard._failure is None
    assert not loop.coordinator.bodies("control.abstain")
    assert [row["reasons"] for row in loop.bench.events("halt")] == [["LEDGER_UNWRITABLE"]]


def test_T39_a_full_disk_under_a_persons_order_halts_and_its_rows_are_drawn_again(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(loop)
    run = loop.guard.runs.run
    assert run is not None
    run.paused = True
    loop.trainer_says("done", task="LoadAdapter", round=1, metrics={})
    run.paused = False
    monkeypatch.setattr(sampling, "write_durably", full)
    loop.events.put(order := Command(run.advance))
    loop.turn()
    assert isinstance(order.result.exception(), DiskFullError) and "No space left" in loop.bench.gate.halted
    monkeypatch.undo()
    rows = {"left": run._giver, "whole": None}
    assert rows["left"] is not None
    whole = sampling.PrivateSampler(40, b"s" * 32, setting.PLAN.seed)
    whole.start_round(1)
    run.advance()
    assert loop.trainer.told[-1].fields["rows"] == whole.draw(setting.PLAN.prompts_per_step)


@pytest.mark.parametrize("is_full", [True, False])
def test_T39_a_plan_that_a_full_disk_keeps_from_beginning_comes_again(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    code = errno.ENOSPC if is_full else errno.EIO

    def refuse(message: object) -> None:
        raise disk_error("cannot write", OSError(code, os.strerror(code)))

    monkeypatch.setattr(loop.trainer, "send", refuse)
    loop.offer_plan()
    assert bool(loop.bench.gate.halted) == is_full == (loop.bench.ledger.run_state("run-1") != "declined")
    assert bool(loop.coordinator.bodies("control.abstain")) == (not is_full)
    loop.restart()
    loop.offer_plan()
    assert (loop.guard.runs.run is not None) == is_full


def test_T39_a_log_on_a_full_disk_costs_the_trainer_its_words_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullLog:
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullFile:
        is_written_here = True

        def save(self, state: object) -> None:
            raise DiskFullError("no space")

    @dataclass(frozen=True)
    class State:
        given: object = None

    session: Any = SimpleNamespace(state=State)
    monkeypatch.setattr(sys, "stderr", FullLog())
    kept = KeptState(session, FullFile())  # type: ignore[arg-type]
    kept.keep(LinkMessage("task", {"task": "PrivateStep"}), LinkMessage("done"))


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
