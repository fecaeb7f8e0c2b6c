"""gRPC's lines about failed handshakes, in words, and not more of them than a log can bear (T24)."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Sequence

import pytest

from coordinator.native_log import NativeLog, address_of, handshake_fault, host_of
from fedsilo.files.logs import KINDS_MAX

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
I1120 14:20:54.2    8839 channel_trace.h:396] handshake manager 0x1: Failed with error: UNKNOWN: Ssl handshake failed \
(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: \
certificate has expired: OK
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
    ("peer", "address", "host"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1:5000", "127.0.0.1"),
        ("ipv6:%5B2001:db8::1%5D:5000", "[2001:db8::1]:5000", "[2001:db8::1]"),
        ("unix:%0A\x1b[2J", r"unix:\n\u001b[2J", r"unix:\n\u001b[2J"),
        ("", "somebody", "somebody"),
    ],
)
def test_an_address_is_safe_to_show(peer: str, address: str, host: str) -> None:
    assert (address_of(peer), host_of(address)) == (address, host)


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


def test_T24_the_same_cause_from_one_host_is_counted_and_the_count_is_told_when_its_time_is_over() -> None:
    said = logged_of([LIBRARY + "HTTP_REQUEST: x\n"] * 5, moments=(0.0, 1.0, 9.9, 10.0, 11.0))
    line = (
        "refused a connection in the TLS handshake: it does not speak TLS; is that a silo? there is no plaintext mode"
    )
    count = "refused connections in the TLS handshake: it does not speak TLS: {} more"
    assert said == [line, count.format(2), line, count.format(1)]  # the last one at the end


def traced(host: str, thread: int = 8839, cause: str = "CERTIFICATE_VERIFY_FAILED: certificate has expired") -> str:
    """What the library says of one refused connection from `host`."""
    text = TRACED.replace("%5B::1%5D", host).replace("ipv6", "ipv4").replace(" 8839 ", f" {thread} ")
    return text.replace("CERTIFICATE_VERIFY_FAILED: certificate has expired", cause)


def lines_of(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def test_T24_peers_of_several_hosts_are_told_apart() -> None:
    """Five certificates that expired in one night are five lines, however close together."""
    said = logged_of([traced(f"192.0.2.{host}") * 2 for host in range(5)], moments=[0.0])
    assert [line.partition(" in the")[0] for line in said] == [
        *(f"refused a connection from 192.0.2.{host}:37602" for host in range(5)),
        *(f"refused connections from 192.0.2.{host}" for host in range(5)),
    ]
    assert said[-1].endswith("its certificate is expired: 1 more")


def test_T24_however_many_hosts_there_are_the_lines_stay_few() -> None:
    said = logged_of([traced(f"192.0.2.{host}") for host in range(200)], moments=[0.0])
    assert len(said) == KINDS_MAX + 2  # one each, one for all others, and the count of those
    assert said[-1].endswith(f"and lines of other kinds or from elsewhere: {200 - KINDS_MAX - 1} more")


@pytest.mark.parametrize("alike", [True, False])
def test_T24_failures_at_once_are_told_once_each(alike: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """What the TLS library says of all of them comes before the trace, which may be another thread's."""
    both = [lines_of(traced(f"192.0.2.{n}", n, "HTTP_REQUEST: x" if alike or n % 2 else "NEW: x")) for n in range(8)]
    reported: list[str] = []
    texts = ["".join(line for lines in both for line in lines[:4]), *("".join(lines[4:]) for lines in both)]
    assert len(logged_of(texts, lambda cause, peer: reported.append(peer))) == 8
    assert reported == [f"192.0.2.{n}:37602" for n in range(8)]
    assert capfd.readouterr().err == ""


def test_a_stderr_that_takes_nothing_costs_the_lines_and_not_the_reader() -> None:
    """/dev/full is a full disk; then a reader that is gone, as a closed terminal; then a disk with room again."""
    reported: list[str] = []
    reading, writing = os.pipe()
    os.close(reading)
    kept = os.dup(2)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        for broken in (full, writing):
            os.dup2(broken, 2)
            with NativeLog(lambda cause, peer: reported.append(peer)):
                os.write(2, b"a line of the library\n" * 3)
                os.write(2, traced("192.0.2.1").encode())
            assert os.path.sameopenfile(2, broken)
    finally:
        os.dup2(kept, 2)
        for descriptor in (kept, full, writing):
            os.close(descriptor)
    assert reported == ["192.0.2.1:37602"] * 2


def test_a_report_that_fails_costs_nothing_but_the_report(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def report(cause: str, peer: str) -> None:
        told.append(peer)
        raise ValueError("not JSON")

    with NativeLog(report):
        os.write(2, (traced("192.0.2.1") + traced("192.0.2.2")).encode())
    assert told == ["192.0.2.1:37602", "192.0.2.2:37602"]
    assert "a line about a handshake was not dealt with: ValueError" in caplog.messages


def test_lines_without_an_end_are_not_kept_for_ever(capfd: pytest.CaptureFixture[str]) -> None:
    with NativeLog():
        os.write(2, b"x" * 200_000)
        os.write(2, b"the last words")
    assert capfd.readouterr().err == "x" * 200_000 + "the last words"


def logged_of(
    texts: Sequence[str],
    report: Callable[[str, str], None] = lambda cause, peer: None,
    *,
    presented: str = "",
    moments: Sequence[float] = (),
) -> list[str]:
    """The log's lines for what the library writes, taken at these seconds; the last of them stays."""
    times = iter(moments or itertools.count(0.0, 60.0))
    last = moments[-1] if moments else 0.0
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fedsilo.coordinator")
    logger.addHandler(handler)
    try:
        with NativeLog(report, presented=presented, monotonic=lambda: next(times, last)):
            for text in texts:
                os.write(2, text.encode())
    finally:
        logger.removeHandler(handler)
    return records
