"""T8: an exception whose text holds a canary, raised in every handler that somebody can call, and all that the caller
gets of it: no canary, in whatever a gRPC call gives back, of the RPC of silos as of both control sockets.

What this does not cover: the text of a refusal (`FedSiloError`) on a control socket. That socket is the site's own, and
its operators are to read why their command failed; the canary of an exception that nobody thought of is not for them
either.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from certs.authority import create_ca
from certs.commands import sign_command
from certs.encoding import private_key_pem
from certs.identity import Identity, peer_identity
from certs.names import coordinator_dns_name
from certs.roles import ACTIONS, Roles
from coordinator import server
from coordinator.config import Limits
from coordinator.control import Control
from fedsilo.control.server import ControlServer
from fedsilo.control.socket_server import WATCHERS_MAX, ControlSocket, NoSlotError
from fedsilo.protocol import codec, services
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, NotAllowedError, OperationError, PeerError, WireCode
from silo.guard.screens import Rescreening
from tests.policies import setting
from tests.security.people import new_keys
from tests.simulated.coordinator_parts import FEDERATION, House, SimulatedSilo, hello
from tests.world import Loop

CANARY = "patient-zero-71c2"
LIMIT_SECONDS = 20.0
NOW = datetime.now(UTC)
CA = create_ca(FEDERATION, kind="federation", not_before=NOW - timedelta(days=1), days=30)
SITE_CA = create_ca("hospital_a", kind="site", not_before=NOW - timedelta(days=1), days=30)


class Unforeseen(Exception):
    """Of no type that any handler knows."""


def unforeseen() -> Exception:
    error = Unforeseen(f"the answer was {CANARY}")
    error.__cause__ = ValueError(CANARY)
    error.add_note(CANARY)
    return error


def operation() -> Exception:
    return OperationError(f"cannot write {CANARY}", hint=f"see {CANARY}", code="DISK_FULL")


FAULTS = {
    "unforeseen": (unforeseen, grpc.StatusCode.INTERNAL),
    "key": (lambda: KeyError(CANARY), grpc.StatusCode.INTERNAL),
    "operation": (operation, grpc.StatusCode.UNAVAILABLE),
    "conflict": (lambda: ConflictError(CANARY, hint=CANARY), grpc.StatusCode.UNAVAILABLE),
    "not-allowed": (lambda: NotAllowedError(CANARY, hint=CANARY), grpc.StatusCode.UNAUTHENTICATED),
    "too-many": (lambda: NoSlotError(CANARY), grpc.StatusCode.RESOURCE_EXHAUSTED),
}


def raising(make: Callable[[], Exception]) -> Callable[..., Any]:
    def fails(*_: Any, **__: Any) -> Any:
        raise make()

    return fails


def everything_told(error: grpc.RpcError) -> str:
    """All that a call gives its caller besides messages. The caller's own account of the address is in it, too."""
    call: Any = error
    return repr(
        (call.details(), call.initial_metadata(), call.trailing_metadata(), call.debug_error_string(), str(call))
    )


# ---- the RPC of silos ----------------------------------------------------------------------------------------


@dataclass
class Served:
    house: House
    silo: SimulatedSilo
    service: server.FederationService
    call: Any

    def say(self, kind: str, body: Any, *, run: str = "", number: int = 0) -> bytes:
        """One exchange; the bytes of all frames that came back. Raises grpc.RpcError."""
        payload = codec.encode(body)
        envelope = self.silo.envelope(kind, payload, run=run, number=number)
        frames = [pb.Frame(opening=pb.Opening(envelope=envelope, payload_bytes=len(payload)))]
        frames += [pb.Frame(chunk=payload)] if payload else []
        return b"".join(frame.SerializeToString() for frame in self.call(iter(frames), timeout=LIMIT_SECONDS))


def identity_of(role: str) -> Identity:
    tls_key, signing_key, keys = new_keys()
    if role == "silo":
        issued = CA.issue(keys, "silo", "hospital_a", now=NOW)
    else:
        issued = CA.issue(keys, "coordinator", "main", dns_names=[], ip_addresses=["127.0.0.1"], now=NOW)
    peer = peer_identity(issued.certificate_pem, CA.certificate_pem, NOW, role=role)  # type: ignore[arg-type]
    return Identity(
        peer.spiffe_id, issued.certificate_pem, private_key_pem(tls_key), signing_key, CA.certificate_pem, peer
    )


@pytest.fixture(scope="module")
def identities() -> tuple[Identity, Identity]:
    return identity_of("coordinator"), identity_of("silo")


@pytest.fixture
def served(tmp_path: Path, identities: tuple[Identity, Identity]) -> Iterator[Served]:
    ours, theirs = identities
    house = House(tmp_path / "house")
    silo = SimulatedSilo(house, "hospital_a")
    silo.key = theirs.signing_key
    service = server.FederationService(
        house.driver, house.blobs, trust_root_pem=CA.certificate_pem, limits=Limits(), now=lambda: datetime.now(UTC),
        monotonic=house.clock,
    )  # fmt: skip
    listening, port = server.federation_server(service, ours, "127.0.0.1:0", silos=4, limits=Limits())
    listening.start()
    credentials = grpc.ssl_channel_credentials(CA.certificate_pem, theirs.key_pem, theirs.certificate_pem)
    options = [("grpc.ssl_target_name_override", coordinator_dns_name(FEDERATION))]
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        call = channel.stream_stream(
            services.EXCHANGE, request_serializer=pb.Frame.SerializeToString, response_deserializer=pb.Frame.FromString
        )
        yield Served(house, silo, service, call)
    listening.stop(None).wait()
    house.close()


# Where an exchange can fail, in the order in which it passes there.
PLACES: dict[str, Callable[[Served], tuple[Any, str]]] = {
    "who calls": lambda served: (served.service, "_peer"),
    "the opening": lambda served: (served.house.driver.dependencies.ingress, "admit"),
    "the parsing": lambda served: (served.house.driver.dependencies.ingress, "parse"),
    "the verdict": lambda served: (served.house.driver.dependencies.ingress, "judge"),
    "the record": lambda served: (served.house.driver, "_record"),
    "the effect": lambda served: (served.house.driver.services, "carry_out"),
    "the reply": lambda served: (served.house.driver, "seal"),
    "the whole": lambda served: (served.house.driver, "receive"),
}
EFFECTS: dict[str, tuple[str, Any, str]] = {
    "control.hello": ("_welcome", hello(), ""),
    "control.poll": ("_acknowledge", pb.Poll(), ""),
    "control.fetch": ("_adapter", pb.Fetch(digest="0" * 64), "run-1"),
    "control.abstain": ("_run_of", pb.Abstain(), "run-1"),
    "control.declined": ("_run_of", pb.Declined(kind="lora.factors", round=1), "run-1"),
}


@pytest.mark.exhaustive(keep=12)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", PLACES)
def test_T08_whatever_fails_in_an_exchange_leaves_as_a_bare_status(
    served: Served, monkeypatch: pytest.MonkeyPatch, place: str, fault: str
) -> None:
    assert b"control.ack" in served.say("control.heartbeat", pb.Heartbeat())  # the counterpart
    make, code = FAULTS[fault]
    monkeypatch.setattr(*PLACES[place](served), raising(make))
    with pytest.raises(grpc.RpcError) as caught:
        served.say("control.heartbeat", pb.Heartbeat())
    call: Any = caught.value
    assert (call.code(), call.details()) == (code, "")
    assert CANARY not in everything_told(caught.value)


@pytest.mark.exhaustive(keep=4)
@pytest.mark.parametrize("kind", EFFECTS)
@pytest.mark.parametrize("fault", ["unforeseen", "operation"])
def test_T08_no_handler_of_a_kind_tells_what_failed_in_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, kind: str, fault: str
) -> None:
    served.house.submit()
    for name in ("hospital_a", "hospital_b", "hospital_c", "hospital_d"):
        (served.silo if name == "hospital_a" else SimulatedSilo(served.house, name)).join()
    name, body, run = EFFECTS[kind]
    make, code = FAULTS[fault]
    monkeypatch.setattr(served.house.driver.services, name, raising(make))
    with pytest.raises(grpc.RpcError) as caught:
        served.say(kind, body, run=run, number=getattr(body, "round", 0))
    call: Any = caught.value
    assert (call.code(), call.details()) == (code, "")
    assert CANARY not in everything_told(caught.value)


@pytest.mark.parametrize("place", ["the opening", "the parsing", "the verdict", "the effect"])
def test_T08_a_refusal_carries_its_code_and_none_of_its_words(
    served: Served, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def refuses(*_: Any) -> Any:
        raise PeerError(WireCode.MALFORMED, f"it says {CANARY}", hint=CANARY)

    monkeypatch.setattr(*PLACES[place](served), refuses)
    answered = served.say("control.heartbeat", pb.Heartbeat())
    assert b"control.refusal" in answered and b"MALFORMED" in answered and CANARY.encode() not in answered


# ---- the control sockets -------------------------------------------------------------------------------------


@dataclass
class Socket:
    desk: ControlServer
    path: Path
    sign: Callable[[str, str], control_pb2.Command]

    def calls(self) -> dict[str, Callable[[Any], Any]]:
        """Every RPC of the service, as somebody may call it."""
        return {
            "Snapshot": lambda rpc: rpc(control_pb2.SnapshotRequest(), timeout=LIMIT_SECONDS),
            "Watch": lambda rpc: list(rpc(control_pb2.WatchRequest(), timeout=LIMIT_SECONDS)),
            "Query": lambda rpc: rpc(control_pb2.QueryRequest(name="any"), timeout=LIMIT_SECONDS),
            "Execute": lambda rpc: rpc(control_pb2.Command(name="any"), timeout=LIMIT_SECONDS),
        }

    def call(self, name: str, use: Callable[[Any], Any]) -> Any:
        request, reply, streams = services.CONTROL_METHODS[name]  # type: ignore[index]
        with grpc.insecure_channel(f"unix:{self.path}") as channel:
            make: Any = channel.unary_stream if streams else channel.unary_unary
            return use(
                make(
                    f"/{services.CONTROL_SERVICE}/{name}", request_serializer=request.SerializeToString,
                    response_deserializer=reply.FromString,
                )
            )  # fmt: skip


@pytest.fixture(scope="module")
def operator() -> tuple[Any, bytes]:
    tls_key, _, keys = new_keys(signing=False)
    return tls_key, SITE_CA.issue(keys, "operator", "alice", now=NOW).certificate_pem


@pytest.fixture(params=["silo", "coordinator"])
def socket(request: pytest.FixtureRequest, tmp_path: Path, operator: tuple[Any, bytes]) -> Iterator[Socket]:
    """The desk of a real guard, or of a real coordinator, with all that they register, behind its real server."""
    everything = frozenset().union(*ACTIONS.values())
    roles = Roles("hospital_a", {"alice": everything})
    desk = ControlServer("hospital_a", SITE_CA.certificate_pem, roles, lambda: datetime.now(UTC))
    path = tmp_path / "c.sock"
    with contextlib.ExitStack() as stack:
        if request.param == "silo":
            loop = Loop(tmp_path / "a", setting.policy_of(setting.policy_text()))
            stack.callback(loop.close)
            loop.guard._archive = loop.bench.archive
            loop.guard.register(desk)
            Rescreening(loop.bench.ledger, loop.bench.audit, loop.bench.screens).register(desk, loop.guard.on_loop)
        else:
            house = House(tmp_path / "house")
            stack.callback(house.close)
            config: Any = None  # it is for what the handlers show, and none of them gets that far
            Control(desk, house.driver, house.submissions, config, config, house.policy.digest)
        listening = ControlSocket(desk, path, "no-such-group", log=logging.getLogger()).start()
        stack.callback(listening.close)
        key, certificate = operator

        def sign(name: str, request_id: str) -> control_pb2.Command:
            return sign_command(
                site="hospital_a", name=name, arguments={}, request_id=request_id, operator_key=key,
                expires=datetime.now(UTC) + timedelta(minutes=5), operator_certificate_pem=certificate,
            )  # fmt: skip

        yield Socket(desk, path, sign)


@pytest.mark.parametrize("method", list(services.CONTROL_METHODS))
def test_T08_no_rpc_of_a_control_socket_tells_what_failed_in_it(
    socket: Socket, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    within = {"Snapshot": "snapshot", "Watch": "events_since", "Query": "query", "Execute": "execute"}[method]
    for fault in ("unforeseen", "key"):
        monkeypatch.setattr(socket.desk, within, raising(FAULTS[fault][0]))
        with pytest.raises(grpc.RpcError) as caught:
            socket.call(method, socket.calls()[method])
        call: Any = caught.value
        assert (call.code(), call.details()) == (grpc.StatusCode.INTERNAL, "")
        assert CANARY not in everything_told(caught.value)


@pytest.mark.parametrize("watches", [20, WATCHERS_MAX + 8])
def test_T24_people_are_heard_however_many_watch(socket: Socket, watches: int) -> None:
    socket.desk.publish("seen", {})
    request, reply, _ = services.CONTROL_METHODS["Watch"]
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{socket.path}"))
        watch: Any = channel.unary_stream(
            f"/{services.CONTROL_SERVICE}/Watch", request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )  # fmt: skip
        # longer than an order may take: one that has to wait for a watch to end fails
        streams = [watch(control_pb2.WatchRequest(), timeout=4 * LIMIT_SECONDS) for _ in range(watches)]
        for stream in streams:
            stack.callback(stream.cancel)
        refused = 0  # which of them that are is the threads' to say
        for stream in streams:
            try:
                assert next(stream).name == "seen"
            except grpc.RpcError:
                assert (stream.code(), stream.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "")
                refused += 1
        assert refused == max(0, watches - WATCHERS_MAX)
        order = socket.sign("no.such.command", "request-1")
        answer = socket.call("Execute", lambda rpc: rpc(order, timeout=LIMIT_SECONDS))
        assert answer.error_code == "NOT_FOUND"
        assert socket.call("Query", socket.calls()["Query"]).error_code == "NOT_FOUND"


def test_T08_no_query_and_no_command_tells_what_nobody_foresaw(socket: Socket) -> None:
    queries, commands = dict(socket.desk._queries), dict(socket.desk._commands)
    assert len(queries) >= 4 and len(commands) >= 5
    told: list[str] = []
    for name in queries:
        socket.desk._queries[name] = raising(unforeseen)
        with pytest.raises(grpc.RpcError) as caught:
            socket.call("Query", lambda rpc, name=name: rpc(control_pb2.QueryRequest(name=name)))  # type: ignore[misc]
        told.append(everything_told(caught.value))
    for number, (name, command) in enumerate(commands.items()):
        socket.desk._commands[name] = type(command)(command.action, raising(unforeseen), command.by_clock)
        signed = socket.sign(name, f"request-{number:04d}")
        with pytest.raises(grpc.RpcError) as caught:
            socket.call("Execute", lambda rpc, signed=signed: rpc(signed))  # type: ignore[misc]
        told.append(everything_told(caught.value))
    assert len(told) == len(queries) + len(commands)
    assert all("StatusCode.INTERNAL" in each for each in told)
    assert not [each for each in told if CANARY in each]
