"""T38: silos countersign each other's logs through a coordinator that they need not trust.

Real logs, real certificates, the guard's half and the coordinator's half; only the envelope and the network are left
out. Every attack stands beside the honest case.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from certs.authority import create_ca
from certs.identity import PeerIdentity, peer_identity
from coordinator import store as db
from coordinator import witnessing
from coordinator.store import Store
from coordinator.witnessing import ANSWER_BYTES_MAX, FOLDER, STEPS_MAX, Relay
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.checkpoint import Checkpoint, cosign, parse_checkpoint, parse_note, sign_checkpoint
from fedsilo.audit.log import AuditLog
from fedsilo.audit.witness import OWN_HISTORY_LOST
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import VerificationError
from policies.kinds import fields_at_fault
from policies.model import Policy
from silo.guard.coordinator_client import Witnessing
from tests.policies import setting
from tests.policies.messages import good
from tests.security.people import new_keys
from tests.world import ADAPTER, Loop

NOW = datetime.fromtimestamp(setting.NOW, UTC)
CA = create_ca("cardio-net", kind="federation", not_before=NOW - timedelta(days=1), days=30)
STRANGERS = create_ca("cardio-net", kind="federation", not_before=NOW - timedelta(days=1), days=30)
COORDINATOR_KEY = Ed25519PrivateKey.generate()
NAMES = ("hospital_a", "hospital_b", "hospital_c")


def spiffe(name: str) -> str:
    return f"spiffe://cardio-net/silo/{name}"


def log_of(folder: Path, origin: str, key: Ed25519PrivateKey, ahead: float = 0.0) -> AuditLog:
    clock = lambda: setting.NOW + ahead  # noqa: E731
    return AuditLog(folder, origin=origin, key=key, actor=origin, clock=clock, reserve_bytes=0)


@dataclass
class Silo:
    name: str
    folder: Path
    policy: Policy
    ahead: float = 0.0  # seconds of its clock

    def __post_init__(self) -> None:
        _, self.key, keys = new_keys()
        pem = CA.issue(keys, "silo", self.name, now=NOW - timedelta(minutes=1)).certificate_pem
        self.peer: PeerIdentity = peer_identity(pem, CA.certificate_pem, NOW, role="silo")
        self.open()

    def open(self) -> None:
        self.log = log_of(self.folder, spiffe(self.name), self.key, self.ahead)
        self.log.trust_peer(setting.COORDINATOR, COORDINATOR_KEY.public_key())
        self.log.append("start")
        self.witnessing = Witnessing(
            self.log, lambda: self.policy, own_id=spiffe(self.name), trust_root_pem=CA.certificate_pem,
            now_seconds=lambda: setting.NOW,
        )  # fmt: skip

    def restart(self) -> None:
        self.log.close()
        self.open()

    def refusals(self) -> list[tuple[str, str]]:
        records = (record for record in self.log.records() if record["event"] == "ingress.decision")
        return [(record["peer"], record["reasons"][0]) for record in records if record["decision"] == "deny"]


def exchanged(relay: Relay, session: Session, peer: PeerIdentity, theirs: pb.Checkpoint) -> pb.Checkpoint:
    """The coordinator's answer to one checkpoint."""
    return relay.answer(session, peer, theirs, relay.take_in(peer, theirs))


@dataclass
class Net:
    folder: Path
    names: tuple[str, ...] = NAMES
    min_witnesses: int = 1
    ahead: Mapping[str, float] = field(default_factory=dict)
    tamper: Callable[[Silo, pb.Checkpoint], None] = field(default=lambda silo, answer: None)

    def __post_init__(self) -> None:
        self.store = Store("sqlite://")
        self.coordinator = log_of(self.folder / "coordinator", setting.COORDINATOR, COORDINATOR_KEY)
        self.relay = Relay(self.coordinator, self.names)
        text = setting.policy_text(peers=tuple(map(spiffe, self.names)))
        policy = setting.policy_of(text.replace("min_witnesses: 1", f"min_witnesses: {self.min_witnesses}"))
        self.silos = {name: Silo(name, self.folder / name, policy, self.ahead.get(name, 0.0)) for name in self.names}

    def close(self) -> None:
        for silo in self.silos.values():
            silo.log.close()
        self.coordinator.close()
        self.store.close()

    def exchange(self, name: str, *, same: bool = False) -> pb.Checkpoint:
        silo = self.silos[name]
        sent = silo.witnessing.message(same=same)
        self.last_sent = sent
        with self.store.transaction() as session:
            answer = exchanged(self.relay, session, silo.peer, sent)
        self.tamper(silo, answer)
        silo.witnessing.take_in(answer)
        return answer

    def round(self, number: int) -> None:
        """Each silo has something to show, shows it, and goes on until nothing waits for it."""
        for name, silo in self.silos.items():
            silo.log.append("egress.decision", kind="lora.factors", decision="deny", round=number, direction="egress")
            self.exchange(name)
        self.settle()

    def settle(self) -> None:
        for _ in range(40):  # each pass moves every checkpoint or cosignature by one station
            owing = {name for name, silo in self.silos.items() if silo.witnessing.owes}
            waiting = sorted(self.relay.waiting | owing)
            if not waiting:
                return
            for name in waiting:
                self.exchange(name, same=True)
        raise AssertionError("cosignatures go in circles")

    def paths(self, *names: str) -> list[Path]:
        return [self.folder / name for name in names]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut leaves is tested in tests/protocol/test_audit_durability.py; here flushing only costs time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    made = Net(tmp_path)
    yield made
    made.close()


def found(*paths: Path, least: int = 0) -> list[list[str]]:
    return [result["problems"] for result in verify_logs(list(paths), least)]


def test_T38_every_silo_countersigns_every_other_and_the_logs_say_how_many(net: Net) -> None:
    for number in (1, 2, 3):
        net.round(number)
    shown = {name: silo.log.offered_size for name, silo in net.silos.items()}
    for silo in net.silos.values():
        assert silo.witnessing.count() == 3  # two peers and the coordinator
        silo.log.append("stop")
    net.close()
    results = verify_logs(net.paths(*NAMES, "coordinator"), 3)
    assert [result["problems"] for result in results] == [[], [], [], []]
    for name, result in zip(NAMES, results, strict=False):
        others = {spiffe(other) for other in NAMES if other != name} | {setting.COORDINATOR}
        assert result["cosigned"] == dict.fromkeys(others, shown[name])
        assert [count for size, count in result["witnesses"] if size <= shown[name]] == [3] * 4  # start, three rounds
        assert [count for size, count in result["witnesses"] if size > shown[name]] == [0]  # of the stop
    # a fourth witness does not exist
    assert [len(problems) for problems in found(*net.paths(*NAMES), least=4)] == [1, 1, 1]


def test_T38_a_log_that_was_long_without_witnesses_does_not_pass(net: Net, tmp_path: Path) -> None:
    net.round(1)
    for hours, verdict in ((23, True), (25, False)):
        folder = tmp_path / f"{hours}h"
        shutil.copytree(tmp_path / "hospital_a", folder)
        later = AuditLog(
            folder, origin=spiffe("hospital_a"), key=net.silos["hospital_a"].key, actor=spiffe("hospital_a"),
            clock=lambda: setting.NOW, reserve_bytes=0,
        )  # fmt: skip
        later._clock = lambda: setting.NOW + 60
        later.append("start")
        moment = setting.NOW + 60 + 3600 * hours
        later._clock = lambda moment=moment: moment  # type: ignore[misc]
        later.append("stop")
        later.close()
        (alone,) = verify_logs([folder])
        (demanded,) = verify_logs([folder], 3)
        assert alone["verified"] and demanded["verified"] is verdict


def forked(net: Net, *, keep: int = 2) -> Path:
    """hospital_a's owner rebuilds the log with its own key, without its end, and the coordinator helps: it forgets
    what it countersigned and countersigns the other history."""
    victim = net.silos["hospital_a"]
    folder = net.folder / "fork"
    with (
        log_of(folder, spiffe("hospital_a"), victim.key) as log,
        log_of(net.folder / "colluding", setting.COORDINATOR, COORDINATOR_KEY) as coordinator,
    ):
        log.trust_peer(setting.COORDINATOR, COORDINATOR_KEY.public_key())
        coordinator.trust_peer(spiffe("hospital_a"), victim.key.public_key())
        for _ in range(keep):
            log.append("start")
        coordinator.take(log.offer(setting.COORDINATOR), spiffe("hospital_a"))
        log.take(coordinator.offer(spiffe("hospital_a")), setting.COORDINATOR)
    return folder


@pytest.mark.parametrize("keep", [2, 30])
def test_T38_a_peers_memory_shows_a_fork_although_the_coordinator_colludes(net: Net, keep: int) -> None:
    net.round(1)
    folder = forked(net, keep=keep)
    net.close()
    # the counterpart: the rebuilt log and the colluding coordinator are two perfect witnesses of each other
    assert found(folder, net.folder / "colluding", least=1) == [[], []]
    own, _, peer = found(folder, net.folder / "colluding", net.folder / "hospital_b")
    assert own and all(spiffe("hospital_b") in problem for problem in own)
    assert peer == []


def test_T38_a_fork_gets_no_cosignature_and_two_notes_of_one_size_are_kept_as_evidence(net: Net) -> None:
    net.round(1)
    victim, witness = net.silos["hospital_a"], net.silos["hospital_b"]
    remembered = (witness.folder / "witnessed").glob("spiffe-cardio-net-silo-hospital_a-*")
    (path,) = list(remembered)
    before = path.read_bytes()
    size = parse_checkpoint(parse_note(before.decode()).text).size

    def show(note: str, previous: int = size) -> None:
        step = pb.LogStep(note=note, previous_size=previous, consistency=[bytes(32)])
        witness.witnessing._follow(pb.PeerLog(steps=[step]))

    show(sign_checkpoint(Checkpoint(spiffe("hospital_a"), size + 5, bytes(32)), victim.key))
    assert witness.refusals() == [(spiffe("hospital_a"), "VERIFICATION_FAILED")]
    show(
        sign_checkpoint(Checkpoint(spiffe("hospital_a"), size - 1, bytes(32)), victim.key)
    )  # an old one proves nothing
    assert len(witness.refusals()) == 1
    show(sign_checkpoint(Checkpoint(spiffe("hospital_a"), size, bytes(32)), victim.key))
    assert witness.refusals()[1:] == [(spiffe("hospital_a"), "TWO_HISTORIES")]
    assert path.read_bytes() == before  # the memory stands
    (evidence,) = (witness.folder / "evidence").iterdir()
    assert parse_checkpoint(parse_note(evidence.read_text(encoding="utf-8")).text).root == bytes(32)
    # the counterpart: the honest continuation is countersigned
    net.round(2)
    assert path.read_bytes() != before
    net.close()
    assert found(*net.paths(*NAMES, "coordinator")) == [[]] * 4


def test_T38_a_silos_own_lost_history_comes_back_from_a_peer_and_halts_it(net: Net) -> None:
    net.round(1)
    shutil.copytree(net.folder / "hospital_a", net.folder / "backup")
    net.round(2)
    victim = net.silos["hospital_a"]
    victim.log.close()
    shutil.rmtree(net.folder / "hospital_a")
    shutil.copytree(net.folder / "backup", net.folder / "hospital_a")
    victim.open()
    # the coordinator colludes: it says nothing of its own memory; hospital_b's cosignature is enough
    answer = net.silos["hospital_b"].log.countersigned([spiffe("hospital_a")])[spiffe("hospital_a")]
    with pytest.raises(VerificationError, match="does not have") as raised:
        victim.witnessing._cosignature(answer)
    assert raised.value.code == "OWN_HISTORY_LOST"
    victim.witnessing._cosignature("nonsense")  # what the relay makes up halts nobody


def newest_step(answer: pb.Checkpoint) -> pb.LogStep:
    return answer.peers[0].steps[-1]


def garble_note(silo: Silo, answer: pb.Checkpoint) -> None:
    for log in answer.peers:
        step = log.steps[-1]
        checkpoint = parse_checkpoint(parse_note(step.note).text)
        forged = Checkpoint(checkpoint.origin, checkpoint.size + 1, checkpoint.root)
        step.note = sign_checkpoint(forged, COORDINATOR_KEY)  # under the silo's name, by another key


def other_certificate(silo: Silo, answer: pb.Checkpoint) -> None:
    _, key, keys = new_keys()
    for log in answer.peers:
        checkpoint = parse_checkpoint(parse_note(log.steps[-1].note).text)
        name = checkpoint.origin.rpartition("/")[2]
        log.certificate_pem = STRANGERS.issue(keys, "silo", name, now=NOW).certificate_pem.decode()
        log.steps[-1].note = sign_checkpoint(checkpoint, key)


def certificate_of_somebody_else(silo: Silo, answer: pb.Checkpoint) -> None:
    _, key, keys = new_keys()
    for log in answer.peers:
        log.certificate_pem = CA.issue(keys, "silo", "hospital_x", now=NOW).certificate_pem.decode()
        checkpoint = parse_checkpoint(parse_note(log.steps[-1].note).text)
        log.steps[-1].note = sign_checkpoint(checkpoint, key)


@pytest.mark.parametrize("forgery", [garble_note, other_certificate, certificate_of_somebody_else])
def test_T38_the_relay_cannot_forge_a_peer(net: Net, forgery: Callable[[Silo, pb.Checkpoint], None]) -> None:
    net.tamper = forgery
    for name in NAMES:
        net.exchange(name)
    witness = net.silos["hospital_c"]
    assert not any(witness.log.knows(spiffe(name)) and witness.log.countersigned([spiffe(name)]) for name in NAMES)
    assert {peer for peer, _ in witness.refusals()} == {spiffe("hospital_a"), spiffe("hospital_b")}
    # the counterpart: left alone, the same relay brings what is countersigned
    net.tamper = lambda silo, answer: None
    net.relay.waiting |= set(NAMES)
    net.settle()
    assert set(witness.log.countersigned([spiffe(name) for name in NAMES])) == {
        spiffe("hospital_a"),
        spiffe("hospital_b"),
    }


def test_T38_what_is_no_cosignature_of_a_shown_checkpoint_is_not_carried(net: Net) -> None:
    net.round(1)
    shown = net.silos["hospital_a"].log.offered_size

    net.silos["hospital_a"].log.append("start")
    net.exchange("hospital_a")
    newest, stranger = net.last_sent.note, Ed25519PrivateKey.generate()
    message = net.silos["hospital_a"].witnessing.message(same=True)
    good = cosign(newest, spiffe("hospital_b"), net.silos["hospital_b"].key, int(setting.NOW))
    other = sign_checkpoint(Checkpoint(spiffe("hospital_a"), shown, bytes(32)), net.silos["hospital_a"].key)

    def broken(note: str) -> str:
        *lines, last, _ = note.split("\n")
        middle = len(last) - 20
        flipped = last[:middle] + ("A" if last[middle] != "A" else "B") + last[middle + 1 :]
        return "\n".join([*lines, flipped, ""])

    def sizes_carried(note: str) -> set[int]:
        witness = net.silos["hospital_b"]
        sent = witness.witnessing.message(same=True)
        sent.countersigned.append(note)
        with net.store.transaction() as session:
            exchanged(net.relay, session, witness.peer, sent)
            answer = exchanged(net.relay, session, net.silos["hospital_a"].peer, message)
        by = [parse_note(text) for text in answer.countersigned]
        return {parse_checkpoint(n.text).size for n in by if any(s.name == spiffe("hospital_b") for s in n.signatures)}

    for bad in (
        "nonsense",
        newest,  # nobody's cosignature
        broken(good),  # the right key's name over other bytes
        cosign(newest, spiffe("hospital_b"), stranger, int(setting.NOW)),  # another key under its name
        cosign(newest, spiffe("hospital_c"), net.silos["hospital_c"].key, int(setting.NOW)),  # somebody else's
        cosign(other, spiffe("hospital_b"), net.silos["hospital_b"].key, int(setting.NOW)),  # of what was never shown
    ):
        assert sizes_carried(bad) == {shown}
    assert sizes_carried(good) == {parse_checkpoint(parse_note(newest).text).size}


def test_T38_a_pinned_key_stays_although_the_federation_ca_certifies_another(net: Net) -> None:
    """The CA is honest at the first sight of a peer; what it signs later does not replace a key."""
    net.round(1)
    witness, (_, key, keys) = net.silos["hospital_b"], new_keys()
    pem = CA.issue(keys, "silo", "hospital_a", now=NOW).certificate_pem.decode()
    note = sign_checkpoint(Checkpoint(spiffe("hospital_a"), 50, bytes(32)), key)
    witness.witnessing._follow(pb.PeerLog(certificate_pem=pem, steps=[pb.LogStep(note=note)]))
    assert [peer for peer, _ in witness.refusals()] == [spiffe("hospital_a")]
    with pytest.raises(VerificationError, match="another key"):
        witness.log.pin_peer(spiffe("hospital_a"), key.public_key())
    witness.restart()
    with pytest.raises(VerificationError, match="another key"):
        witness.log.pin_peer(spiffe("hospital_a"), key.public_key())
    witness.log.pin_peer(spiffe("hospital_a"), net.silos["hospital_a"].key.public_key())


def test_T38_a_witness_remembers_over_a_restart_and_only_forwards(net: Net) -> None:
    net.round(1)
    old = {name: silo.log.latest_note for name, silo in net.silos.items()}
    net.round(2)
    witness = net.silos["hospital_b"]
    (path,) = list((witness.folder / "witnessed").glob("spiffe-cardio-net-silo-hospital_a-*"))
    before = path.read_bytes()
    witness.restart()
    assert witness.log.knows(spiffe("hospital_a"))
    step = pb.LogStep(note=old["hospital_a"])
    witness.witnessing._follow(pb.PeerLog(steps=[step]))  # replayed by the relay
    assert path.read_bytes() == before and witness.refusals() == []
    # nobody knows whether the last cosignatures had arrived: they are said once more, and taken without harm
    net.exchange("hospital_b")
    assert len(net.last_sent.countersigned) == 2
    net.exchange("hospital_b")
    assert list(net.last_sent.countersigned) == []
    net.round(3)
    assert path.read_bytes() != before


@pytest.mark.slow
def test_T38_a_silo_that_was_away_catches_up_step_by_step_and_loses_nothing(net: Net) -> None:
    net.round(1)
    present = {name: silo for name, silo in net.silos.items() if name != "hospital_c"}
    for number in range(STEPS_MAX + 1):
        for name, silo in present.items():
            silo.log.append("egress.decision", kind="lora.factors", decision="deny", round=number, direction="egress")
            net.exchange(name)
    net.relay.waiting.discard("hospital_c")
    sizes = []
    for _ in range(4):
        answer = net.exchange("hospital_c")
        sizes.append([len(log.steps) for log in answer.peers])
        assert answer.ByteSize() <= ANSWER_BYTES_MAX
    assert sizes[0] and sizes[-1] == []
    net.settle()
    assert net.silos["hospital_c"].witnessing.count() == 3
    for name in NAMES:
        assert net.silos[name].witnessing.count() == 3


@pytest.mark.parametrize("silos", [32, pytest.param(90, marks=pytest.mark.exhaustive(keep=0))])
def test_T38_many_silos_fit_into_control_messages(tmp_path: Path, silos: int) -> None:
    names = tuple(f"site_{number:02d}" for number in range(silos))
    net = Net(tmp_path, names)
    first, last = net.silos[names[0]], net.silos[names[-1]]
    budget = first.policy.file.budgets.control_message_bytes
    try:
        shown = {name: silo.witnessing.message(same=False) for name, silo in net.silos.items()}
        for name in names[:-1]:  # they show themselves and look at nobody
            with net.store.transaction() as session:
                exchanged(net.relay, session, net.silos[name].peer, shown[name])
        sizes: list[int] = []
        while not sizes or last.name in net.relay.waiting or last.witnessing.owes:
            answer = net.exchange(last.name, same=bool(sizes))
            sizes += [answer.ByteSize(), net.last_sent.ByteSize()]
            assert not fields_at_fault(answer) and not fields_at_fault(net.last_sent)
        assert max(sizes) <= budget and len(sizes) > 2  # more than one answer held
        assert len(last.log.countersigned(last.witnessing.peers)) == silos - 1
        for name in names[1:-1]:  # everybody countersigns the first one's log
            silo = net.silos[name]
            shown[name].countersigned.append(cosign(shown["site_00"].note, spiffe(name), silo.key, int(setting.NOW)))
            with net.store.transaction() as session:
                exchanged(net.relay, session, silo.peer, shown[name])
            first.log.trust_peer(spiffe(name), silo.key.public_key())
        first.log.trust_peer(spiffe(last.name), last.key.public_key())
        answer = net.exchange("site_00", same=True)
        assert answer.ByteSize() <= budget and not fields_at_fault(answer)
        assert first.log.witnesses(1, first.witnessing.peers) == silos - 1
    finally:
        net.close()


def test_T38_the_rounds_of_a_silo_wait_for_as_many_witnesses_as_its_policy_demands(tmp_path: Path) -> None:
    net = Net(tmp_path, min_witnesses=3)
    second = good("round.open", "pubswap").but(round=2)

    def opens(silo: Silo) -> str:
        return second.but(witnesses=silo.witnessing.count()).decided(silo.policy).verdict

    try:
        net.round(1)
        silo = net.silos["hospital_a"]
        assert opens(silo) == "allow"
        silo.log.append("start")
        assert opens(silo) == "allow"  # what came after the last shown checkpoint is the next round's
        net.exchange("hospital_a")
        assert silo.witnessing.count() == 1 and opens(silo) == "deny"  # the coordinator alone
        net.exchange("hospital_b")
        net.exchange("hospital_b", same=True)
        net.exchange("hospital_a", same=True)
        assert silo.witnessing.count() == 2 and opens(silo) == "deny"
        net.settle()
        assert silo.witnessing.count() == 3 and opens(silo) == "allow"
    finally:
        net.close()


def test_T38_an_invented_witness_counts_only_while_its_own_log_is_kept_away(net: Net) -> None:
    """A site alone can make keys and cosign for parties that never saw its log."""
    net.round(1)
    net.close()
    folder = net.folder / "invented"
    with (
        log_of(folder, spiffe("hospital_a"), net.silos["hospital_a"].key) as log,
        log_of(net.folder / "nobody", spiffe("hospital_b"), Ed25519PrivateKey.generate()) as invented,
    ):
        log.trust_peer(spiffe("hospital_b"), invented._key.public_key())
        invented.trust_peer(spiffe("hospital_a"), net.silos["hospital_a"].key.public_key())
        log.append("start")
        invented.take(log.offer(spiffe("hospital_b")), spiffe("hospital_a"))
        log.take(invented.offer(spiffe("hospital_a")), spiffe("hospital_b"))
    assert found(folder, least=1) == [[]]
    (own, _) = verify_logs([folder, net.folder / "hospital_b"], 1)
    assert own["cosigned"] == {} and not own["verified"]


# ---- the guard's loop -----------------------------------------------------------------------------------


def after_a_round(folder: Path, least: int) -> Loop:
    """A guard whose first round is over; the coordinator countersigns, peers do not."""
    text = setting.policy_text().replace("min_witnesses: 1", f"min_witnesses: {least}")
    loop = Loop(folder, setting.policy_of(text))
    loop.offer_plan()
    loop.open_round(adapter=ADAPTER)
    loop.coordinator.says("control.poll", "round.result", loop.ended(), run="run-1", round=1)
    loop.turn()
    return loop


@pytest.mark.parametrize(("least", "opens"), [(1, True), (2, False)])
def test_T38_the_loop_waits_for_witnesses_and_then_goes_on_without_the_round(
    tmp_path: Path, least: int, opens: bool
) -> None:
    loop = after_a_round(tmp_path / "a", least)
    try:
        polls = len(loop.coordinator.bodies("control.poll"))
        loop.clock += 10.0  # of the sixty that it waits
        loop.guard._client.poll_now = True
        loop.guard.turn()
        assert len(loop.coordinator.bodies("control.poll")) == polls + (1 if opens else 0)
        shown = [pb.Checkpoint.FromString(raw).note for _, raw in loop.coordinator.bodies("control.checkpoint")]
        assert len(set(shown)) == 1  # asking again makes no further checkpoint
        loop.show_round(2, codec.sha256_hex(ADAPTER))
        loop.turn()
        assert loop.bench.judge.view.round == (2 if opens else 1)
        abstained = [pb.Abstain.FromString(raw).round for _, raw in loop.coordinator.bodies("control.abstain")]
        assert abstained == ([] if opens else [2])
        denied = [record["reasons"] for record in loop.bench.events("ingress.decision") if record["decision"] == "deny"]
        assert denied == ([] if opens else [["TOO_FEW_WITNESSES"]])
    finally:
        loop.close()


# ---- whose clock is off (T41) ----------------------------------------------------------------------------


def test_T41_the_coordinator_knows_by_how_much_each_silos_clock_differs(tmp_path: Path) -> None:
    with closing(Net(tmp_path, ahead={"hospital_b": 180.0, "hospital_c": -3600.0})) as net:
        net.exchange("hospital_b")
        assert net.relay.clocks == {}  # its countersignature comes with its next checkpoint
        for number in (1, 2):
            net.round(number)
            assert net.relay.clocks == {"hospital_a": 0, "hospital_b": 180, "hospital_c": -3600}


# ---- after a kill anywhere in an exchange, and after an older database ----------------------------------

A, B, C = NAMES


class KilledError(BaseException):
    """The process is gone: nothing in it may catch this and go on."""


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
        exchanged(net.relay, session, silo.peer, sent)
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


@pytest.mark.exhaustive(keep=1)  # each case kills at every point of an exchange
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


@pytest.mark.slow
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


@pytest.mark.quick(keep=2)
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
