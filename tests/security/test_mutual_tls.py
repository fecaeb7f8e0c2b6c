"""T25, T28, T30 against grpcio itself: our certificates carry a TLS 1.3 connection, and only between the right two."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from concurrent import futures
from datetime import UTC, datetime, timedelta
from typing import cast

import grpc
import pytest

from certs.authority import CertificateAuthority, create_ca
from certs.encoding import private_key_pem
from certs.identity import peer_identity
from certs.names import coordinator_dns_name
from tests.security.people import new_keys

NOW = datetime.now(UTC)
FEDERATION = create_ca("cardio-net", kind="federation", not_before=NOW - timedelta(days=1), days=30)
STRANGERS = create_ca("cardio-net", kind="federation", not_before=NOW - timedelta(days=1), days=30)
METHOD = "/test/WhoAmI"


def credentials(role: str, authority: CertificateAuthority = FEDERATION) -> tuple[bytes, bytes]:
    tls_key, _, keys = new_keys()
    if role == "silo":
        issued = authority.issue_silo(keys, silo="a", now=NOW)
    else:
        issued = authority.issue_coordinator(
            keys, coordinator="main", dns_names=["localhost"], ip_addresses=["127.0.0.1"], now=NOW
        )
    return private_key_pem(tls_key), issued.certificate_pem


def serve(key: bytes, certificate: bytes) -> tuple[grpc.Server, int]:
    def who_am_i(request: bytes, context: grpc.ServicerContext) -> bytes:
        # grpc-stubs says int for the items; grpcio gives bytes.
        seen = cast("dict[str, list[bytes]]", context.auth_context())
        peer = peer_identity(seen["x509_pem_cert"][0], FEDERATION.certificate_pem, NOW, role="silo")
        version = seen.get("ssl_tls_version", [b"absent"])[0]
        return f"{peer.spiffe_id} {seen['peer_spiffe_id'][0].decode()} {version.decode()}".encode()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    handler = grpc.unary_unary_rpc_method_handler(who_am_i)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"WhoAmI": handler}),))
    port = server.add_secure_port(
        "127.0.0.1:0",
        grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=FEDERATION.certificate_pem, require_client_auth=True
        ),
    )
    server.start()
    return server, port


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server, port = serve(*credentials("coordinator"))
    yield port
    server.stop(None).wait()


def ask(target: str, key: bytes | None, certificate: bytes | None, *, name: str = "") -> str:
    options = [("grpc.ssl_target_name_override", name)] if name else []
    channel_credentials = grpc.ssl_channel_credentials(FEDERATION.certificate_pem, key, certificate)
    with grpc.secure_channel(target, channel_credentials, options=options) as channel:
        reply: bytes = channel.unary_unary(METHOD, None, None)(b"", timeout=5)
    return reply.decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_T25_a_silo_and_the_coordinator_talk_tls_1_3(port: int, host: str) -> None:
    spiffe_id = "spiffe://cardio-net/silo/a"
    assert ask(f"{host}:{port}", *credentials("silo")) == f"{spiffe_id} {spiffe_id} TLSv1.3"


def test_T30_the_role_name_holds_whatever_address_was_dialled(port: int) -> None:
    assert "silo/a" in ask(f"127.0.0.1:{port}", *credentials("silo"), name=coordinator_dns_name("cardio-net"))
    with pytest.raises(grpc.RpcError) as caught:
        ask(f"127.0.0.1:{port}", *credentials("silo"), name=coordinator_dns_name("other-net"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", ["", coordinator_dns_name("cardio-net")])
def test_T30_a_silo_that_runs_a_server_is_refused_before_data(name: str) -> None:
    server, port = serve(*credentials("silo"))
    try:
        with pytest.raises(grpc.RpcError) as caught:
            ask(f"127.0.0.1:{port}", *credentials("silo"), name=name)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        server.stop(None).wait()


def test_T28_no_certificate_and_a_foreign_one_are_refused(port: int) -> None:
    for key, certificate in ((None, None), credentials("silo", STRANGERS)):
        with pytest.raises(grpc.RpcError) as caught:
            ask(f"127.0.0.1:{port}", key, certificate)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_T28_a_server_certificate_is_not_accepted_from_a_client(port: int) -> None:
    with pytest.raises(grpc.RpcError):
        ask(f"127.0.0.1:{port}", *credentials("coordinator"))


def test_T25_the_handshake_with_a_plain_tls_client_agrees_on_1_3(port: int) -> None:
    context = ssl.create_default_context(cadata=FEDERATION.certificate_pem.decode())
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as wrapped,
    ):
        assert wrapped.version() == "TLSv1.3"
