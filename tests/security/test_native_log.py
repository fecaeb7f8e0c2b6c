"""gRPC's lines about failed handshakes, in words, and not more of them than a log can bear (T24)."""

from __future__ import annotations

import logging
import os
import sys

import pytest

from coordinator.native_log import NativeLog, handshake_cause

SAID = "I1120 14:20:54.0 8839 ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL: "
LIBRARY = SAID + "error:1000007d:SSL routines:OPENSSL_internal:"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            LIBRARY + "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate\n",
            "its certificate is not signed by this federation's CA (wrong CA): unable to get local issuer certificate",
        ),
        (LIBRARY + "CERTIFICATE_VERIFY_FAILED: certificate has expired", "its certificate is expired"),
        (LIBRARY + "PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid certificate", "it shows no certificate"),
        (LIBRARY + "HTTP_REQUEST: Invalid certificate verification context", "it does not speak TLS"),
        (LIBRARY + "SSLV3_ALERT_BAD_CERTIFICATE", "it does not accept this coordinator: bad certificate"),
        (LIBRARY + "SOMETHING_NEW: and more", "something new"),
        ("I1120 14:20:54.0 8839 server.cc:1] listening", ""),
        ("error: something of ours [FAILED]", ""),
    ],
)
def test_a_failed_handshake_is_put_in_words(line: str, cause: str) -> None:
    assert handshake_cause(line) == cause


def test_the_library_s_lines_become_ours_and_all_others_pass(capfd: pytest.CaptureFixture[str]) -> None:
    reported: list[str] = []
    before = sys.stderr
    with NativeLog(reported.append):
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
    now = [0.0]
    reported: list[str] = []
    log = NativeLog(reported.append, monotonic=lambda: now[0])
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fedsilo.coordinator")
    logger.addHandler(handler)
    try:
        for moment in (0.0, 1.0, 9.9, 10.0):
            now[0] = moment
            log.take((LIBRARY + "HTTP_REQUEST: x\n").encode())
    finally:
        logger.removeHandler(handler)
    assert records == [
        "refused a connection in the TLS handshake: it does not speak TLS",
        "refused a connection in the TLS handshake: it does not speak TLS (and 2 more like it before)",
    ]
    assert reported == ["it does not speak TLS"] * 2
