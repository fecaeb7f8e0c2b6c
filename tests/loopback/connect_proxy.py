"""A site's HTTP proxy: CONNECT, with a login where one is set, and one that opens TLS with a certificate of its own."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.loopback.cutting_proxy import CuttingProxy


class ConnectProxy(CuttingProxy):
    """As `CuttingProxy`, and each connection begins with CONNECT.

    Args:
        upstream_port: of the server, on 127.0.0.1, whatever name is asked for.
        login: USER:PASSWORD without which it says 407.
        status: what it answers instead of 200.
        inspects: it answers TLS itself, with this context.

    Attributes:
        asked: what was asked for, in order.
    """

    def __init__(
        self, upstream_port: int, *, login: str = "", status: int = 200, inspects: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(upstream_port)
        self.login, self.status, self.inspects = login, status, inspects
        self.asked: list[str] = []

    def far_end(self, near: socket.socket) -> socket.socket | None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = near.recv(1)
            if not byte or len(head) > 4096:
                return None
            head += byte
        first, *rest = head.decode("ascii").split("\r\n")
        verb, target, version = first.split(" ")
        assert verb == "CONNECT" and version.startswith("HTTP/1."), first
        self.asked.append(target)
        given = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}
        wanted = f"Basic {base64.b64encode(self.login.encode()).decode()}"
        status = 407 if self.login and given.get("proxy-authorization") != wanted else self.status
        if status != 200:
            near.sendall(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode())
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_WR)
                near.recv(1)
            return None
        far = None if self.inspects else super().far_end(near)
        near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        if self.inspects:
            with contextlib.suppress(OSError):
                self.inspects.wrap_socket(near, server_side=True).recv(1)
        return far


def inspecting(folder: Path, host: str, *, names: tuple[x509.GeneralName, ...] = ()) -> tuple[ssl.SSLContext, str]:
    """What a TLS-inspecting proxy shows for `host`, issued by a CA of its own; and the certificate's SHA-256.

    Args:
        folder: for its files.
        host: an IP address.
        names: that it copies from the real certificate.
    """
    now, issuer_key, key = (
        datetime.now(UTC),
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP256R1()),
    )
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Hospital Web Gateway CA\x1b[31m")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host)), *names]), critical=False
        )
        .sign(issuer_key, hashes.SHA256())
    )
    chain, private = folder / "inspecting.crt", folder / "inspecting.key"
    chain.write_bytes(certificate.public_bytes(Encoding.PEM))
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, private)
    context.set_alpn_protocols(["h2"])
    return context, certificate.fingerprint(hashes.SHA256()).hex()
