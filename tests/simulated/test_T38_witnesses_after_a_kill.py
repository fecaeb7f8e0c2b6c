"""T38: silos go on countersigning each other's logs after the coordinator was killed anywhere in an exchange, and after
its database became an older one than its memory; what the memory rules out stays ruled out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from coordinator import store as db
from coordinator import witnessing
from coordinator.store import Store
from coordinator.witnessing import FOLDER, STEPS_MAX, Relay
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.checkpoint import parse_checkpoint, parse_note
from fedsilo.audit.witness import OWN_HISTORY_LOST
from fedsilo.protocol.errors import VerificationError
from tests.policies import setting
from tests.simulated.test_T38_peers_as_witnesses import COORDINATOR_KEY, NAMES, Net, log_of, spiffe

A, B, C = NAMES


class KilledError(BaseException):
    """The process is gone: nothing in it may catch this and go on."""


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Net]]:
    """Makes federations whose coordinator's database is a file, or the one at a URL."""
    nets: list[Net] = []

    def make(name: str = "net", database: str = "") -> Net:
        (tmp_path / name).mkdir()
        net = Net(tmp_path / name)
        net.store.close()
        net.store = Store(database or f"sqlite:///{net.folder / 'coordinator.db'}")
        nets.append(net)
        return net

    yield make
    for net in nets:
        net.close()


def restarted(net: Net) -> None:
    """The coordinator starts again on what its folder and its database hold."""
    net.coordinator.close()
    net.coordinator = log_of(net.folder / "coordinator", setting.COORDINATOR, COORDINATOR_KEY)
    net.relay = Relay(net.coordinator, net.names)


def grow(net: Net, *names: str) -> None:
    """Each shows a checkpoint of more records, and goes on to the next thing without waiting for anybody."""
    for name in names:
        net.silos[name].log.append("egress.decision", kind="lora.factors", decision="deny", direction="egress")
        net.exchange(name)


def killed(net: Net, name: str, monkeypatch: pytest.MonkeyPatch, at: int) -> bool:
    """An exchange in which the coordinator dies as it flushes a file or a folder for the time `at`; if it does so less
    often, before it commits, for which -1 stands, too. Whether it was a flush."""
    silo, flushes = net.silos[name], 0
    sent = silo.witnessing.message(same=False)

    def flush(_descriptor: int) -> None:
        nonlocal flushes
        flushes += 1
        if flushes == at:
            raise KilledError

    with monkeypatch.context() as patched, pytest.raises(KilledError), net.store.transaction() as session:
        patched.setattr(os, "fsync", flush)
        net.relay.exchange(session, silo.peer, sent)
        raise KilledError
    restarted(net)
    return flushes == at


def follow(net: Net) -> bool:
    """Whether after two more rounds everybody has countersigned everybody's newest checkpoint."""
    for _ in range(2):
        grow(net, *net.names)
        net.settle()
    return all(silo.witnessing.count() == len(net.names) for silo in net.silos.values())


def chain(net: Net, name: str) -> list[int]:
    sizes = select(db.ShownCheckpoint.size).where(db.ShownCheckpoint.silo == name).order_by(db.ShownCheckpoint.size)
    with net.store.transaction() as session:
        return list(session.scalars(sizes))


def files(net: Net, name: str) -> list[int]:
    return sorted(int(path.stem) for path in (net.folder / "coordinator" / FOLDER / name).glob("*.step"))


def countersigned_size(net: Net, witness: str, owner: str) -> int:
    return parse_checkpoint(parse_note(net.silos[witness].log.countersigned([spiffe(owner)])[spiffe(owner)]).text).size


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("grows", [True, False])
def test_T38_peers_follow_a_log_after_a_kill_anywhere_in_an_exchange(
    made: Callable[..., Net], monkeypatch: pytest.MonkeyPatch, grows: bool, rounds: int
) -> None:
    """grows: the silo shows more records when it comes again, and not the same checkpoint. rounds: before the kill."""
    at, died = 0, True
    while died:
        at += 1
        net = made(str(at))
        for number in range(rounds):
            net.round(number)
        net.silos[A].log.append("start")
        died = killed(net, A, monkeypatch, at)
        for _ in range(3):
            if grows:
                grow(net, A)
            else:
                net.exchange(A, same=True)
        assert follow(net), at
        assert set(chain(net, A)) <= set(files(net, A))
        net.close()
        results = verify_logs(net.paths(*NAMES, "coordinator"), 2)
        assert [result["problems"] for result in results] == [[], [], [], []]
    assert at > 4  # it died about the step, about the memory, and after both


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_T38_kills_one_after_another_and_while_others_ask_leave_no_hole(
    request: pytest.FixtureRequest, made: Callable[..., Net], monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    url = request.getfixturevalue("postgresql_url") if database == "postgresql" else ""
    net = made(database=url)
    net.round(1)
    seen = countersigned_size(net, B, A)
    for _ in range(3):
        net.silos[A].log.append("start")
        assert not killed(net, A, monkeypatch, -1)
        net.exchange(B, same=True)
        assert countersigned_size(net, B, A) == seen  # nobody is told of what is in no chain yet
    assert follow(net)


@pytest.mark.parametrize("at", [-1, 1])
def test_T38_what_was_countersigned_before_a_kill_cannot_be_taken_back(
    made: Callable[..., Net], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A silo goes back to before what the coordinator, alone, has countersigned; at 1 it had not yet."""
    net = made()
    net.round(1)
    victim = net.silos[A]
    shutil.copytree(net.folder / A, net.folder / "backup")
    victim.log.append("start")
    killed(net, A, monkeypatch, at)
    victim.log.close()
    shutil.rmtree(net.folder / A)
    shutil.move(net.folder / "backup", net.folder / A)
    victim.open()
    victim.log.append("stop")
    if at == -1:
        before = chain(net, A)
        with pytest.raises(VerificationError) as refused:
            net.exchange(A)
        assert refused.value.code == OWN_HISTORY_LOST
        assert chain(net, A) == before  # so nobody is led there
    else:
        net.exchange(A)
        assert follow(net)


@pytest.mark.parametrize("met", [True, False])
@pytest.mark.parametrize("missed", [0, 1, STEPS_MAX - 4])
def test_T38_peers_follow_after_the_database_came_back_from_a_backup(
    made: Callable[..., Net], met: bool, missed: int
) -> None:
    """met: the backup was made when the silos had countersigned each other already. missed: steps that one of them has
    not seen when the backup comes."""
    net = made()
    if met:
        net.round(1)
    net.store.close()
    shutil.copy(net.folder / "coordinator.db", net.folder / "backup.db")
    net.store = Store(f"sqlite:///{net.folder / 'coordinator.db'}")
    for number in (2, 3):
        net.round(number)
    for _ in range(missed):
        grow(net, A, B)
    net.store.close()
    shutil.copy(net.folder / "backup.db", net.folder / "coordinator.db")
    net.store = Store(f"sqlite:///{net.folder / 'coordinator.db'}")
    restarted(net)
    grow(net, A, B)  # the third comes later
    assert follow(net)
    assert [silo.refusals() for silo in net.silos.values()] == [[], [], []]


def test_T38_without_the_steps_of_a_hole_the_chain_begins_behind_it(
    made: Callable[..., Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody removed them. Who stands before the hole cannot be led over it, and is shown no step that says so."""
    net = made()
    grow(net, A, B)
    for name in (A, B, A):
        net.exchange(name, same=True)
    before = countersigned_size(net, B, A)
    net.silos[A].log.append("start")
    assert not killed(net, A, monkeypatch, -1)
    shutil.rmtree(net.folder / "coordinator" / FOLDER)
    for _ in range(3):
        grow(net, A)
    assert chain(net, A) == files(net, A) and min(chain(net, A)) > before
    for _ in range(3):
        net.exchange(B)
    assert (countersigned_size(net, B, A), net.silos[B].refusals()) == (before, [])
    # the counterpart: for a silo that meets this log for the first time, that is where it begins
    net.exchange(C)
    assert countersigned_size(net, C, A) == max(chain(net, A))


def test_T38_steps_that_do_not_fit_into_one_answer_come_in_several(
    made: Callable[..., Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = made()
    net.round(1)
    for _ in range(STEPS_MAX):
        grow(net, A, B)
    monkeypatch.setattr(witnessing, "ANSWER_BYTES_MAX", 6000)
    answer = net.exchange(C, same=True)
    assert [0 < len(peer.steps) < STEPS_MAX for peer in answer.peers] == [True] and answer.ByteSize() <= 6000
    assert follow(net)
