"""TLS between a guard and a trainer on another host: both ends proven under the *site* CA. Both sides import this.

TLS 1.3 only, both ends present a certificate, no session is resumed. OpenSSL judges chain and dates; then the peer's
certificate must name exactly one identity, `spiffe://<site>/guard/<name>` or `spiffe://<site>/trainer/<name>`, in the
role it must have (B1, B3). No host name is asked for: pods and batch nodes change theirs, and only this site's CA
makes a guard. The keys are made for this link alone: an operator's certificate has the wrong role, a federation's the
wrong root, and the guard's own keys are refused by value.

Does not cover: a stolen key until its certificate expires; a certificate that expires while the link stands (every
run dials anew); and a peer that connects and says nothing keeps the next one waiting for the handshake's time limit.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from certs.identity import SiteMember, site_member
from certs.names import LinkRole
from fedsilo.files.identity_files import load_link, read_public
from fedsilo.protocol.errors import NotAllowedError
from silo.link import LinkRefused, StreamSocket, say_refused

_SLICE_BYTES = 1 << 20
_OTHER: dict[LinkRole, LinkRole] = {"guard": "trainer", "trainer": "guard"}
# OpenSSL's names for what a person would call otherwise.
_IN_WORDS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it presented no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it got no certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "wrong CA: it was not issued by the guard's site CA",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it has expired",
    "UNSUPPORTED_PROTOCOL": "it offers no TLS 1.3",
    "NO_SHARED_CIPHER": "it offers no TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other end does not accept this version of TLS",
}
_VERIFY_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED
_VERIFY_ISSUER = frozenset({2, 18, 19, 20, 21})  # X509_V_ERR_*: no issuer, self-signed, unable to verify the leaf


@dataclass(frozen=True)
class LinkFiles:
    """The files of one end. The key has mode 0600."""

    certificate: Path
    key: Path
    site_ca: Path


class LinkTls:
    """One end of the link.

    Args:
        files: this end's, read and judged here, so that a renewed certificate counts from the next run on.
        role: what this end is.
        peer_name: the one name the other end may have; None accepts every name in its role.
        refused_keys: public keys (DER) that the other end may not present: this end's own.
        clock: time to judge certificates by.

    Attributes:
        own: this end's identity.

    Raises:
        NotFoundError, NotAllowedError: a file is missing or wrong; names the cause.
    """

    def __init__(
        self,
        files: LinkFiles,
        role: LinkRole,
        *,
        peer_name: str | None = None,
        refused_keys: frozenset[bytes] = frozenset(),
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.own = load_link(files.certificate, files.key, files.site_ca, role=role, now=clock())
        self._peer_role = _OTHER[role]
        self._peer_name = peer_name
        self._refused_keys = refused_keys | {self.own.key_bytes}
        self._clock = clock
        self._site_ca_pem = read_public(files.site_ca)
        self._is_server = role == "guard"
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if self._is_server else ssl.PROTOCOL_TLS_CLIENT)
        self._context.minimum_version = self._context.maximum_version = ssl.TLSVersion.TLSv1_3
        self._context.check_hostname = False  # the role in the certificate is asked for instead
        self._context.verify_mode = ssl.CERT_REQUIRED
        if self._is_server:
            self._context.num_tickets = 0  # a resumed session would skip the certificate
        self._context.load_verify_locations(cadata=self._site_ca_pem.decode("ascii"))
        self._context.load_cert_chain(files.certificate, files.key)

    def secure(self, connection: socket.socket, timeout_seconds: float) -> StreamSocket:
        """Shake hands and judge the peer; see `silo.link.LinkSecurity`."""
        connection.settimeout(timeout_seconds)
        stream = TlsStream(connection, self._context, server_side=self._is_server, peer_role=self._peer_role)
        try:
            stream.shake_hands()
            self._judge(stream)
            connection.settimeout(None)
        except NotAllowedError as error:
            if self._is_server:
                say_refused(stream, error.message)
            stream.close()
            raise LinkRefused(error.message, hint=error.hint) from error
        except LinkRefused:
            stream.close()
            raise
        except OSError as error:
            stream.close()
            raise LinkRefused(f"the TLS handshake did not finish: {error.strerror or error}") from error
        return stream

    def _judge(self, stream: TlsStream) -> SiteMember:
        peer = site_member(stream.peer_certificate_pem, self._site_ca_pem, self._clock(), role=self._peer_role)
        if peer.key_bytes in self._refused_keys:
            raise NotAllowedError(
                f"{peer.spiffe_id} uses a key of the {self.own.role}; each end has its own",
                hint="make the trainer's key where the trainer runs: `fedsilo certs request`",
            )
        if self._peer_name is not None and peer.name != self._peer_name:
            raise NotAllowedError(
                f"{peer.spiffe_id} is not the {self._peer_role} named {self._peer_name!r}",
                hint="trainer.name says which one may connect",
            )
        return peer


class TlsStream:
    """TLS over one socket, for one thread that reads and others that write.

    Python's own TLS sockets let a waiting reader and a writer use one OpenSSL connection at the same time, which
    OpenSSL forbids; the guard's reader always waits. Here OpenSSL works on memory under a lock, and only the waiting
    for the socket is outside of it.
    """

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool, peer_role: LinkRole
    ) -> None:
        self._connection = connection
        self._peer_role = peer_role
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._state = threading.Lock()  # of OpenSSL's connection; never held while waiting
        self._sending = threading.Lock()  # keeps records on the wire in the order they were made

    @property
    def peer_certificate_pem(self) -> bytes:
        der = self._tls.getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(der).encode("ascii") if der else b""

    def shake_hands(self) -> None:
        """Shake hands. Raises LinkRefused: the peer's certificate, or the lack of one; OSError: the connection."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._feed()
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):
                    self._flush()  # the alert that tells the peer why
                raise LinkRefused(self._in_words(error)) from error
            else:
                self._flush()
                return

    def sendall(self, data: bytes | memoryview, /) -> None:
        view = memoryview(data)
        while view:
            part, view = view[:_SLICE_BYTES], view[_SLICE_BYTES:]
            with self._sending:
                with self._state:
                    self._tls.write(part)
                    record = self._outgoing.read()
                self._connection.sendall(record)

    def recv_into(self, buffer: memoryview, /) -> int:
        """Raises LinkRefused: the guard refuses our certificate, which TLS 1.3 tells only now."""
        came: int | None
        while True:
            with self._state:
                try:
                    came = self._tls.read(len(buffer), buffer)  # type: ignore[assignment]  # with room for it: how much
                except ssl.SSLWantReadError:
                    came = None
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    came = 0
                except ssl.SSLError as error:
                    raise LinkRefused(self._in_words(error)) from error
            if self._outgoing.pending:
                self._flush()
            if came is not None:
                return came
            self._feed()

    def shutdown(self, how: int, /) -> None:
        self._connection.shutdown(how)

    def close(self) -> None:
        self._connection.close()

    def _feed(self) -> None:
        received = self._connection.recv(_SLICE_BYTES)
        with self._state:
            if received:
                self._incoming.write(received)
            else:
                self._incoming.write_eof()

    def _flush(self) -> None:
        with self._sending:
            with self._state:
                record = self._outgoing.read()
            self._connection.sendall(record)

    def _in_words(self, error: ssl.SSLError) -> str:
        """Return one sentence for the log of this end."""
        reason = error.reason or type(error).__name__
        if isinstance(error, ssl.SSLCertVerificationError):
            cause = error.verify_message or reason
            if error.verify_code == _VERIFY_EXPIRED:
                cause = "it has expired"
            elif error.verify_code in _VERIFY_ISSUER:
                cause = "wrong CA: it was not issued by this site's CA"
            return f"the certificate of the {self._peer_role}: {cause}"
        words = _IN_WORDS.get(reason, reason.lower().replace("_", " "))
        if "ALERT" in reason:
            return f"the {self._peer_role} refuses this end's certificate: {words}"
        return f"the {self._peer_role} cannot be believed: {words}"
