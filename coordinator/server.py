"""gRPC, thin: mutual TLS and framing in front of the `Driver`.

Every call is judged anew: TLS 1.3, one certificate of a silo of this federation, valid now (threats T25, T26, T28). A
call may send only what it announced and open only so many at a time (T23), and it ends when the next MiB, up or down,
does not come to an end in time (T24): a large payload may take as long as its line needs. What goes wrong here leaves
as a bare status, never with a text (T8).
What this does not stop: a network attacker who drops or delays packets.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import resource
import socket
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import grpc

from certs.identity import Identity, KnownPeers, PeerIdentity
from coordinator.blobs import AnyPayload, Blobs, BytesPayload, LineClosed, Uploads, chunks, whole
from coordinator.config import Limits
from coordinator.driver import Driver
from coordinator.native_log import address_of, host_of
from coordinator.outbox import Reply
from fedsilo.control.socket_server import CallBoundary, NoSlotError
from fedsilo.files.logs import QuietLog, about
from fedsilo.protocol import codec, services
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, FedSiloError, NotAllowedError, OperationError, PeerError, WireCode

log = logging.getLogger("fedsilo.coordinator")

FILES_OF_OUR_OWN = 256
PROGRESS_BYTES = 1 << 20  # of an upload, in `limits.receive_timeout_seconds`; of an answer it is a chunk
_OPTIONS = (
    ("grpc.max_receive_message_length", 2 << 20),
    ("grpc.max_concurrent_streams", 16),
    # What has come of an upload and was not taken yet lies in memory: so much of each, and not as much as a fast line
    # can hold (T23). Over a line of 100 ms this is still 40 MB/s.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.so_reuseport", 0),  # a port in use is an error, never shared with another process
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


def _about(peer: PeerIdentity, envelope: pb.Envelope) -> contextlib.AbstractContextManager[None]:
    """Log lines are about this message; what is told of a refused one is what its sender claims."""
    return about(
        run=envelope.run,
        round=envelope.round,
        step=envelope.step,
        attempt=envelope.attempt,
        silo=peer.name,
        kind=envelope.kind,
        sequence=envelope.sequence,
    )


class _TooShortError(PeerError):
    """The stream ended before all that was announced had come."""


class _SiloCall(CallBoundary):
    """Tells a refused caller from a failure, and logs neither more often than it must."""

    def failed(self, error: BaseException) -> None:
        if isinstance(error, NotAllowedError):
            host, certificate = _caller(self.context)
            self.quiet.say(
                f"refused {host} {certificate}", f"refused calls from {host}", f"refused a call from {error.line}"
            )
            self.context.abort(grpc.StatusCode.UNAUTHENTICATED, "")
        if isinstance(error, FedSiloError):
            cause = f"{type(error).__name__} {error.code}"
            self.quiet.say(cause, f"calls that ended by {cause}", f"a call ended: {error.line}", level=logging.ERROR)
            self.context.abort(grpc.StatusCode.UNAVAILABLE, "")
        if isinstance(error, Exception) and self.context.is_active():
            cause = type(error).__name__
            about, line = f"calls that ended by {cause}, a fault of ours", "a call ended by a fault of ours"
            self.quiet.say(cause, about, line, level=logging.ERROR, error=error)
            self.context.abort(grpc.StatusCode.INTERNAL, "")


def _caller(context: grpc.ServicerContext) -> tuple[str, str]:
    """The host that calls and the digest of what it presents: whoever has no other certificate is one kind of line."""
    properties: Any = context.auth_context()
    presented = b"".join(properties.get("x509_pem_cert", ()))
    return host_of(address_of(context.peer())), hashlib.sha256(presented).hexdigest()[:16]


class _Watchdog:
    """Cancels calls whose peer stalls (T24) and tells how many lines were held back. One thread for all calls."""

    def __init__(self, clock: Callable[[], float], quiet: QuietLog, seconds: float) -> None:
        self._clock = clock
        self._quiet = quiet
        self._seconds = seconds
        self._lock = threading.Lock()
        self._due: dict[grpc.ServicerContext, float] = {}

    def expect(self, context: grpc.ServicerContext) -> None:
        """The peer is to send, or to take, the next piece in time."""
        with self._lock:
            self._due[context] = self._clock() + self._seconds

    def rest(self, context: grpc.ServicerContext) -> None:
        """Expect nothing of the peer."""
        with self._lock:
            self._due.pop(context, None)

    def look(self) -> None:
        with self._lock:
            late = [context for context, due in self._due.items() if due <= self._clock()]
        for context in late:
            self._quiet.say("stalled", "calls whose peer stalled", "a peer stalled; its call is cancelled")
            context.cancel()  # type: ignore[no-untyped-call]  # grpc publishes no types for it
        self._quiet.flush()


class FederationService:
    """The one RPC of silos.

    Args:
        driver: takes the messages.
        blobs: where large payloads are spooled.
        trust_root_pem: federation CA.
        limits: bounds per call and silo.
        now: UTC, timezone-aware.
    """

    def __init__(
        self,
        driver: Driver,
        blobs: Blobs,
        *,
        trust_root_pem: bytes,
        limits: Limits,
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
    ) -> None:
        self._driver = driver
        self.uploads = Uploads(blobs)
        self._known = KnownPeers(trust_root_pem, "silo")
        self._limits = limits
        self._now = now
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._quiet = QuietLog(log, monotonic=monotonic)
        self.watchdog = _Watchdog(monotonic, self._quiet, limits.receive_timeout_seconds)

    def exchange(self, requests: Iterator[codec.Frame], context: grpc.ServicerContext) -> Iterator[codec.Frame]:
        """Take one message in and send one message back."""
        with _SiloCall(context, self._quiet), contextlib.suppress(LineClosed):
            peer = self._peer(context)
            with self._one_more(peer), contextlib.ExitStack() as stack:
                stack.callback(self.watchdog.rest, context)
                self.watchdog.expect(context)
                taken = yield from self._take(peer, requests, context, stack)
                self.watchdog.rest(context)
                if isinstance(taken, Reply):
                    reply, offset = taken, 0
                else:
                    envelope, payload, drop = taken
                    with _about(peer, envelope):
                        reply = self._driver.receive(peer, envelope, payload)
                    if not _is_halted(reply):
                        # Judged, so it is not gone on with; what was kept has another name by then. What could not be
                        # judged stays: its bytes need not cross again once this coordinator has started anew (T29).
                        drop()
                    offset = _offset_asked(envelope, payload, reply)
                stack.pop_all().close()  # an upload's place is another's while the answer goes out
                stack.callback(self.watchdog.rest, context)
                for frame in _frames(reply, offset):
                    self.watchdog.expect(context)
                    yield frame

    def _take(
        self,
        peer: PeerIdentity,
        requests: Iterator[codec.Frame],
        context: grpc.ServicerContext,
        stack: contextlib.ExitStack,
    ) -> Generator[codec.Frame, None, Reply | tuple[pb.Envelope, AnyPayload, Callable[[], None]]]:
        """The complete message, with what removes its bytes; or the refusal that answers its opening or what came after
        it."""
        envelope = pb.Envelope()
        try:
            first = next(requests, None)
            if first is None or isinstance(first, codec.Chunk) or first.WhichOneof("part") != "opening":
                raise PeerError(WireCode.MALFORMED, "a message begins with an opening")
            envelope = first.opening.envelope
            codec.require_known(first)
            announced = first.opening.payload_bytes
            # before a single payload byte is accepted
            silo = self._driver.dependencies.ingress.admit(peer, envelope, announced)
            if announced <= codec.UNASKED_BYTES_MAX:
                taken = bytearray()
                for chunk in _chunks(requests, announced):
                    taken += chunk
                return envelope, BytesPayload(bytes(taken)), _nothing
            payload, drop = yield from self._take_large(silo, envelope, announced, requests, context, stack)
            return envelope, payload, drop
        except PeerError as error:
            with _about(peer, envelope):
                return self._driver.refuse(peer, envelope, error)

    def _take_large(
        self,
        silo: str,
        envelope: pb.Envelope,
        announced: int,
        requests: Iterator[codec.Frame],
        context: grpc.ServicerContext,
        stack: contextlib.ExitStack,
    ) -> Generator[codec.Frame, None, tuple[AnyPayload, Callable[[], None]]]:
        """Take what a silo sends when its turn comes; return it, and what removes it. Both are good until `stack` is
        left."""
        self.watchdog.rest(context)  # it waits for others
        if not context.add_callback(self.uploads.wake):
            raise LineClosed
        stack.enter_context(self.uploads.turn(silo, is_active=context.is_active, cut=context.cancel))
        digest = envelope.payload_digest.hex()
        known = self.uploads.taken_before(self._driver.dependencies.store, silo, digest)
        if known is not None and known.size_bytes == announced:
            self.watchdog.expect(context)
            yield pb.Frame(admitted=pb.Admitted(offset=announced))
            for _ in _chunks(requests, 0):
                pass
            return known, _nothing
        upload = stack.enter_context(self.uploads.arriving(silo, digest, announced))
        self.watchdog.expect(context)
        yield pb.Frame(admitted=pb.Admitted(offset=upload.offset))
        left = announced - upload.offset
        awaited = left - PROGRESS_BYTES
        try:
            for chunk in _chunks(requests, left):
                upload.write(chunk)
                left -= len(chunk)
                if left <= awaited:
                    awaited = left - PROGRESS_BYTES
                    self.watchdog.expect(context)
        except _TooShortError:
            # gRPC ends the stream so for a line that broke, too, at times before it says that the call is over: what
            # came is gone on with, and its digest judges it.
            if not context.is_active():
                raise LineClosed from None
            raise
        except PeerError:
            upload.drop()
            raise
        payload = upload.finish()
        if upload.offset and payload.digest != digest:
            upload.drop()  # what lay here may be at fault, so it is no refusal: the silo sends all of it again (T29)
            raise OperationError(f"an upload of {silo} was gone on with and is not what it announced; it begins anew")
        return payload, upload.drop

    def _peer(self, context: grpc.ServicerContext) -> PeerIdentity:
        """Return the caller by this call's certificate.

        Raises:
            NotAllowedError: not TLS 1.3, or not a silo's certificate that is valid now.
        """
        # the published stubs have the wrong type for the values
        properties: Any = context.auth_context()
        try:
            version = [value.decode() for value in properties.get("ssl_tls_version", ())]
            if version != ["TLSv1.3"]:
                spoken = version[0][:16] if version else "an unknown version"
                raise NotAllowedError(f"it speaks {spoken}, TLSv1.3 is required", hint="update what dials there")
            certificates = list(properties.get("x509_pem_cert", ()))
            if len(certificates) != 1:
                raise NotAllowedError("it presents no certificate", hint="silos dial with the certificate in id/")
            return self._known.judge(certificates[0], self._now())
        except NotAllowedError as error:
            raise NotAllowedError(f"{address_of(context.peer())}: {error.message}", hint=error.hint) from error

    @contextlib.contextmanager
    def _one_more(self, peer: PeerIdentity) -> Iterator[None]:
        with self._lock:
            self._calls[peer.spiffe_id] += 1
            too_many = self._calls[peer.spiffe_id] > self._limits.concurrent_calls_per_silo
        try:
            if too_many:
                # not ended here: what `abort` raises would pass for a fault of ours further out
                raise NoSlotError(f"{peer.spiffe_id} has too many calls open")
            yield
        finally:
            with self._lock:
                self._calls[peer.spiffe_id] -= 1


def _chunks(requests: Iterator[codec.Frame], expected: int) -> Iterator[codec.Buffer]:
    """Chunks of exactly so many bytes. Raises PeerError: anything else."""
    left = expected
    for frame in requests:
        chunk = frame.chunk  # asked for once: a protobuf frame makes a copy each time
        left -= len(chunk)
        too_long = len(chunk) > codec.CHUNK_BYTES_MAX or left < 0
        if frame.WhichOneof("part") != "chunk" or too_long or not chunk:
            raise PeerError(WireCode.MALFORMED, "a frame is not a chunk, is empty, or exceeds what was announced")
        yield chunk
    if left:
        raise _TooShortError(WireCode.MALFORMED, f"of {expected} announced bytes {expected - left} came")


def _nothing() -> None:
    """Remove a payload that lies in no place of its own."""


def _is_halted(reply: Reply) -> bool:
    """Return whether a message was refused unseen, since this coordinator takes nothing."""
    if reply.envelope.kind != "control.refusal":
        return False
    return codec.decode(pb.Refusal, whole(reply.payload)).code == WireCode.HALTED


def _offset_asked(envelope: pb.Envelope, payload: AnyPayload, reply: Reply) -> int:
    """Return where the bytes of an adapter begin that a silo goes on fetching; 0 where it cannot have so many."""
    if envelope.kind != "control.fetch" or reply.envelope.kind != "global.adapter":
        return 0
    offset = codec.decode(pb.Fetch, whole(payload)).offset
    return offset if offset <= reply.payload.size_bytes else 0


def _frames(reply: Reply, offset: int) -> Iterator[codec.Frame]:
    yield pb.Frame(opening=pb.Opening(envelope=reply.envelope, payload_bytes=reply.payload.size_bytes, offset=offset))
    for chunk in chunks(reply.payload, offset):
        yield codec.Chunk(chunk)


def federation_server(
    service: FederationService, identity: Identity, listen: str, *, silos: int, limits: Limits
) -> tuple[grpc.Server, int]:
    """Listen for silos; returns the server, not yet started, and the port.

    Args:
        service: what answers.
        identity: the coordinator's certificate and key.
        listen: host:port; port 0 takes a free one.
        silos: how many there are; each may wait in a poll.
        limits: how long a connection may last, and how long without a call.

    Raises:
        ConflictError: the port is in use; names it.
    """
    options = (
        *_OPTIONS,
        ("grpc.max_connection_age_ms", limits.connection_age_seconds_max * 1000),
        # Whoever has nothing to say holds no connection (T24): a silo says something every few seconds, or dials again.
        ("grpc.max_connection_idle_ms", limits.connection_idle_seconds_max * 1000),
        ("grpc.max_connection_age_grace_ms", 120_000),
        # Whoever dials and does not finish TLS, which needs a certificate of this federation, holds a place for so long
        # only; and of places there are fewer than files that this process may have open (T24).
        ("grpc.server_handshake_timeout_ms", round(limits.handshake_timeout_seconds * 1000)),
        ("grpc.max_allowed_incoming_connections", connections_max(limits)),
    )
    # a waiting poll holds a thread: two per silo for polls, the rest for everything else
    server = grpc.server(ThreadPoolExecutor(4 + 3 * silos, thread_name_prefix="federation"), options=options)
    handler = grpc.stream_stream_rpc_method_handler(
        service.exchange, request_deserializer=codec.frame_of, response_serializer=codec.frame_bytes
    )
    method = services.EXCHANGE.rpartition("/")[2]
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(services.FEDERATION_SERVICE, {method: handler}),)
    )
    credentials = grpc.ssl_server_credentials(
        [(identity.key_pem, identity.certificate_pem)],
        root_certificates=identity.trust_root_pem,
        require_client_auth=True,
    )
    _refuse_port_in_use(listen)
    try:
        port = server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise ConflictError(f"cannot listen on {listen}", hint="choose another `listen:` address") from error
    return server, port


def connections_max(limits: Limits) -> int:
    """Return how many connections are held at a time: what is configured, and never more than the open files leave room
    for.

    Each takes one file; the rest stays for databases, payloads, logs and the control socket.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(files - FILES_OF_OUR_OWN, files // 2)
    if room < limits.connections_max:
        log.warning("%d connections at most, since %d files may be open: raise `ulimit -n`", room, files)
    return min(limits.connections_max, room)


def _refuse_port_in_use(listen: str) -> None:
    """grpc says only that binding failed; a person needs to know which port and why."""
    host, _, port = listen.rpartition(":")
    if port == "0":
        return
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConflictError(
                f"cannot listen on {listen}: {error.strerror}", hint="no interface here has it; `ip address` lists them"
            ) from error
        raise ConflictError(
            f"cannot listen on {listen}: {error.strerror}",
            hint=f"port {port} is taken; stop what holds it (`ss -ltnp 'sport = :{port}'`) or choose another `listen:`",
        ) from error
