"""A state folder read without its daemon: what a real silo left there, and what it says where something is missing."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.release_cases import site as made
from benchmarks.release_site import DeskSource
from console.chain import head_lines
from console.drawing import UNICODE, to_text
from console.offline import NOT_LOOKED_AT, Offline, log_only
from console.sharing import COORDINATOR, SILO, unclassified
from console.store import Store
from console.values import CoordinatorState
from coordinator import store as db
from fedsilo.edge.audit_log import AuditLog
from fedsilo.launch.coordinator_folder import read_coordinator
from fedsilo.launch.silo_folder import MISSING, read_silo
from fedsilo.treaty.audit.checkpoint import cosign, cosigner_key, log_key
from fedsilo.treaty.errors import NotFoundError, OperationError, UsageError
from silo.guard.figure_history import FILE, FigureHistory
from silo.guard.ledger import PolicyInForce
from tests.policies import setting
from tests.simulated.guarded import COORDINATOR_KEY

WAIT_SECONDS = 30


@dataclass
class Left:
    """What a silo showed while it ran, and the folder it left."""

    folder: Path
    state: dict[str, Any]
    answers: dict[str, Any]
    release: str


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    with closing(made(tmp_path_factory.mktemp("silo"), "run-1", 1)) as site:
        policy = site.bench.gate.policy
        content = policy.file.model_dump(mode="json", by_alias=True)
        site.bench.ledger.put_in_force(PolicyInForce(policy.digest, content, policy.digest))
        plan = site.bench.gate.view.plan
        assert plan is not None
        site.bench.ledger.start_run("run-1", plan.canonical())
        site.bench.ledger.save_view("run-1", site.bench.gate.view.to_json())
        site.bench.gate.record("key.enrol", detail={"not_after": "2027-03-01T00:00:00Z"})
        site.let_go(site.hold_responses(6, 9))
        release = site.hold_factors(1.0)
        site.show()
        source = DeskSource(site.desk)
        asked = {name: source.query(name) for name in ("approvals", "outbox", "inbox", "ledger", "audit")}
        asked["approval"] = source.query("approval", {"release": release.id})
        return Left(site.folder / "state", source.snapshot().state, asked, release.id)


def opened(left: Left) -> Offline:
    return Offline(left.folder, read_silo)


def test_the_state_is_the_daemons_as_far_as_it_is_on_disk(left: Left) -> None:
    found = opened(left).snapshot().state
    for name in ("silo", "federation", "run", "last_run", "method", "rounds", "local_steps", "round", "left", "audit"):
        assert found[name] == left.state[name], name
    assert found["policy"]["digest"] == left.state["policy"]["digest"]
    assert found["certificate_until"] == "2027-03-01T00:00:00Z" and not found["halted"]
    (shown,), (held,) = found["held"], left.state["held"]
    assert shown.pop("leaves")["kinds"] == held["leaves"]["kinds"]
    # whom the daemon saw at the other end is on no disk, so neither is a digest of it
    assert held["difference"].startswith(f"{shown.pop('difference')}; cert to 20")
    other = ("leaves", "difference", "shown", "shown_facts")
    assert {name: shown[name] for name in shown if name not in other} == {
        name: value for name, value in held.items() if name not in other
    }


def test_a_console_draws_it_and_says_what_is_missing(left: Left) -> None:
    offline, store = opened(left), Store()
    reading = offline.snapshot()
    store.read(reading, 0.0, wall_time=offline.wall_time())
    snapshot = store.snapshot
    assert snapshot.site == "hospital_a" and snapshot.skew_seconds == 0.0
    assert [release.id for release in snapshot.held] == [left.release] and snapshot.held[0].answerable
    assert "OFFLINE, as of 2027-" in offline.banner() and "no daemon was asked" in offline.banner()
    watcher = offline.watch(reading.sequence)
    events = [next(watcher) for _ in range(reading.state["audit"]["size"] - reading.sequence + len(MISSING))]
    assert [event.fields[""] for event in events if event.name == "not on disk"] == list(MISSING)
    assert "approval.request" in [event.name for event in events]
    offline.close()
    assert list(watcher) == []


def test_its_answers_are_the_daemons(left: Left) -> None:
    offline = opened(left)
    for name in ("approvals", "outbox", "inbox", "ledger"):
        assert offline.query(name) == left.answers[name], name
    assert offline.query("audit")["records"] == left.answers["audit"]["records"]
    assert offline.query("approval", {"release": left.release})["policy"] == left.answers["approval"]["policy"]
    held = next(row for row in left.answers["outbox"]["messages"] if row["verdict"] == "hold")
    shown = offline.query("outbox", {"seq": held["seq"]})
    assert shown["message"]["seq"] == held["seq"] and "persons must approve" in shown["would_pass"][0]
    page = offline.query("audit", {"limit": 2, "event": "egress."})
    assert [record["event"].startswith("egress.") for record in page["records"]] == [True, True] and page["next"]
    with pytest.raises(NotFoundError) as refused:
        offline.query("limits")
    assert refused.value.code == "NOT_ON_DISK"
    with pytest.raises(NotFoundError):
        offline.query("approval", {"release": "r9/x/0"})
    with pytest.raises(UsageError):
        offline.query("audit", {"limit": "many"})


def verified(offline: Offline) -> dict[str, Any]:
    assert offline.query("audit.status")["verified_to"] is None
    offline.query("audit.verify")
    deadline = time.monotonic() + WAIT_SECONDS
    while offline.query("audit.status")["verified_at"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    found = offline.query("audit.status")
    assert isinstance(found, dict)
    return found


def test_verification_still_works_and_names_the_record_that_was_changed(left: Left, tmp_path: Path) -> None:
    found = verified(opened(left))
    assert found["broken"] is None and found["verified_to"] == found["size"] == left.state["audit"]["size"]
    assert found["checkpoint"]["size"] > 0 and found["coordinator"] == "not seen"
    copy = copied(left.folder, tmp_path / "copy")
    segment = next((copy / "audit").glob("*.jsonl"))
    segment.write_bytes(segment.read_bytes().replace(b'"round":1', b'"round":2', 1))
    broken = verified(Offline(copy, read_silo))["broken"]
    assert broken is not None and "record" in broken["why"]


def test_nobody_is_named_a_witness_before_the_log_was_looked_at(left: Left) -> None:
    offline = opened(left)
    assert offline.query("audit.status")["coordinator"] == NOT_LOOKED_AT
    assert offline.snapshot().state["audit"]["broken"] is None
    assert offline.verify_now(WAIT_SECONDS) and offline.query("audit.status")["coordinator"] == "not seen"


def test_a_break_stands_in_the_state_for_the_first_screen(left: Left, tmp_path: Path) -> None:
    copy = copied(left.folder, tmp_path / "copy")
    segment = next((copy / "audit").glob("*.jsonl"))
    segment.write_bytes(segment.read_bytes().replace(b'"round":1', b'"round":2', 1))
    offline = Offline(copy, read_silo)
    offline.verify_now(WAIT_SECONDS)
    assert offline.snapshot().state["audit"]["broken"]["why"]


def test_a_running_guards_state_tells_a_break_that_its_verification_found(tmp_path: Path) -> None:
    with closing(made(tmp_path, "run-1", 1)) as site:
        site.let_go(site.hold_responses(6, 9))
        panel, log = site.guard.panel, site.bench.audit.directory

        def broken() -> Any:
            verify, status = panel.queries()["audit.verify"], panel.queries()["audit.status"]
            verify({})
            deadline = time.monotonic() + WAIT_SECONDS
            while status({})["verifying"]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            state = panel.state(None, link_fault="")
            assert list(unclassified(state, SILO)) == []
            return state["audit"]["broken"]

        assert broken() is None
        segment = next(log.glob("*.jsonl"))
        segment.write_bytes(segment.read_bytes().replace(b'"round":1', b'"round":2', 1))
        assert isinstance(broken()["seq"], int)


def test_figures_and_log_lines_are_read_and_not_mended(left: Left, tmp_path: Path) -> None:
    folder = copied(left.folder, tmp_path / "copy")
    with pytest.raises(NotFoundError):
        Offline(folder, read_silo).query("logs")
    history = FigureHistory(folder / FILE)
    for step in (1, 2):
        history.add(run="run-1", task="t", number=1, step=step, at=setting.NOW, figures={"reward_mean": 0.25 * step})
    with (folder / FILE).open("ab") as stream:
        stream.write(b'{"torn')
    (folder / "logs").mkdir()
    (folder / "logs" / "guard.log").write_text("2027-01-01 INFO fedsilo.silo: began\nprivate words\n")
    before = list(digests(folder))
    offline = Offline(folder, read_silo)
    (series,) = offline.query("curves", {"run": "run-1"})["series"]
    assert [point["value"] for point in series["points"]] == [0.25, 0.5] and series["name"] == "reward_mean"
    told = offline.query("logs", {"lines": 10})
    assert "private words" not in "".join(told["lines"]) and len(told["lines"]) + told["left_out"] == 2
    assert list(digests(folder)) == before


def copied(folder: Path, to: Path) -> Path:
    for path in folder.rglob("*"):
        if path.is_file():
            target = to / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return to


def digests(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        # SQLite's shared memory, which a reader of a database in WAL mode makes beside it, holds nothing
        if path.is_file() and not path.name.endswith(("-shm", "-wal")):
            yield str(path), hashlib.sha256(path.read_bytes()).hexdigest()


def test_reading_a_folder_changes_nothing_in_it(left: Left, tmp_path: Path) -> None:
    folder = copied(left.folder, tmp_path / "copy")
    (folder / "payloads" / ("0" * 64)).write_bytes(b"a daemon that starts takes this away: no row refers to it")
    before = list(digests(folder))
    offline = Offline(folder, read_silo)
    offline.snapshot()
    for name in ("approvals", "outbox", "ledger", "audit"):
        offline.query(name)
    verified(offline)
    assert list(digests(folder)) == before


def test_without_a_ledger_the_log_speaks_alone(left: Left, tmp_path: Path) -> None:
    copy = copied(left.folder / "audit", tmp_path / "copy" / "audit").parent
    offline = Offline(copy, read_silo)
    found = offline.snapshot().state
    assert found["left"] == left.state["left"] and found["held"] == []
    assert "everything but the audit log" in offline.view.missing[0]
    assert Offline(copy).view.state == log_only(offline._facts).state


def test_what_is_no_state_folder_or_no_ledger_is_said(left: Left, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="holds no audit log") as nothing:
        Offline(tmp_path)
    assert "state_dir" in nothing.value.hint
    with pytest.raises(NotFoundError) as around:
        Offline(left.folder.parent)
    assert "did you mean" in around.value.hint
    copy = copied(left.folder, tmp_path / "copy")
    (copy / "ledger.sqlite3").write_bytes(b"no database at all" * 1000)
    with pytest.raises(OperationError) as damaged:
        Offline(copy, read_silo)
    assert "ledger.sqlite3" in damaged.value.message


@pytest.fixture
def coordinator(tmp_path: Path) -> Path:
    """A coordinator's folder with a finished run and a member that released a figure."""
    folder = tmp_path / "coordinator"
    folder.mkdir()
    with AuditLog(folder / "audit", origin=setting.COORDINATOR, key=COORDINATOR_KEY, actor=setting.COORDINATOR) as log:
        log.append("start")
    store = db.Store(f"sqlite:///{folder / 'coordinator.db'}")
    with store.transaction() as session:
        request = {"method": "pubswap", "rounds": 3}
        session.add(db.Run(
            name="run-1", ordinal=1, state="finished", request=json.dumps(request), plan=setting.PLAN.canonical(),
            submitted_at="2026-12-01T10:00:00Z",
        ))  # fmt: skip
        session.add(db.Round(run="run-1", number=2, state="committed", base_digest="", opened_at=""))
        session.add(db.Member(
            silo="hospital_a", state="joined", hello='{"isolation":"namespaces"}', fingerprint="f" * 64, since="",
        ))  # fmt: skip
        session.add(db.Traffic(
            run="run-1", round=1, silo="hospital_a", direction="in", kind="lora.factors", messages=1,
            payload_bytes=700,
        ))  # fmt: skip
    store.close()
    return folder


def test_a_coordinators_folder_tells_runs_members_and_traffic(coordinator: Path) -> None:
    before = sorted(path.name for path in coordinator.iterdir())
    offline = Offline(coordinator, read_coordinator)
    store, reading = Store(), offline.snapshot()
    store.read(reading, 0.0, wall_time=offline.wall_time(), record=offline.query("run", {"run": "run-1"}))
    state = store.snapshot.state
    assert isinstance(state, CoordinatorState) and state.coordinator == "main" and state.federation == "cardio-net"
    assert state.current is not None and (state.current.round, state.current.rounds) == (2, 3)
    (member,) = state.members
    assert (member.silo, member.isolation, member.received_bytes) == ("hospital_a", "namespaces", 700)
    assert offline.query("runs") == reading.state["runs"] and offline.query("silos") == reading.state["silos"]
    assert offline.query("traffic", {"run": "run-1"})[0]["bytes"] == 700
    assert list(unclassified(reading.state, COORDINATOR)) == []
    with pytest.raises(NotFoundError):
        offline.query("run", {"run": "run-2"})
    assert sorted(path.name for path in coordinator.iterdir()) == before


def test_before_a_verification_witnesses_are_named_and_not_called_nobody(coordinator: Path) -> None:
    with AuditLog(
        coordinator / "audit", origin=setting.COORDINATOR, key=COORDINATOR_KEY, actor=setting.COORDINATOR
    ) as log:
        log.checkpoint()
    silo, key = "spiffe://cardio-net/silo/hospital_a", Ed25519PrivateKey.generate()
    lines = (log_key(silo, key.public_key()), cosigner_key(silo, key.public_key()))
    (coordinator / "audit" / "keys" / "hospital_a.vkey").write_text("".join(f"{each.text}\n" for each in lines))
    note = max((coordinator / "audit" / "checkpoints").glob("*.note"))
    note.write_text(cosign(note.read_text(), silo, key, 1_800_000_000))
    offline = Offline(coordinator, read_coordinator)

    def shown() -> str:
        return to_text(head_lines(offline.query("audit.status"), 0.0, 400, UNICODE, control=False, at_coordinator=True))

    assert "countersigned by silo/hospital_a" in shown() and "nobody" not in shown()
    assert "not looked at: v verifies: hospital_a" in shown() and "matches" not in shown()
    assert offline.verify_now(WAIT_SECONDS) and "matches hospital_a" in shown() and "not looked at" not in shown()


def test_a_coordinators_database_that_is_none_or_elsewhere_is_said(coordinator: Path) -> None:
    (coordinator / "coordinator.db").write_bytes(b"no database at all" * 1000)
    with pytest.raises(OperationError, match=r"coordinator\.db"):
        Offline(coordinator, read_coordinator)
    (coordinator / "coordinator.db").unlink()
    offline = Offline(coordinator, read_coordinator)
    assert offline.snapshot().state["runs"] == [] and "another database" in offline.view.missing[0]


def test_a_halt_is_told_until_a_start_ends_it(tmp_path: Path) -> None:
    def halted() -> str:
        return str(Offline(tmp_path / "state", read_silo).snapshot().state["halted"])

    with closing(made(tmp_path, "run-1", 1)) as site:
        site.bench.audit.append("halt", reasons=["LOG_FULL"])
        assert halted() == "LOG_FULL"
        site.bench.audit.append("start")
        assert halted() == ""
