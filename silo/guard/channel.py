"""A silo's one way to its coordinator: mutual TLS, one signed message up and one down per call; or a file that people
carry, whose answer comes in another.

Only `gate.py` imports this module, so nothing can be sent, and nothing gets into a file, that was not decided on.
gRPC's own texts never leave this module upwards towards the peer, and what the peer's gRPC layer says is used for a
local log line only (threat T8). Compression, proxies, retries and name-service lookups beyond the address itself are
off: what the gate recorded is what crosses.
Does not stop: a coordinator that never asks for a large payload: the call ends when it has waited for that long enough;
its host seeing when and how much is sent; whoever carries a file from reading it. It holds
what crosses a line, without the line's TLS: the medium has to be guarded as the line would be.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from certs.encoding import in_words, issued_by, met_in_words, spiffe_names
from certs.identity import peer_identity
from fedsilo.files.transfer_file import Header, TransferWriter
from fedsilo.protocol import codec, services
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.clocks import CERTIFICATE_TIME
from fedsilo.protocol.errors import FedSiloError, NotAllowedError, OperationError, PeerError, UnreachableError, WireCode
from fedsilo.protocol.text import harmless
from silo.guard.messages import Carried, ExchangeInterrupted, NotSent, Reply, Sink, TlsFiles
from silo.guard.proxied import Proxy, unread_environment

# Longest time for connecting and for the coordinator's own work, beyond the wait a poll asks for.
EXCHANGE_TIMEOUT_SECONDS = 60.0
# The slowest line planned for; a payload's time is added to the deadline at this rate.
BYTES_PER_SECOND_MIN = 250_000
# For a place among the uploads, before a large payload's own time begins: 16 of 1.66 GB at 20 Mbit/s take 3 hours.
PLACE_SECONDS_MAX = 4 * 3600.0
PROBE_TIMEOUT_SECONDS = 5.0
# For fetching a refused certificate once more, from the dialling on: a server may send it a byte at a time.
SHOWN_SECONDS_MAX = 5.0

# Codes of refused certificates: of no FedSilo CA at all, and of another one than this federation's.
TLS_INTERCEPTED = "TLS_INTERCEPTED"
FOREIGN_CERTIFICATE = "FOREIGN_CERTIFICATE"

_ITS_LOG = "the coordinator's log names the cause on its side"

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    # Pings go on for as long as nothing crosses, such as while a large message waits for its place among the uploads.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


@dataclass(frozen=True)
class Fault:
    """Fault at the other end of a line, and what to do about it. `code` is for programs; empty: UNREACHABLE."""

    cause: str
    hint: str = ""
    code: str = ""


class GrpcChannel:
    """Channel over gRPC.

    Args:
        address: host:port of the coordinator.
        files: this silo's certificate and key, and the federation CA.
        proxy: through which it is reached; None: directly.
        keepalive_seconds: how long nothing crosses in a call before a ping does.
    """

    def __init__(
        self, address: str, files: TlsFiles, *, proxy: Proxy | None = None, keepalive_seconds: float = 20.0
    ) -> None:
        self._address = address
        self._proxy = proxy
        self._keepalive = ("grpc.keepalive_time_ms", round(keepalive_seconds * 1000))
        self._files = files
        self._stopping = threading.Event()
        self._given_up = False
        self._call: grpc.Call | None = None
        self._channel: grpc.Channel | None = None

    def exchange(
        self,
        envelope: pb.Envelope,
        payload: codec.Buffer,
        *,
        wait_seconds: float,
        reply_bytes_max: int,
        into: Sink | None = None,
    ) -> Reply:
        """Send one message, wait for the one that answers it.

        Args:
            envelope: signed.
            payload: its bytes.
            wait_seconds: how long the coordinator was asked to wait before it answers (long poll).
            reply_bytes_max: largest payload taken from the coordinator (threat T23).
            into: keeps the answer's payload, where it is the one that is awaited, and has what came of it before.

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
            request_serializer=codec.frame_bytes,
            response_deserializer=codec.frame_of,
        )
        self._given_up = False
        uplink = Uplink(envelope, payload)
        place_seconds = PLACE_SECONDS_MAX if uplink.asks else 0.0
        self._call = call = stub(uplink.frames(), timeout=place_seconds + timeout_seconds)
        own_time = threading.Timer(timeout_seconds, call.cancel)
        own_time.daemon = True
        try:
            call.add_callback(uplink.end)
            return assemble(uplink.after_word(call, own_time.start), reply_bytes_max, into)
        except grpc.RpcError as error:
            raise self._translated(error) from None
        finally:
            own_time.cancel()
            self._call = None
            uplink.end()

    def interrupt(self, *, for_good: bool = False) -> None:
        """Give up the exchange in flight, and with `for_good` refuse further ones. Safe in a signal handler."""
        if for_good:
            self._stopping.set()
        self._given_up = True
        call = self._call
        if call is not None:
            call.cancel()  # type: ignore[no-untyped-call]  # the published stubs lack it

    def close(self) -> None:
        self.interrupt(for_good=True)
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
        options = (*_OPTIONS, self._keepalive)
        if self._proxy is None:
            return grpc.secure_channel(self._address, credentials, options=options)
        return grpc.secure_channel(
            self._proxy.address, credentials, options=(*options, *_through(self._proxy, self._address))
        )

    def _translated(self, error: grpc.RpcError) -> FedSiloError:
        code = error.code() if isinstance(error, grpc.Call) else None
        if self._stopping.is_set() or (code is grpc.StatusCode.CANCELLED and self._given_up):
            return ExchangeInterrupted("the exchange was given up")
        if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}:
            return connection_fault(self._address, self._files, self._proxy) or UnreachableError(
                f"coordinator {self._address}: it answers, but the call ended as {code.name}",
                hint=f"it may have been stopped just then; else {_ITS_LOG}",
            )
        if code in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}:
            refused = _certificate_refused(self._files, f"the call ended as {code.name}")
            return NotAllowedError(f"coordinator {self._address}: {refused.cause}", hint=refused.hint)
        return UnreachableError(f"coordinator {self._address}: the call ended as {code.name if code else 'unknown'}")


def _through(proxy: Proxy, address: str) -> tuple[tuple[str, str], ...]:
    """Return the options that make gRPC's HTTP CONNECT handshaker ask for the coordinator, and its TLS judge the
    coordinator's name.

    Set by hand, since gRPC's own way (`grpc.http_proxy`) lets NO_PROXY lead around the proxy.
    """
    options = (
        ("grpc.http_connect_server", address),
        ("grpc.ssl_target_name_override", _host_and_port(address)[0]),
        ("grpc.default_authority", address),
    )
    if not proxy.authorization:
        return options
    return (*options, ("grpc.http_connect_headers", f"Proxy-Authorization:{proxy.authorization}"))


def connection_fault(address: str, files: TlsFiles, proxy: Proxy | None = None) -> UnreachableError | None:
    """Return why a TLS connection to the coordinator fails, with what to do; None when it does not.

    gRPC says no more than UNAVAILABLE, so the same handshake is tried once with Python's own TLS.

    Raises:
        NotAllowedError: this silo's own files cannot be used.
    """
    host = _host_and_port(address)[0]
    try:
        context = _tls_context(files)
        plain = _dialled(address, proxy)
    except UnreachableError as error:
        return error
    except OperationError as error:
        return UnreachableError(f"coordinator {address} was not dialled: {error.message}", hint=error.hint)
    with plain:
        fault = _handshake_fault(context, plain, host, address, files, proxy)
    if fault is None:
        return None
    return UnreachableError(f"coordinator {_way(address, proxy)}: {fault.cause}", hint=fault.hint, code=fault.code)


def _handshake_fault(
    context: ssl.SSLContext, plain: socket.socket, host: str, address: str, files: TlsFiles, proxy: Proxy | None
) -> Fault | None:
    """The connection stands; what is wrong with TLS on it."""
    try:
        connection = context.wrap_socket(plain, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        return _certificate_not_accepted(address, files, error, proxy)
    except ssl.SSLError as error:
        reason = _reason(error)
        if any(word in reason for word in ("wrong version number", "http request", "packet length", "record layer")):
            return Fault(
                "it does not speak TLS: something else listens there",
                hint="is coordinator.address in silo.yaml the coordinator's `listen:`? there is no plaintext mode",
            )
        if "protocol" in reason:
            return Fault(f"it does not speak TLS 1.3, which is required ({reason})", hint="update what listens there")
        if "eof" in reason:
            return _broken_off()
        return Fault(f"TLS fails: {reason}", hint=_ITS_LOG)
    except TimeoutError:
        return Fault(
            f"it takes the connection and says nothing: no TLS within {PROBE_TIMEOUT_SECONDS:.0f} s",
            hint="does something else listen there? is coordinator.address in silo.yaml right?",
        )
    except OSError:
        return _broken_off()
    # Under TLS 1.3 the server judges the client's certificate after the handshake. If it is content, it begins to
    # speak HTTP/2; if not, it sends an alert or simply closes.
    with connection:
        try:
            if connection.recv(1):
                return None
        except ssl.SSLError as error:
            return _certificate_refused(files, f"its TLS alert is {_reason(error)!r}")
        except TimeoutError:
            return Fault(f"TLS stands, and it says nothing more within {PROBE_TIMEOUT_SECONDS:.0f} s", hint=_ITS_LOG)
        except OSError:
            pass
    return _certificate_refused(files, "it closes the connection after the handshake, without an alert")


def _broken_off() -> Fault:
    return Fault(
        "it closes the connection in the middle of the TLS handshake",
        hint="does something else listen there, or stand between (a proxy, a firewall)? is it just stopping?",
    )


def _certificate_refused(files: TlsFiles, sign: str) -> Fault:
    """The coordinator does not take this silo's certificate: which one, and the cause as far as it shows here."""
    cause = f"it does not accept this silo's certificate {files.certificate}"
    try:
        certificate = files.certificate.read_bytes()
        peer_identity(certificate, files.trust_root.read_bytes(), datetime.now(UTC), role="silo")
    except NotAllowedError as error:
        return Fault(f"{cause} ({sign}): {error.message}", hint=error.hint, code=_of_time(error))
    except OSError as error:
        return Fault(f"{cause} ({sign}), and it cannot be read here: {error.strerror}")
    return Fault(
        f"{cause} ({sign}), which is good under {files.trust_root}: {in_words(certificate)}",
        hint=f"its CA may be another one, its clock wrong, or it is just stopping; {_ITS_LOG}",
    )


def _of_time(error: NotAllowedError) -> str:
    """The code of what is wrong by the clock alone, here or there: no line that is down (T41)."""
    return CERTIFICATE_TIME if error.code == CERTIFICATE_TIME else ""


def _certificate_not_accepted(
    address: str, files: TlsFiles, error: ssl.SSLCertVerificationError, proxy: Proxy | None
) -> Fault:
    """Say what is wrong with the certificate that the coordinator shows: whose it is, who issued it, how long it is
    good.

    TLS has refused it already and does not say what was in it, so it is fetched once more and judged by our own rules.
    """
    leaf = _shown_certificate(address, proxy)
    if not leaf:
        return Fault(f"its certificate does not verify: {error.verify_message}", hint=_ITS_LOG)
    try:
        peer_identity(leaf, files.trust_root.read_bytes(), datetime.now(UTC), role="coordinator")
    except NotAllowedError as judged:
        foreign = not issued_by(leaf, files.trust_root.read_bytes())
        if foreign and not spiffe_names(leaf):
            return Fault(
                f"its certificate is refused, it is no federation's: {met_in_words(leaf)}; trusted is "
                f"{files.trust_root} alone",
                hint="a proxy or firewall on the way opens TLS (its CA is the issuer), or another server is there: "
                f"have {_host_and_port(address)[0]} excepted from TLS inspection; never add that CA to federation_ca",
                code=TLS_INTERCEPTED,
            )
        return Fault(
            f"its certificate is refused: {judged.message}; trusted is {files.trust_root}",
            hint=f"is coordinator.address in silo.yaml this federation's coordinator? {judged.hint or _ITS_LOG}",
            code=FOREIGN_CERTIFICATE if foreign else _of_time(judged),
        )
    except OSError as failure:
        return Fault(f"cannot read {files.trust_root}: {failure.strerror}")
    host = _host_and_port(address)[0]
    return Fault(
        f"its certificate is not for the name '{harmless(host, 120)}' that was dialled ({error.verify_message}): "
        f"{in_words(leaf)}",
        hint="dial a name or address that stands in it, or have one with this name: `fedsilo certs sign --dns --ip`",
    )


def _shown_certificate(address: str, proxy: Proxy | None) -> bytes:
    """The certificate (PEM) that is shown there, not believed, for an error message; b"" if there is none.

    The handshake is never finished towards the other side: nothing of ours is said, not even which silo dials (T30).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=_host_and_port(address)[0])
    end = monotonic() + SHOWN_SECONDS_MAX
    with contextlib.suppress(OSError, UnreachableError), _dialled(address, proxy) as plain:
        while (left := end - monotonic()) > 0:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                plain.settimeout(left)
                plain.sendall(outgoing.read())
                data = plain.recv(1 << 14)
                if not data:
                    return b""
                incoming.write(data)
                continue
            leaf = tls.getpeercert(binary_form=True)
            return ssl.DER_cert_to_PEM_cert(leaf).encode() if leaf else b""
    return b""


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "TLS failure").lower().replace("_", " ")


def server_certificate(address: str, files: TlsFiles, proxy: Proxy | None = None) -> bytes:
    """The coordinator's leaf as DER, after a verified TLS 1.3 handshake (threats T25, T30).

    Raises:
        UnreachableError: no such connection; the cause is named.
    """
    host = _host_and_port(address)[0]
    leaf = None
    try:
        with _tls_context(files).wrap_socket(_dialled(address, proxy), server_hostname=host) as connection:
            leaf = connection.getpeercert(binary_form=True)
            if not connection.recv(1):
                raise ConnectionResetError("it closes the connection")
    except OSError as error:
        raise connection_fault(address, files, proxy) or UnreachableError(
            f"coordinator {address}: {error}", hint=_ITS_LOG
        ) from error
    if leaf is None:
        raise UnreachableError(f"coordinator {address} shows no certificate", hint=_ITS_LOG)
    return leaf


def _tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Raises OperationError, NotAllowedError: this silo's own files cannot be used; names the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for path in (files.trust_root, files.certificate, files.key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise OperationError(f"cannot read {path}: {error.strerror}") from error
    try:
        context.load_verify_locations(files.trust_root)
        context.load_cert_chain(files.certificate, files.key)
    except ssl.SSLError as error:
        raise NotAllowedError(
            f"this silo's own files cannot be used: {files.certificate}, {files.key}, {files.trust_root}: "
            f"{_reason(error)}",
            hint="`fedsilo certs check` says which; a key and the certificate made with it belong together",
        ) from error
    context.set_alpn_protocols(["h2"])
    return context


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def _way(address: str, proxy: Proxy | None) -> str:
    return address if proxy is None else f"{address} through the proxy {proxy.address}"


def _dialled(address: str, proxy: Proxy | None) -> socket.socket:
    """A plain connection, through the proxy where there is one. Raises UnreachableError naming why there is none."""
    if proxy is None:
        return _plain(address, "coordinator", "coordinator.address", "its `listen:`")
    plain = _plain(proxy.address, "proxy", "coordinator.proxy", "the proxy's address")
    try:
        proxy.tunnel(plain, address, PROBE_TIMEOUT_SECONDS)
    except BaseException:
        plain.close()
        raise
    return plain


def _plain(address: str, what: str, key: str, should_be: str) -> socket.socket:
    host, port = _host_and_port(address)
    try:
        return socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_SECONDS)
    except TimeoutError:
        cause, hint = f"no answer within {PROBE_TIMEOUT_SECONDS:.0f} s", "does a firewall drop it? is the host up?"
    except ConnectionRefusedError:
        cause = "nothing listens there (connection refused)"
        hint = f"is the {what} started? is {key} in silo.yaml {should_be}?"
    except socket.gaierror as error:
        cause = f"the name '{harmless(host, 120)}' does not resolve: {error.strerror}"
        hint = f"correct {key} in silo.yaml, or this machine's name service"
    except (OSError, ValueError) as error:
        cause = str(getattr(error, "strerror", None) or error)
        hint = f"correct {key} in silo.yaml, or this machine's network"
    hint = "; ".join(filter(None, (hint, unread_environment() if what == "coordinator" else "")))
    code = "PROXY_UNREACHABLE" if what == "proxy" else ""
    raise UnreachableError(f"{what} {address}: {cause}", hint=hint, code=code)


# ---- by files ---------------------------------------------------------------------------------------


class Export:
    """A file being written, for who asked for it and writes nothing into it."""

    def __init__(self, file: TransferWriter) -> None:
        self._file = file

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Rows of the file's messages, as `TransferWriter.messages`."""
        return self._file.messages

    def finish(self) -> str:
        """Finish the file, as `TransferWriter.finish`."""
        return self._file.finish()


class FileChannel:
    """A `Channel` whose answers come later."""

    def __init__(self) -> None:
        self._file: TransferWriter | None = None

    def exchange(
        self,
        envelope: pb.Envelope,
        payload: codec.Buffer,
        *,
        wait_seconds: float,
        reply_bytes_max: int,
        into: Sink | None = None,
    ) -> Reply:
        """Write one message.

        Raises:
            Carried: it is in the file.
            NotSent: no file is being written.
            OperationError: the disk does not take it.
        """
        if self._file is None:
            raise NotSent(f"{envelope.kind} waits for an export", hint="silo export-release")
        self._file.add(envelope, payload)
        raise Carried(f"{envelope.kind} is carried in {self._file.path.name}; its answer comes with an import")

    @contextlib.contextmanager
    def into(self, path: Path, header: Header, key: Ed25519PrivateKey) -> Iterator[Export]:
        """Write what is sent inside into a file; arguments and errors as of `TransferWriter`."""
        with TransferWriter(path, header, key) as file:
            self._file = file
            try:
                yield Export(file)
            finally:
                self._file = None

    def interrupt(self, *, for_good: bool = False) -> None:
        """Do nothing: no exchange is ever in flight."""

    def close(self) -> None: ...


# ---- messages as frames, without a connection -----------------------------------------------------------------
# A large payload waits for the coordinator's word and is sent from the offset that it names: what it has of the same
# bytes already is not sent again, and nothing else depends on that number. A large answer goes on where it was cut,
# behind what a `Sink` has kept of it; its digest is compared when it is whole (T29).


class Uplink:
    """One message on its way up: a small payload follows its opening at once, a large one when the coordinator says.

    Args:
        envelope: signed.
    """

    def __init__(self, envelope: pb.Envelope, payload: codec.Buffer) -> None:
        self._envelope = envelope
        self._payload = payload
        self.asks = len(payload) > codec.UNASKED_BYTES_MAX
        self._told = False
        self._word: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def frames(self) -> Iterator[codec.Frame]:
        """Yield what is sent. Waits for the word, or for the end."""
        yield codec.opening(self._envelope, self._payload)
        offset = self._word.get() if self.asks else 0
        if offset is not None:
            yield from codec.chunk_frames(self._payload, offset)

    def end(self) -> None:
        """The call is over: no word will come."""
        self._word.put(None)

    def after_word(self, answers: Iterable[codec.Frame], admitted: Callable[[], object]) -> Iterator[codec.Frame]:
        """The frames of the answer; the word, where one is due, is taken out of them.

        Args:
            answers: of the coordinator.
            admitted: called when the word has come.

        Raises:
            PeerError: a word that nobody waits for, or an offset that the payload does not have.
        """
        for frame in answers:
            if isinstance(frame, codec.Chunk) or frame.WhichOneof("part") != "admitted":
                yield frame
                continue
            if not self.asks or self._told or frame.admitted.offset > len(self._payload):
                raise PeerError(WireCode.MALFORMED, "the coordinator names an offset that nobody asked for")
            self._told = True
            admitted()
            self._word.put(frame.admitted.offset)


def assemble(frames: Iterable[codec.Frame], payload_bytes_max: int, into: Sink | None = None) -> Reply:
    """Assemble one message from its frames.

    Args:
        frames: of the answer.
        payload_bytes_max: largest payload that is taken.
        into: see `Channel.exchange`.

    Raises:
        PeerError: no opening, a second one, more bytes than declared or allowed, or fewer, or not from where they were
            asked for.
        OperationError: the disk does not keep them.
    """
    stream: Iterator[codec.Frame] = iter(frames)
    first = next(stream, None)
    if first is None or isinstance(first, codec.Chunk) or first.WhichOneof("part") != "opening":
        raise PeerError(WireCode.MALFORMED, "the reply does not begin with an opening")
    codec.require_known(first)
    expected, offset = first.opening.payload_bytes, first.opening.offset
    if expected > payload_bytes_max:
        raise PeerError(WireCode.TOO_LARGE, f"the reply declares {expected} bytes, the limit is {payload_bytes_max}")
    if into is not None and first.opening.envelope.payload_digest.hex() != into.digest:
        into = None
    if into is not None and offset == 0:
        into.restart()
    if offset != (0 if into is None else into.size_bytes):
        raise PeerError(WireCode.MALFORMED, "the reply does not begin where it was asked to")
    chunks = []
    total = offset
    for frame in stream:
        chunk = frame.chunk  # asked for once: a protobuf frame makes a copy each time
        if frame.WhichOneof("part") != "chunk" or len(chunk) > codec.CHUNK_BYTES_MAX:
            raise PeerError(WireCode.MALFORMED, "the reply has a frame that is not a chunk of at most 1 MiB")
        total += len(chunk)
        if total > expected:
            raise PeerError(WireCode.MALFORMED, "the reply is longer than it declared")
        if into is None:
            chunks.append(chunk)
        else:
            into.write(chunk)
    if total != expected:
        raise PeerError(WireCode.MALFORMED, f"the reply has {total} bytes, it declared {expected}")
    return Reply(first.opening.envelope, b"".join(chunks) if into is None or not total else into.view())
