"""The silo's one network connection: mutual TLS to the coordinator, one signed message up and one down per call.

Only `gate.py` imports this module, so nothing can be sent that was not decided on. gRPC's own texts never leave this
module upwards towards the peer, and what the peer's gRPC layer says is used for a local log line only (threat T8).
Compression, proxies, retries and name-service lookups beyond the address itself are off: what the gate recorded is what
crosses. Does not stop: the coordinator's host seeing when and how much is sent.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import grpc
from cryptography import x509

from fedsilo.treaty.errors import FedSiloError, NotAllowedError, OperationError, PeerError, UnreachableError, WireCode
from fedsilo.treaty.wire import codec, services
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from silo.guard.messages import ExchangeInterrupted, TlsFiles

# Longest time for connecting and for the coordinator's own work, beyond the wait a poll asks for.
EXCHANGE_TIMEOUT_SECONDS = 60.0
# The slowest line planned for; a payload's time is added to the deadline at this rate.
BYTES_PER_SECOND_MIN = 250_000
PROBE_TIMEOUT_SECONDS = 5.0

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


@dataclass(frozen=True)
class Reply:
    """One message from the coordinator, complete and within its declared length, not yet verified."""

    envelope: pb.Envelope
    payload: bytes


class Channel(Protocol):
    """What the gate needs; the tests put an in-memory one in its place."""

    def exchange(
        self, envelope: pb.Envelope, payload: bytes, *, wait_seconds: float, reply_bytes_max: int
    ) -> Reply: ...

    def interrupt(self, *, for_good: bool = False) -> None: ...

    def close(self) -> None: ...


class GrpcChannel:
    """Channel over gRPC.

    Args:
        address: host:port of the coordinator.
        files: this silo's certificate and key, and the federation CA.
    """

    def __init__(self, address: str, files: TlsFiles) -> None:
        self._address = address
        self._files = files
        self._stopping = threading.Event()
        self._call: grpc.Call | None = None
        self._channel: grpc.Channel | None = None

    def exchange(self, envelope: pb.Envelope, payload: bytes, *, wait_seconds: float, reply_bytes_max: int) -> Reply:
        """Send one message, wait for the one that answers it.

        Args:
            envelope: signed.
            payload: its bytes.
            wait_seconds: how long the coordinator was asked to wait before it answers (long poll).
            reply_bytes_max: largest payload taken from the coordinator (threat T23).

        Raises:
            ExchangeInterrupted: `interrupt` was called.
            UnreachableError: no connection; the message names the cause (nobody listens, wrong CA, expired, time-out).
            NotAllowedError: the coordinator does not accept this silo's certificate.
            PeerError: the reply breaks the framing.
        """
        if self._stopping.is_set():
            raise ExchangeInterrupted("the silo is stopping")
        timeout_seconds = (
            wait_seconds + EXCHANGE_TIMEOUT_SECONDS + (len(payload) + reply_bytes_max) / BYTES_PER_SECOND_MIN
        )
        if self._channel is None:
            self._channel = self._connect()
        stub = self._channel.stream_stream(
            services.EXCHANGE,
            request_serializer=pb.Frame.SerializeToString,
            response_deserializer=pb.Frame.FromString,
        )
        try:
            self._call = stub(codec.frames(envelope, payload), timeout=timeout_seconds)
            return assemble(self._call, reply_bytes_max)
        except grpc.RpcError as error:
            raise self._translated(error) from None
        finally:
            self._call = None

    def interrupt(self, *, for_good: bool = False) -> None:
        """Give up the exchange in flight, and with `for_good` refuse further ones. Safe in a signal handler."""
        if for_good:
            self._stopping.set()
        call = self._call
        if call is not None:
            call.cancel()  # type: ignore[no-untyped-call]  # the published stubs lack it

    def close(self) -> None:
        self.interrupt(for_good=True)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def renew(self) -> None:
        """Connect anew with the next message, for a new certificate."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _connect(self) -> grpc.Channel:
        try:
            credentials = grpc.ssl_channel_credentials(
                root_certificates=self._files.trust_root.read_bytes(),
                private_key=self._files.key.read_bytes(),
                certificate_chain=self._files.certificate.read_bytes(),
            )
        except OSError as error:
            raise OperationError(f"cannot read {error.filename}: {error.strerror}") from error
        return grpc.secure_channel(self._address, credentials, options=_OPTIONS)

    def _translated(self, error: grpc.RpcError) -> FedSiloError:
        code = error.code() if isinstance(error, grpc.Call) else None
        if self._stopping.is_set() or code is grpc.StatusCode.CANCELLED:
            return ExchangeInterrupted("the exchange was given up")
        if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
            cause = connection_fault(self._address, self._files) or f"it answers, but the call ended as {code.name}"
            return UnreachableError(f"coordinator {self._address}: {cause}")
        if code in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}:
            return NotAllowedError(
                f"coordinator {self._address} refuses this silo's certificate ({code.name})",
                hint="fedsilo certs check; is it expired, or of another federation or role?",
            )
        return UnreachableError(f"coordinator {self._address}: the call ended as {code.name if code else 'unknown'}")


def assemble(frames: Iterable[pb.Frame], payload_bytes_max: int) -> Reply:
    """One message out of its frames.

    Raises:
        PeerError: no opening, a second one, more bytes than declared or allowed, or fewer.
    """
    stream: Iterator[pb.Frame] = iter(frames)
    first = next(stream, None)
    if first is None or first.WhichOneof("part") != "opening":
        raise PeerError(WireCode.MALFORMED, "the reply does not begin with an opening")
    expected = first.opening.payload_bytes
    if expected > payload_bytes_max:
        raise PeerError(WireCode.TOO_LARGE, f"the reply declares {expected} bytes, the limit is {payload_bytes_max}")
    parts = []
    total = 0
    for frame in stream:
        if frame.WhichOneof("part") != "chunk" or len(frame.chunk) > codec.CHUNK_BYTES_MAX:
            raise PeerError(WireCode.MALFORMED, "the reply has a frame that is not a chunk of at most 1 MiB")
        total += len(frame.chunk)
        if total > expected:
            raise PeerError(WireCode.MALFORMED, "the reply is longer than it declared")
        parts.append(frame.chunk)
    if total != expected:
        raise PeerError(WireCode.MALFORMED, f"the reply has {total} bytes, it declared {expected}")
    return Reply(first.opening.envelope, b"".join(parts))


def connection_fault(address: str, files: TlsFiles) -> str:
    """Why a TLS connection to the coordinator fails, in words; empty when it does not.

    gRPC says no more than UNAVAILABLE, so the same handshake is tried once with Python's own TLS.
    """
    try:
        with _tls_connection(address, files) as connection:
            # Under TLS 1.3 the server judges the client's certificate after the handshake. If it is content, it begins
            # to speak HTTP/2; if not, it sends an alert or simply closes.
            if not connection.recv(1):
                return _certificate_refused(files, "it closes the connection")
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in {18, 19, 20, 21}:
            return f"its certificate is not signed by the CA in {files.trust_root} (wrong CA): {error.verify_message}"
        if error.verify_code in {9, 10}:
            return f"its certificate is outside its validity (expired or not yet valid): {error.verify_message}"
        return f"its certificate does not verify: {error.verify_message}"
    except ssl.SSLError as error:
        reason = (error.reason or "TLS failure").lower().replace("_", " ")
        if any(word in reason for word in ("expired", "unknown ca", "bad certificate", "certificate unknown")):
            return _certificate_refused(files, reason)
        return f"TLS fails: {reason}"
    except TimeoutError:
        return f"no answer within {PROBE_TIMEOUT_SECONDS:.0f} s"
    except ConnectionRefusedError:
        return "nothing listens there (connection refused)"
    except ConnectionResetError:
        return _certificate_refused(files, "it closes the connection")
    except socket.gaierror:
        return "its name does not resolve"
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def _certificate_refused(files: TlsFiles, sign: str) -> str:
    """The coordinator does not take this silo's certificate: which one, and the cause as far as it shows here."""
    cause = "wrong CA, expired or revoked"
    with contextlib.suppress(OSError, ValueError):
        until = x509.load_pem_x509_certificate(files.certificate.read_bytes()).not_valid_after_utc
        if until <= datetime.now(UTC):
            cause = f"expired since {until:%Y-%m-%dT%H:%M:%SZ}"
    return f"it does not accept this silo's certificate {files.certificate} ({cause}): {sign}"


def server_certificate(address: str, files: TlsFiles) -> bytes:
    """The coordinator's leaf as DER, after a verified TLS 1.3 handshake (threats T25, T30).

    Raises:
        UnreachableError: no such connection; the cause is named.
    """
    try:
        with _tls_connection(address, files) as connection:
            leaf = connection.getpeercert(binary_form=True)
            if not connection.recv(1):
                raise ConnectionResetError
    except OSError as error:
        cause = connection_fault(address, files) or str(error)
        raise UnreachableError(f"coordinator {address}: {cause}") from error
    if leaf is None:
        raise UnreachableError(f"coordinator {address} shows no certificate")
    return leaf


def _tls_connection(address: str, files: TlsFiles) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(files.trust_root)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    plain = socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_SECONDS)
    try:
        return context.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
