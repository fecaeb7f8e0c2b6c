"""gRPC's lines about failed handshakes, in words, and not more of them than a log can bear (T24)."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import pytest

from coordinator.native_log import NativeLog, address_of, handshake_fault

SAID = "I1120 14:20:54.0 8839 ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL: "
LIBRARY = SAID + "error:1000007d:SSL routines:OPENSSL_internal:"
TRACE = "I1120 14:20:54.1    8839 handshaker.cc:155] CallNextHandshakerLocked: error="
# What grpcio 1.85 says, with GRPC_TRACE=handshaker, of one refused connection; the pointers and the rest left out.
TRACED = f"""\
I1120 14:20:53.9    8839 trace.cc:91] gRPC Tracers: handshaker
I1120 14:20:54.0    8839 handshaker.cc:80] handshake_manager 0x1: adding handshaker security [0x2] at index 1
{TRACE}OK shutdown=false index=0, args={{endpoint=0x3, args={{grpc.internal.use_v3_stack=0}}}}
{LIBRARY}CERTIFICATE_VERIFY_FAILED: certificate has expired
{TRACE}UNKNOWN: Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:\
OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: certificate has expired: OK
=== Source Location Trace: ===
src/core/util/status_helper.cc:68
 shutdown=false index=2, args={{endpoint=0x3, args={{grpc.internal.endpoint_local_address=ipv4:127.0.0.1:44029, \
grpc.internal.endpoint_peer_address=ipv6:%5B::1%5D:37602, grpc.resource_quota=0x4}}, read_buffer.Length()=0}}
I1120 14:20:54.2    8839 channel_trace.h:396] handshake manager 0x1: Failed with error: UNKNOWN: Ssl handshake failed
=== Source Location Trace: ===
src/core/util/status_helper.cc:68

"""


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            LIBRARY + "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate\n",
            "its certificate is not signed by this federation's CA (wrong CA): unable to get local issuer certificate",
        ),
        (LIBRARY + "CERTIFICATE_VERIFY_FAILED: certificate has expired", "its certificate is expired"),
        (LIBRARY + "CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "its certificate is not yet valid"),
        (
            LIBRARY + "CERTIFICATE_VERIFY_FAILED: unsupported certificate purpose",
            "its certificate is for another role (no clientAuth, such as a coordinator's)",
        ),
        (LIBRARY + "PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid certificate", "it shows no certificate"),
        (LIBRARY + "HTTP_REQUEST: Invalid certificate verification context", "it does not speak TLS"),
        (LIBRARY + "SSLV3_ALERT_BAD_CERTIFICATE", "it does not accept this coordinator: bad certificate"),
        (LIBRARY + "SOMETHING_NEW: and more", "something new"),
        (
            TRACE + "UNAVAILABLE: Handshake read failed (Socket closed)",
            "it closed the connection in the middle of the handshake; a port check, or it does not accept this "
            "coordinator's certificate",
        ),
        ("I1120 14:20:54.0 8839 server.cc:1] listening", None),
        ("error: something of ours [FAILED]", None),
    ],
)
def test_a_failed_handshake_is_put_in_words(line: str, cause: str | None) -> None:
    fault = handshake_fault(line)
    assert (fault and fault.cause) == cause


def test_the_address_comes_from_the_trace_and_the_trace_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    reported: list[tuple[str, str]] = []
    with NativeLog(lambda *told: reported.append(told)):
        os.write(2, TRACED.encode() * 2)
        os.write(2, b"a line of the library\n shutdown=false is no trace here\n")
    assert reported == [("its certificate is expired", "[::1]:37602")]  # once, and the second one counted
    assert capfd.readouterr().err == "a line of the library\n shutdown=false is no trace here\n"


def test_what_the_peer_was_shown_is_said_only_where_it_may_be_the_cause() -> None:
    said = logged_of([LIBRARY + "BAD_PACKET_LENGTH: x\n", LIBRARY + "HTTP_REQUEST: x\n"], presented="the certificate C")
    assert [line.endswith("; it was shown the certificate C") for line in said] == [True, False]


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1:5000"),
        ("ipv6:%5B2001:db8::1%5D:5000", "[2001:db8::1]:5000"),
        ("unix:%0A\x1b[2J", "unix:??[2J"),
        ("", "somebody"),
    ],
)
def test_an_address_is_safe_to_show(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_the_library_s_lines_become_ours_and_all_others_pass(capfd: pytest.CaptureFixture[str]) -> None:
    reported: list[str] = []
    before = sys.stderr
    with NativeLog(lambda cause, peer: reported.append(cause)):
        os.write(2, b"a line of the library\n")
        os.write(2, (LIBRARY + "CERTIFICATE_VERIFY_FAILED: certificate has expired\n").encode())
        sys.stderr.write("a line of ours\n")
    assert sys.stderr is before
    os.write(2, b"afterwards\n")
    assert reported == ["its certificate is expired"]
    said = capfd.readouterr().err
    assert "a line of the library" in said and "a line of ours" in said and "afterwards" in said
    assert "certificate has expired" not in said


def test_how_often_the_same_cause_came_is_counted() -> None:
    said = logged_of([LIBRARY + "HTTP_REQUEST: x\n"] * 4, moments=(0.0, 1.0, 9.9, 10.0))
    hint = "is that a silo? there is no plaintext mode"
    assert said == [
        f"refused a connection in the TLS handshake: it does not speak TLS; {hint}",
        f"refused a connection in the TLS handshake: it does not speak TLS; {hint} (and 2 more like it before)",
    ]


def logged_of(lines: Sequence[str], *, presented: str = "", moments: Sequence[float] = ()) -> list[str]:
    """The log's lines for some lines of the library, taken at these seconds."""
    times = iter(moments or range(0, 1000, 60))
    log = NativeLog(presented=presented, monotonic=lambda: next(times))
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fedsilo.coordinator")
    logger.addHandler(handler)
    try:
        for line in lines:
            log.take(line.encode())
    finally:
        logger.removeHandler(handler)
    return records
