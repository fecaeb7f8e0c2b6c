"""Nothing leaves once the audit log's file is not the one that was written: removed, moved, replaced or truncated (P2).

Case L1 of other people's bug reports: thirteen more messages left in 40 s after the file was removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fedsilo.audit.segments import LogLostError
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import FedSiloError, OperationError
from fedsilo.protocol.place import Place
from silo.guard.commands import ends_when
from silo.guard.messages import Allowed
from tests.simulated.coordinator_parts import joined, until_quiet
from tests.simulated.test_coordinator_ingress import code_of
from tests.world import Bench


def _move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _replace(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.rename(path)


def _link(path: Path) -> None:
    _move(path)
    path.symlink_to(path.with_name("elsewhere"))


def _lengthen(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"{}\n")


def _move_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("audit.moved"))


WAYS = (Path.unlink, _move, _truncate, _empty, _replace, _link, _lengthen, _move_folder)
way = pytest.mark.parametrize("change", WAYS, ids=lambda change: change.__name__.strip("_"))


def _log(folder: Path) -> Path:
    (segment,) = (folder / "audit").glob("*.jsonl")
    return segment


@way
def test_T38_what_was_decided_does_not_leave_when_its_record_is_lost(
    bench: Bench, change: Callable[[Path], None]
) -> None:
    offered = bench.responses()
    assert isinstance(offered, Allowed)
    change(_log(bench.folder))
    with pytest.raises(LogLostError) as lost:
        bench.gate.transmit(offered)
    assert lost.value.code == bench.judge.halt_code == "LOG_LOST"
    assert bench.channel.sent == []
    with pytest.raises(OperationError):
        bench.gate.send(Place("", 0, 0, "control.heartbeat"), pb.Heartbeat())
    assert bench.channel.sent == []


@way
def test_T38_nothing_more_is_decided_into_a_lost_log(bench: Bench, change: Callable[[Path], None]) -> None:
    bench.gate.send(Place("", 0, 0, "control.heartbeat"), pb.Heartbeat())
    change(_log(bench.folder))
    with pytest.raises(LogLostError):
        bench.gate.send(Place("", 0, 0, "control.heartbeat"), pb.Heartbeat())
    assert len(bench.channel.sent) == 1


def test_T38_a_file_that_is_put_back_is_gone_on_with_after_a_restart(bench: Bench) -> None:
    offered = bench.responses()
    assert isinstance(offered, Allowed)
    segment = _log(bench.folder)
    kept = segment.with_name("elsewhere")
    segment.rename(kept)
    with pytest.raises(LogLostError):
        bench.gate.transmit(offered)
    kept.rename(segment)
    with closing(bench.restart()) as again:
        (item,) = again.ledger.outbox("allowed")
        again.gate.retry(item)
        assert again.channel.kinds() == ["public.responses"]


def test_T38_a_log_that_is_read_backed_up_and_followed_is_in_its_place(bench: Bench) -> None:
    """The counterpart: what people do beside a running silo changes neither the file nor its length."""
    segment = _log(bench.folder)
    shutil.copytree(segment.parent, bench.folder / "backup")
    os.utime(segment)
    os.link(segment, bench.folder / "hard_link")
    bench.gate.send(Place("", 0, 0, "control.heartbeat"), pb.Heartbeat())
    assert len(bench.channel.sent) == 1


@way
def test_T38_a_coordinator_whose_log_is_lost_answers_nobody_more(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    house, silos = joined(tmp_path)
    until_quiet(silos)
    change(_log(Path(house.audit.directory).parent))
    answers: list[str] = []
    try:
        answers.append(code_of(silos[0].say("control.heartbeat", pb.Heartbeat())))
    except FedSiloError as error:
        answers.append(error.code)
    assert answers[0] in {"LOG_LOST", "HALTED"}
    assert house.driver.halted == "LOG_LOST"


def test_a_halt_says_what_ends_it(tmp_path: Path) -> None:
    assert ends_when("LOG_LOST", tmp_path) != ends_when("LOG_FULL", tmp_path)
