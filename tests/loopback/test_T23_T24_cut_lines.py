"""A silo's gate and a coordinator's server over mTLS, and between them a proxy that does what networks do to a large
message: it arrives once, decided once and counted once, and what was across is not sent again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from sqlalchemy import select

from certs.authority import CertificateAuthority, create_ca
from certs.encoding import private_key_pem
from certs.enrolment import EnrolmentKeys
from certs.identity import Identity, peer_identity
from coordinator import store as db
from coordinator.blobs import PLACES
from coordinator.config import Limits
from coordinator.server import FederationService, federation_server
from fedsilo.audit.reader import read_lines
from fedsilo.files.durable import PartialFile
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UnreachableError
from policies.schema import LoraSchema
from silo.guard import channel
from silo.guard.channel import GrpcChannel
from silo.guard.messages import Allowed, Inbound, TlsFiles
from tests.loopback.cutting_proxy import CuttingProxy, Fault
from tests.policies.setting import SCHEMA, policy_of, policy_text
from tests.security.people import new_keys
from tests.simulated.coordinator_parts import RUN_YAML, SILOS, House, SimulatedSilo, until_quiet
from tests.world import COORDINATOR_KEY, OUR_KEY, Bench

MIB = 1 << 20
CUT_AT = 6 * MIB
# Bytes of TLS records, HTTP/2 frames, protobuf and a handshake beside the payload: about 6 KiB and a thousandth.
OVERHEAD_BYTES = 64 << 10
LARGE = LoraSchema(
    base_model_sha256=SCHEMA.base_model_sha256, rank=2, alpha=4.0, dtype="float32", targets="all-linear",
    tensors=(
        ("model.layers.0.self_attn.q_proj.lora_A", (2, 1 << 19)),
        ("model.layers.0.self_attn.q_proj.lora_B", (1 << 19, 2)),
    ),
)  # fmt: skip


class Place:
    """A coordinator in an open round, a silo of it behind its real gate and channel, and the proxy between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = datetime.now(UTC)
        self.authority = create_ca("cardio-net", kind="federation", not_before=self.now - timedelta(days=1), days=30)
        self.policy = policy_of(policy_text(schema=LARGE))
        self.house = House(folder / "house", schema=LARGE, policy=self.policy, key=COORDINATOR_KEY)
        self.service, self.server, port = self._served()
        self.proxy = CuttingProxy(port)
        files = self._files(self.authority)
        self.channel = GrpcChannel(f"127.0.0.1:{self.proxy.port}", files)
        self.files = files
        self._open_round()
        self.bench = self._gate(Bench(folder / "silo", self.policy, channel=self.channel, schema=LARGE))  # type: ignore[arg-type]

    def _served(self) -> tuple[FederationService, grpc.Server, int]:
        tls_key, signing_key, keys = new_keys()
        own = self.authority.issue(keys, "coordinator", "main", dns_names=[], ip_addresses=["127.0.0.1"], now=self.now)
        root = self.authority.certificate_pem
        identity = Identity(
            own.spiffe_id, own.certificate_pem, private_key_pem(tls_key), signing_key, root,
            peer_identity(own.certificate_pem, root, self.now, role="coordinator"),
        )  # fmt: skip
        limits = Limits()
        service = FederationService(
            self.house.driver, self.house.blobs, trust_root_pem=root, limits=limits, now=lambda: datetime.now(UTC),
            monotonic=self.house.clock,
        )  # fmt: skip
        server, port = federation_server(service, identity, "127.0.0.1:0", silos=len(SILOS), limits=limits)
        server.start()
        return service, server, port

    def _files(self, authority: CertificateAuthority) -> TlsFiles:
        tls_key, _, _ = new_keys()
        signed = authority.issue(
            EnrolmentKeys(tls_key.public_key(), OUR_KEY.public_key()), "silo", "hospital_a", now=self.now
        )
        files = TlsFiles(*(self.folder / name for name in ("silo.crt", "silo.key", "ca.crt")))
        files.certificate.write_bytes(signed.certificate_pem)
        files.key.write_bytes(private_key_pem(tls_key))
        files.trust_root.write_bytes(authority.certificate_pem)
        return files

    def _open_round(self) -> None:
        self.silos = [SimulatedSilo(self.house, name) for name in SILOS]
        ours = self.silos[0]
        ours.key, ours.peer = OUR_KEY, replace(ours.peer, signing_public_key=OUR_KEY.public_key())
        for silo in self.silos:
            silo.mute = {"lora.factors", "metrics.eval"}
            silo.join()
        self.house.submit(RUN_YAML)
        until_quiet(self.silos)

    def _gate(self, bench: Bench) -> Bench:
        """A guard that stands where the silo stands in its round."""
        ours = self.silos[0]
        assert ours.plan is not None
        self.base = ours.state.base_digest
        for run, sent in ours.sequences.items():
            while run in ("", "run-1") and bench.ledger.next_sequence(run) < sent:
                pass
        bench.judge.view = replace(bench.judge.view, plan=ours.plan, base_digest=self.base, base_l2=1.0)
        return bench

    def allowed(self) -> Allowed:
        offered = self.bench.factors(self.silos[0].delta(1), base=self.base)
        assert isinstance(offered, Allowed), offered.decision.explain()
        return offered

    def held(self) -> int:
        """What the coordinator has of the upload that was cut, once it has noticed."""
        line = self.service.uploads
        with line._changed:
            assert line._changed.wait_for(lambda: not line._queue, 60.0)
        [partial] = self.house.blobs.arriving.iterdir()
        return partial.stat().st_size

    def restart_silo(self) -> None:
        self.bench.close()
        self.channel.close()
        self.channel = GrpcChannel(f"127.0.0.1:{self.proxy.port}", self.files)
        self.bench = self._gate(replace(self.bench, channel=self.channel))  # type: ignore[arg-type]

    def restart_coordinator(self) -> None:
        """As after a kill: another process's memory, on the same folder."""
        self.server.stop(0).wait()
        self.house.close()
        self.house = House(self.folder / "house", self.house.clock, self.policy, LARGE, COORDINATOR_KEY)
        self.service, self.server, self.proxy.upstream_port = self._served()

    def close(self) -> None:
        self.channel.close()
        self.server.stop(0).wait()
        self.bench.close()
        self.house.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    with made.proxy:
        yield made
        made.close()


def arrived_once(place: Place, digest: str) -> None:
    uploads = select(db.Upload.digest).where(db.Upload.silo == "hospital_a", db.Upload.kind == "lora.factors")
    assert place.house.rows(lambda session: session.scalars(uploads).all()) == [digest]
    marks = (b'"ingress.decision"', b'"lora.factors"')
    lines = [line for _, line in read_lines(place.house.folder / "audit") if all(mark in line for mark in marks)]
    assert len(lines) == 1
    assert list(place.house.blobs.arriving.iterdir()) == []
    # one decision of the gate, one counted message; then what became of each try
    decisions = [record for record in place.bench.events("egress.decision") if record["kind"] == "lora.factors"]
    assert [record["decision"] for record in decisions] == ["allow"]
    assert [len(place.bench.events(f"egress.{name}")) for name in ("indeterminate", "sent", "acked")] == [1, 1, 1]


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize(
    ("fault", "died"),
    [
        (Fault("cut", CUT_AT, connections=1), ""),
        (Fault("halve", CUT_AT, connections=1), "silo"),
        (Fault("stall", CUT_AT), ""),
        (Fault("throttle", CUT_AT, amount=1.0), "coordinator"),
    ],
    ids=["cut", "halved-and-silo-killed", "half-open", "a-byte-a-second-and-coordinator-killed"],
)
def test_T11_T23_T24_a_cut_upload_goes_on_over_mtls(place: Place, fault: Fault, died: str) -> None:
    allowed = place.allowed()
    total = len(allowed.payload)
    counted = place.bench.ledger.book
    place.proxy.fault = fault
    failed = Failing(place, allowed)
    if fault.kind in ("stall", "throttle"):
        assert place.proxy.struck.wait(30.0)
        failed.until_slow()
    assert isinstance(failed.error(), UnreachableError)
    held = place.held()  # a reset takes with it what was on its way
    assert MIB <= held < CUT_AT
    place.proxy.heal()
    [item] = place.bench.ledger.outbox("allowed")
    if died == "silo":
        place.restart_silo()
    elif died:
        place.restart_coordinator()
    sent = place.bench.gate.retry(item)
    assert isinstance(sent.body, pb.Ack)
    assert total - held < place.proxy.passed["up"] < total - held + OVERHEAD_BYTES
    assert place.bench.ledger.outbox("allowed") == [] and place.bench.ledger.book == counted
    arrived_once(place, allowed.digest)


@pytest.mark.slow
def test_T24_a_large_messages_time_begins_when_it_may_come_and_ends_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    class Timer(threading.Timer):
        def start(self) -> None:
            begun.set()
            super().start()

    monkeypatch.setattr(channel.threading, "Timer", Timer)
    allowed, uploads = place.allowed(), place.service.uploads
    sent: list[Inbound] = []
    with ExitStack() as stack:
        for number in range(PLACES):
            stack.enter_context(uploads.turn(f"other_{number}", is_active=lambda: True, cut=lambda: None))
        sending = threading.Thread(target=lambda: sent.append(place.bench.gate.transmit(allowed)))
        sending.start()
        with uploads._changed:
            assert uploads._changed.wait_for(lambda: uploads.waiting == 1, 30.0)
        assert not begun.is_set()
    sending.join(60.0)
    assert begun.is_set() and isinstance(sent[0].body, pb.Ack)


@pytest.mark.slow
def test_T24_a_line_on_which_a_large_message_stands_still_is_given_up_by_the_silo_too(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "EXCHANGE_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(channel, "BYTES_PER_SECOND_MIN", 10**12)
    allowed = place.allowed()
    place.proxy.fault = Fault("stall", CUT_AT)
    assert isinstance(Failing(place, allowed).error(), UnreachableError)
    place.proxy.heal()
    monkeypatch.undo()
    [item] = place.bench.ledger.outbox("allowed")
    assert isinstance(place.bench.gate.retry(item).body, pb.Ack)


class Failing:
    """An upload that will not come to its end, in a thread."""

    def __init__(self, place: Place, allowed: Allowed) -> None:
        self._place, self._allowed = place, allowed
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        try:
            self._place.bench.gate.transmit(self._allowed)
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            self._error = error

    def until_slow(self) -> None:
        """Let the coordinator's time pass, which is a hand's, until it has ended the call."""
        while self._thread.is_alive():
            self._place.house.clock.seconds += 121.0
            self._place.service.watchdog.look()
            self._thread.join(0.05)

    def error(self) -> BaseException | None:
        self._thread.join(60.0)
        assert not self._thread.is_alive()
        return self._error


@pytest.mark.slow
def test_T24_a_delayed_line_is_only_slow(place: Place) -> None:
    place.proxy.fault = Fault("delay", amount=0.005)
    allowed = place.allowed()
    assert isinstance(place.bench.gate.transmit(allowed).body, pb.Ack)
    assert place.proxy.struck.is_set() and place.proxy.passed["up"] > len(allowed.payload)


_WRITES = """
import os, signal, sys
from pathlib import Path
from fedsilo.files import durable
durable.FLUSHED_BYTES = 1000
file = durable.PartialFile(Path(sys.argv[1]), whole_bytes=10_000)
for at in range(0, int(sys.argv[2]), 100):
    file.write(bytes([at // 100]) * 100)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("written", [2500, 2000, 900])
def test_T23_after_kill_9_all_that_was_written_is_gone_on_with(tmp_path: Path, written: int) -> None:
    path = tmp_path / "a.partial"
    done = subprocess.run([sys.executable, "-c", _WRITES, str(path), str(written)], check=False)
    assert done.returncode == -signal.SIGKILL and path.stat().st_size == written
    file = PartialFile(path, whole_bytes=10_000)
    expected = b"".join(bytes([at // 100]) * 100 for at in range(0, written, 100))
    assert (file.size_bytes, file.digest) == (written, codec.sha256_hex(expected))
    file.close()
    assert path.read_bytes() == expected
