"""One real coordinator process core on a loopback port: mutual TLS, one exchange, and the control socket."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from coordinator.config import load_config
from coordinator.main import Coordinator, Ready, check
from coordinator.server import FederationService
from fedsilo.control.client import ControlClient, Operator, sign_as
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.files.identity_files import load_identity
from fedsilo.files.task_files import read_tasks
from fedsilo.protocol import codec, services
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.envelope import seal
from fedsilo.protocol.errors import ConflictError, FedSiloError, NotAllowedError, UnreachableError
from fedsilo.protocol.place import Place
from tests.coordinator_folder import write_coordinator
from tests.policies.setting import HASH, SCHEMA

SILOS = ("hospital_a", "hospital_b", "hospital_c", "hospital_d")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CAs, the coordinator's folder and one silo's, plus one silo of a foreign federation CA."""
    folder = tmp_path_factory.mktemp("fs")
    init_ca(folder / "ca", name="cardio-net", kind="federation")
    init_ca(folder / "foreign_ca", name="cardio-net", kind="federation")
    people: dict[str, Any] = {"alice": ["operator"], "victor": ["viewer"]}
    provision_site(folder / "main", site="main", federation_ca=folder / "ca", people=people, is_coordinator=True)
    public_key = (folder / "main" / "id" / "coordinator.pub").read_bytes()
    for place, authority in (("hospital_a", "ca"), ("hospital_b", "foreign_ca")):
        provision_site(
            folder / place,
            site=place,
            federation_ca=folder / authority,
            people={},
            coordinator_public_key=public_key,
        )
    write_coordinator(folder / "main", SILOS)
    return folder


@pytest.fixture(scope="module")
def ready(site: Path) -> Iterator[Ready]:
    with (
        Coordinator(check(load_config(site / "main" / "coordinator.yaml"))) as coordinator,
        coordinator.serving() as up,
    ):
        worker = threading.Thread(target=coordinator.work)
        worker.start()
        yield up
        coordinator.request_stop()
        worker.join()


def exchange(site: Path, ready: Ready, silo: str, kind: str, body: Any, sequence: int) -> tuple[pb.Envelope, bytes]:
    files = site / silo / "id"
    identity = load_identity(
        files / f"{silo}.crt",
        files / f"{silo}.key",
        files / f"{silo}.ed25519",
        files / "federation_ca.crt",
        role="silo",
    )
    payload = codec.encode(body)
    envelope = seal(
        Place("", 0, 0, kind), codec.sha256_hex(payload), federation="cardio-net", attempt=1,
        sender=identity.spiffe_id, sequence=sequence, key=identity.signing_key,
    )  # fmt: skip
    root = (site / "main" / "id" / "federation_ca.crt").read_bytes()
    credentials = grpc.ssl_channel_credentials(root, identity.key_pem, identity.certificate_pem)
    with grpc.secure_channel(ready.address, credentials) as channel:
        call = channel.stream_stream(
            services.EXCHANGE,
            request_serializer=codec.frame_bytes,
            response_deserializer=pb.Frame.FromString,
        )
        frames = list(call(codec.frames(envelope, payload), timeout=20))
    return frames[0].opening.envelope, b"".join(frame.chunk for frame in frames[1:])


def hello(site: Path, **changes: Any) -> pb.Hello:
    public = read_tasks(site / "main" / "public.jsonl").sha256
    fields: dict[str, Any] = {
        "protocol_min": services.PROTOCOL_VERSION, "protocol_max": services.PROTOCOL_VERSION, "min_updates": 2,
        "base_model_sha256": HASH["base"], "tokenizer_sha256": HASH["tokenizer"], "template_sha256": HASH["template"],
        "load": "fp32", "lora_schema_sha256": SCHEMA.digest, "public_set_sha256": public,
        "held_out_sha256": HASH["held"], "code_sha256": "c0" * 32, "isolation": "namespaces",
        "role": "member",
    }  # fmt: skip
    return pb.Hello(**{**fields, **changes})


def test_hello_over_mutual_tls_and_what_the_control_socket_shows_of_it(site: Path, ready: Ready) -> None:
    envelope, payload = exchange(site, ready, "hospital_a", "control.hello", hello(site, load="bf16"), 1)
    refusal = codec.decode(pb.Refusal, payload)
    assert (envelope.kind, refusal.code, refusal.expected, refusal.got) == (
        "control.refusal", "LOAD_MISMATCH", "fp32", "bf16",
    )  # fmt: skip
    envelope, _ = exchange(site, ready, "hospital_a", "control.hello", hello(site), 2)
    assert envelope.kind == "control.ack"
    with ControlClient(Path(ready.control_socket)) as client:
        states = {row["silo"]: row["state"] for row in client.query("silos")}
        assert states == {
            "hospital_a": "joined",
            "hospital_b": "absent",
            "hospital_c": "absent",
            "hospital_d": "absent",
        }
        names = []
        for event in client.watch(0):
            names.append(event.name)
            if event.name == "silo.joined":
                break
        assert "silo.refused" in names
        assert client.snapshot().state["address"] == ready.address


def test_T28_a_certificate_of_another_ca_gets_no_connection(site: Path, ready: Ready) -> None:
    with pytest.raises((grpc.RpcError, FedSiloError)):
        exchange(site, ready, "hospital_b", "control.hello", hello(site), 1)


def test_T26_T41_a_certificate_that_has_expired_stays_expired_when_the_clock_goes_back(
    site: Path, tmp_path: Path
) -> None:
    config = load_config(site / "main" / "coordinator.yaml")
    own = config.model_copy(
        update={"state_dir": tmp_path, "control": config.control.model_copy(update={"socket": tmp_path / "c.sock"})}
    )
    passed, back = [0.0], [0.0]
    with (
        Coordinator(
            check(own), clock=lambda: time.time() + passed[0] - back[0], running=lambda: time.monotonic() + passed[0]
        ) as coordinator,
        coordinator.serving() as up,
    ):
        envelope, _ = exchange(site, up, "hospital_a", "control.heartbeat", pb.Heartbeat(), 1)
        assert envelope.kind == "control.ack"
        before = coordinator.now()
        passed[0] = 50 * 365 * 86400.0
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            exchange(site, up, "hospital_a", "control.heartbeat", pb.Heartbeat(), 2)
        back[0] = passed[0]
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            exchange(site, up, "hospital_a", "control.heartbeat", pb.Heartbeat(), 3)
        assert (coordinator.now() - before).days > 49 * 365


@pytest.mark.parametrize(("versions", "taken"), [(("TLSv1.3",), True), (("TLSv1.2",), False), ((), False)])
def test_T25_a_call_whose_tls_version_is_not_known_to_be_1_3_is_refused(
    site: Path, versions: tuple[str, ...], taken: bool
) -> None:
    service = FederationService(
        cast(Any, None), cast(Any, None), trust_root_pem=(site / "main" / "id" / "federation_ca.crt").read_bytes(),
        limits=load_config(site / "main" / "coordinator.yaml").limits, now=lambda: datetime.now(UTC),
        monotonic=time.monotonic,
    )  # fmt: skip
    properties: dict[str, list[bytes]] = {"x509_pem_cert": [(site / "hospital_a/id/hospital_a.crt").read_bytes()]}
    if versions:
        properties["ssl_tls_version"] = [version.encode() for version in versions]
    context: Any = SimpleNamespace(auth_context=lambda: properties, peer=lambda: "ipv4:127.0.0.1:1")
    if taken:
        assert service._peer(context).name == "hospital_a"
    else:
        with pytest.raises(NotAllowedError, match=r"TLSv1\.3 is required"):
            service._peer(context)


def test_T25_plaintext_and_no_certificate_are_refused(site: Path, ready: Ready) -> None:
    root = (site / "main" / "id" / "federation_ca.crt").read_bytes()
    for channel in (
        grpc.insecure_channel(ready.address),
        grpc.secure_channel(ready.address, grpc.ssl_channel_credentials(root)),
    ):
        with channel:
            call = channel.stream_stream(
                services.EXCHANGE,
                request_serializer=codec.frame_bytes,
                response_deserializer=pb.Frame.FromString,
            )
            with pytest.raises(grpc.RpcError):
                list(call(iter([pb.Frame(chunk=b"x")]), timeout=5))


def test_a_run_is_submitted_by_an_operator_and_by_nobody_less(site: Path, ready: Ready) -> None:
    text = (
        "method: pubswap\nrounds: 1\nlocal_steps: 2\nseed: 1\nprompts_per_step: 3\nsamples_per_prompt: 4\n"
        "rollout: {max_new_tokens: 32}\n"
    )
    files = site / "main" / "id"
    with ControlClient(Path(ready.control_socket)) as client:
        viewer = Operator("main", files / "victor.crt", files / "victor.key", "cardio-net")
        with pytest.raises(NotAllowedError):
            client.execute(sign_as(viewer, "run.submit", {"text": text}))
        operator = Operator("main", files / "alice.crt", files / "alice.key", "cardio-net")
        command = sign_as(operator, "run.submit", {"text": text})
        assert client.execute(command)["run"] == "run-1"
        assert client.execute(command)["run"] == "run-1"  # the same request again is the same request
        assert [run["state"] for run in client.query("runs")] == ["waiting"]
        assert client.execute(sign_as(operator, "run.abort", {"run": "run-1"}))["state"] == "aborted"


def test_a_port_in_use_is_named(site: Path, ready: Ready, tmp_path: Path) -> None:
    config = load_config(site / "main" / "coordinator.yaml")
    taken = config.model_copy(
        update={
            "listen": ready.address,
            "state_dir": tmp_path,
            "control": config.control.model_copy(update={"socket": tmp_path / "c.sock"}),
        }
    )
    with Coordinator(check(taken)) as second, pytest.raises(ConflictError, match=str(ready.port)), second.serving():
        pass
    with pytest.raises(ConflictError, match="held by process"), Coordinator(check(config)):
        pass


@pytest.mark.slow
def test_the_command_prints_one_ready_line_and_ends_cleanly_on_sigterm(site: Path, tmp_path: Path) -> None:
    config = (site / "main" / "coordinator.yaml").read_text().replace("state_dir: state", f"state_dir: {tmp_path}")
    place = site / "main" / "other.yaml"
    place.write_text(config)
    program = "from fedsilo.cli.coordinator import app; app()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "start", "--config", str(place), "--json"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        data = json.loads(process.stdout.readline())["data"]
        with ControlClient(Path(data["control_socket"])) as client:
            assert client.snapshot().state["address"] == f"127.0.0.1:{data['port']}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout.read() == ""
    assert not Path(data["control_socket"]).exists()


def test_nobody_behind_the_socket_is_said_so(tmp_path: Path) -> None:
    with ControlClient(tmp_path / "none.sock") as client, pytest.raises(UnreachableError, match="does not exist"):
        client.snapshot()
