"""The one gRPC client of the control API, which consoles and commands use to read a daemon and to send it commands.

Reading needs no more than access to the socket. A change is a command that the caller has signed with a person's key
(`sign_as`); the daemon verifies it, not the socket.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from certs.commands import sign_command
from fedsilo.control.dry_run import Signing, would_sign
from fedsilo.control.server import raise_for_reply
from fedsilo.files.identity_files import load_operator
from fedsilo.protocol import services
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.clocks import CERTIFICATE_TIME, COMMAND_TIME, apart
from fedsilo.protocol.errors import FedSiloError, NotAllowedError, OperationError, UnreachableError

# Read by gRPC when it loads. Its own lines go to file descriptor 2, which is the screen a console draws on.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

TIMEOUT_SECONDS = 30.0
COMMAND_VALID_SECONDS = 120
CLOCKS_TOLD_SECONDS = 2.0  # a smaller difference refuses no order
MESSAGE_BYTES_MAX = 64 << 20

# What a command line's --timeout sets, in seconds: for each call, and for the whole of a watch. None: TIMEOUT_SECONDS
# for a call, and a watch without an end.
timeout_chosen: ContextVar[float | None] = ContextVar("timeout_chosen", default=None)


@dataclass(frozen=True)
class Snapshot:
    """A daemon's state at one moment; `sequence` is where to watch from."""

    sequence: int
    time: str
    policy_digest: str
    state: dict[str, Any]


@dataclass(frozen=True)
class Event:
    sequence: int
    time: str
    name: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Operator:
    """A person who signs commands for one site's daemon in one federation."""

    site: str
    certificate: Path
    key: Path
    federation: str = ""  # as it was shown, or as the configuration says; no daemon obeys an order without one


class ControlClient:
    """Speaks to the daemon behind a control socket. Use as a context, or `close` it.

    Args:
        socket_path: the unix socket.
        timeout_seconds: for every call but `watch`; by default what `timeout_chosen` holds, else TIMEOUT_SECONDS.
    """

    def __init__(self, socket_path: Path, *, timeout_seconds: float | None = None) -> None:
        self._path = socket_path
        self._watch_seconds = timeout_chosen.get()
        self._timeout_seconds = timeout_seconds or self._watch_seconds or TIMEOUT_SECONDS
        self._channel = grpc.insecure_channel(
            f"unix:{socket_path.absolute()}",
            # a proxy named in the environment is no business of a local socket
            options=(("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)),
        )
        methods: dict[str, tuple[Any, Any, bool]] = dict(services.CONTROL_METHODS)
        self._calls: dict[str, Any] = {}
        for name, (request, reply, streams) in methods.items():
            make: Any = self._channel.unary_stream if streams else self._channel.unary_unary
            self._calls[name] = make(
                f"/{services.CONTROL_SERVICE}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )

    def snapshot(self) -> Snapshot:
        """Return the daemon's state. Raises UnreachableError: no daemon is behind the socket."""
        reply = self._call("Snapshot", control_pb2.SnapshotRequest())
        return Snapshot(reply.sequence, reply.time, reply.policy_digest, json.loads(reply.state_json))

    def watch(self, since_sequence: int = 0) -> Iterator[Event]:
        """Events after a sequence, as they happen, until the daemon ends or the caller stops.

        Raises:
            UnreachableError: the daemon went away, or the time that a command line gave is over.
        """
        call = self._calls["Watch"](
            control_pb2.WatchRequest(since_sequence=since_sequence), timeout=self._watch_seconds
        )
        try:
            for event in call:
                yield Event(event.sequence, event.time, event.name, json.loads(event.fields_json))
        except grpc.RpcError as error:
            raise self._translated(error) from None
        finally:
            call.cancel()

    def query(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """A read with arguments.

        Raises:
            UnreachableError: no daemon behind the socket.
            FedSiloError: what the daemon answered, with its exit code.
        """
        text = json.dumps(dict(arguments or {}))
        reply = self._call("Query", control_pb2.QueryRequest(name=name, arguments_json=text))
        raise_for_reply(reply)
        return json.loads(reply.data_json)

    def execute(self, command: control_pb2.Command) -> Any:
        """Carry out a signed command; the same command again gives the same result.

        Raises:
            UnreachableError: no daemon behind the socket; nothing was done, or safe to ask again.
            FedSiloError: what the daemon answered, with its exit code.
        """
        reply = self._call("Execute", command)
        try:
            raise_for_reply(reply)
        except NotAllowedError as error:
            if error.code in (COMMAND_TIME, CERTIFICATE_TIME):
                self._compare_clocks(error)
            raise
        return json.loads(reply.result_json)

    def _compare_clocks(self, error: NotAllowedError) -> None:
        """Say of an order that is refused for its time by how much the clocks differ: only this side knows both."""
        theirs = datetime.fromisoformat(self.snapshot().time)
        differ = (theirs - datetime.now(UTC)).total_seconds()
        if abs(differ) > CLOCKS_TOLD_SECONDS:
            error.message += f"; the daemon's clock is {apart(differ)} this machine's"
            error.hint = "find out which of the two is wrong, set it right, and give the command again"

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, request: Any) -> Any:
        try:
            return self._calls[name](request, timeout=self._timeout_seconds)
        except grpc.RpcError as error:
            raise self._translated(error) from None

    def _translated(self, error: grpc.RpcError) -> FedSiloError:
        code = error.code() if isinstance(error, grpc.Call) else None
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnreachableError(f"the daemon behind {self._path} did not answer within {self._timeout_seconds:g} s")
        if code is grpc.StatusCode.CANCELLED:  # by the other end: we cancel only calls that nobody waits for
            return UnreachableError(f"the daemon at {self._path} ended while it was asked")
        if code is grpc.StatusCode.UNAVAILABLE:
            why = "nothing listens there" if self._path.exists() else "the socket does not exist"
            return UnreachableError(
                f"cannot reach the daemon at {self._path}: {why}", hint="is it started? is this the right --config?"
            )
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return UnreachableError(
                f"too many others watch the daemon behind {self._path}",
                hint="end some of them; commands still get through",
            )
        return OperationError(f"the daemon behind {self._path} failed to answer; its log says why")


def sign_as(
    operator: Operator,
    name: str,
    arguments: Mapping[str, Any],
    *,
    request_id: str = "",
    now: datetime | None = None,
    expires: datetime | None = None,
) -> control_pb2.Command:
    """A command signed by a person; in a dry run the person's files are read, and nothing is signed.

    Args:
        operator: who, and for which site.
        name: such as "run.submit".
        arguments: JSON-able; digests of what the person was shown belong here.
        request_id: give the same again to repeat the same request.
        now: when; by default the clock.
        expires: until when it is valid; by default two minutes.

    Raises:
        NotFoundError, NotAllowedError: the person's certificate or key is missing, readable by others, or does not fit.
    """
    certificate_pem, key = load_operator(operator.certificate, operator.key, now=now)
    would_sign(Signing(operator.site, operator.certificate, operator.key, name, arguments))
    expires = expires or (now or datetime.now(UTC)) + timedelta(seconds=COMMAND_VALID_SECONDS)
    return sign_command(
        federation=operator.federation,
        site=operator.site,
        name=name,
        arguments=arguments,
        request_id=request_id or secrets.token_hex(16),
        expires=expires,
        operator_certificate_pem=certificate_pem,
        operator_key=key,
    )
