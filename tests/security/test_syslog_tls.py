"""Audit records over syslog with TLS: framing, who is believed, and at least once over lost connections."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from fedsilo.edge.audit_follow import Export, LogReader, Place, read_position
from fedsilo.launch.cli_audit import app
from fedsilo.launch.syslog_tls import Receiver, SyslogSink, receiver_address
from fedsilo.treaty.errors import NotAllowedError, UnreachableError, UsageError
from tests.protocol.audit_parties import append_send, open_log

NAME = "logs.hospital.example"
WAIT_SECONDS = 20  # far more than anything here takes; only a hang reaches it
MESSAGE = re.compile(
    r"<(\d{1,3})>1 (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (\S{1,255}) fedsilo - ([a-z._]{1,32}) "
    r'\[meta sequenceId="(\d+)"\]\[origin software="FedSilo" swVersion="[^"\]\\]+"\] (\{.*\})',
    re.ASCII,
)


class Authority:
    """A CA and what it issues, as files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        ca = x509.BasicConstraints(ca=True, path_length=0)
        self._write(self.file, self._certificate(self._name, self._key.public_key(), ca, None))

    def issue(self, name: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        leaf = x509.BasicConstraints(ca=False, path_length=None)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._certificate(subject, key.public_key(), leaf, name)
        paths = self._folder / f"{self.file.stem}-{name}.crt", self._folder / f"{self.file.stem}-{name}.key"
        self._write(paths[0], certificate)
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        paths[1].chmod(0o600)
        return paths

    def _certificate(self, subject: x509.Name, key: Any, kind: x509.BasicConstraints, name: str | None) -> Any:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
        builder = builder.add_extension(kind, critical=True)
        if name:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    @staticmethod
    def _write(path: Path, certificate: x509.Certificate) -> None:
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


class LogServer:
    """Takes RFC 5425 frames and puts the messages on a queue; may break the connection after some of them.

    Args:
        break_after: messages of each connection, in order, after which it is reset; then it reads to the end.
    """

    def __init__(self, certificate: Path, key: Path, *, clients: Path | None = None, break_after: Any = ()) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        if clients:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(clients)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.messages: queue.Queue[str] = queue.Queue()
        self.people: list[Any] = []
        self._break_after = list(break_after)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError, ValueError):
                self._take(self._context.wrap_socket(plain, server_side=True))
            plain.close()

    def _take(self, connection: ssl.SSLSocket) -> None:
        self.people.append(connection.getpeercert())
        limit = self._break_after.pop(0) if self._break_after else None
        stream, count = connection.makefile("rb"), 0
        while limit is None or count < limit:
            length = b""
            while (digit := stream.read(1)) not in (b" ", b""):
                length += digit
            if not length:
                connection.unwrap()
                return
            assert re.fullmatch(rb"[1-9]\d{0,4}", length)
            self.messages.put(stream.read(int(length)).decode("ascii"))
            count += 1
        # a reset, as of a receiver that dies with unread messages
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()

    def next(self) -> dict[str, Any]:
        found = MESSAGE.fullmatch(self.messages.get(timeout=WAIT_SECONDS))
        assert found
        body = json.loads(found[6])
        return {"priority": int(found[1]), "time": found[2], "event": found[4], "id": int(found[5]), "body": body}

    def all(self) -> list[int]:
        """Numbers of the records that have arrived, in that order."""
        return [self.next()["body"]["seq"] for _ in range(self.messages.qsize())]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "log_ca")


@pytest.fixture
def serve(authority: Authority) -> Iterator[Callable[..., LogServer]]:
    servers = []

    def start(**how: Any) -> LogServer:
        servers.append(LogServer(*authority.issue(NAME), **how))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    with open_log(tmp_path / "log") as log:
        for sequence in range(6):
            append_send(log, sequence)
        log.append("egress.decision", kind="lora.factors", decision="deny", reasons=["DELTA_L2"], direction="egress")
    return tmp_path / "log"


def words(log: Path, server: LogServer, authority: Authority, *further: str) -> list[str]:
    return [
        "export", "--log", str(log), "--format", "jsonl", "--syslog", f"127.0.0.1:{server.port}",
        "--position", str(log.parent / "position"), "--ca", str(authority.file), "--server-name", NAME, *further,
    ]  # fmt: skip


def test_messages_are_rfc_5424_in_rfc_5425_frames(
    log: Path, serve: Callable[..., LogServer], authority: Authority
) -> None:
    server = serve()
    done = CliRunner().invoke(app, words(log, server, authority))
    assert done.exit_code == 0, done.stderr
    found = [server.next() for _ in range(13)]
    assert [item["body"]["seq"] for item in found] == list(range(13))
    assert [item["id"] for item in found] == list(range(1, 14))
    # facility 13 (log audit): informational is 13 * 8 + 6, an error 13 * 8 + 3
    assert [item["priority"] for item in found] == [110] * 12 + [107]
    assert {item["time"] for item in found} == {"2027-01-15T08:00:00.000Z"}
    assert all(item["event"] == item["body"]["event"] for item in found)
    # the clean end was acknowledged by the receiver's own close: nothing is repeated
    assert CliRunner().invoke(app, words(log, server, authority)).exit_code == 0
    assert server.all() == []


def test_T25_a_receiver_of_another_ca_or_name_is_refused(
    log: Path, serve: Callable[..., LogServer], authority: Authority, tmp_path: Path
) -> None:
    server = serve()
    stranger = Authority(tmp_path, "other_ca")
    refused = CliRunner().invoke(app, words(log, server, stranger))
    assert refused.exit_code == 4 and "its certificate is refused" in refused.stderr
    refused = CliRunner().invoke(app, words(log, server, authority, "--server-name", "elsewhere.example"))
    assert refused.exit_code == 4 and "elsewhere.example" in refused.stderr
    assert server.messages.empty()
    assert CliRunner().invoke(app, words(log, server, authority)).exit_code == 0
    assert server.all() == list(range(13))


def test_a_receiver_that_asks_for_a_certificate(
    log: Path, serve: Callable[..., LogServer], authority: Authority, tmp_path: Path
) -> None:
    server = serve(clients=authority.file)
    refused = CliRunner().invoke(app, words(log, server, authority))
    assert refused.exit_code == 4 and "needs --certificate and --key" in refused.stderr
    wrong, wrong_key = Authority(tmp_path, "other_ca").issue("exporter")
    refused = CliRunner().invoke(
        app, words(log, server, authority, "--certificate", str(wrong), "--key", str(wrong_key))
    )
    assert refused.exit_code == 4 and server.messages.empty()
    certificate, key = authority.issue("exporter")
    taken = words(log, server, authority, "--certificate", str(certificate), "--key", str(key))
    key.chmod(0o644)
    assert "others may read" in CliRunner().invoke(app, taken).stderr
    key.chmod(0o600)
    assert CliRunner().invoke(app, taken).exit_code == 0
    assert server.all() == list(range(13))
    assert server.people[-1]["subject"] == ((("commonName", "exporter"),),)


def sink_for(server: LogServer, authority: Authority, start: Place, **how: Any) -> SyslogSink:
    receiver = Receiver("127.0.0.1", server.port, authority.file, NAME)
    return SyslogSink(receiver, start, "0.1.0", **{"pause": lambda _: True, **how})


def export(log: Path, sink: SyslogSink, reader: LogReader, **how: Any) -> Export:
    return Export(reader, sink, "jsonl", "0.1.0", log.parent / "position", "t", batch_records=1, **how)


def test_a_lost_connection_repeats_and_loses_nothing(
    log: Path, serve: Callable[..., LogServer], authority: Authority
) -> None:
    server = serve(break_after=[3, 4])
    reader = LogReader(log)
    sink = sink_for(server, authority, reader.place)
    export(log, sink, reader).run()
    found = server.all()
    assert set(found) == set(range(13)) and len(found) > 13
    # each connection begins again with what is not known to have arrived; the third one stayed
    assert len(server.people) == 3
    assert found == [0, 1, 2, 0, 1, 2, 3, *range(13)]
    position = read_position(log.parent / "position", log=reader.key, target="t")
    assert position and position.place == reader.place


def test_an_exporter_that_dies_repeats_the_newest_and_loses_nothing(
    log: Path, serve: Callable[..., LogServer], authority: Authority
) -> None:
    server = serve()
    reader = LogReader(log)
    sink = sink_for(server, authority, reader.place, resend_messages=4)
    first = export(log, sink, reader)
    # as far as kill -9 lets it come: everything is sent and nothing ended
    first.sink.finish = lambda: None  # type: ignore[method-assign]
    first.run()
    assert [server.next()["body"]["seq"] for _ in range(13)] == list(range(13))
    kept = read_position(log.parent / "position", log=reader.key, target="t")
    assert kept is not None and kept.place.seq <= 9
    sink._drop()
    again = LogReader(log, kept.place)
    export(log, sink_for(server, authority, again.place), again).run()
    assert server.all() == list(range(kept.place.seq, 13))


def test_attempts_are_spaced_further_and_further_and_end_when_told(log: Path, authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    waited: list[float] = []

    def pause(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) < 10

    reader = LogReader(log)
    receiver = Receiver("127.0.0.1", port, authority.file, NAME)
    sink = SyslogSink(receiver, reader.place, "0.1.0", pause=pause)
    with pytest.raises(UnreachableError, match="stopped while waiting"):
        export(log, sink, reader).run()
    limits = [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert all(limit / 2 <= seconds <= limit for seconds, limit in zip(waited, limits, strict=True))
    position = read_position(log.parent / "position", log=reader.key, target="t")
    assert position is not None and position.place == Place()


def test_follow_goes_on_until_sigterm_and_ends_cleanly(
    log: Path, serve: Callable[..., LogServer], authority: Authority
) -> None:
    server = serve()
    command = [sys.executable, "-m", "fedsilo.launch", "fedsilo", "audit", *words(log, server, authority, "--follow")]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE) as exporter:
        assert [server.next()["body"]["seq"] for _ in range(13)] == list(range(13))
        with open_log(log) as daemon:
            append_send(daemon, 9)
        assert [server.next()["body"]["seq"] for _ in range(2)] == [13, 14]
        exporter.send_signal(signal.SIGTERM)
        answer, _ = exporter.communicate(timeout=WAIT_SECONDS)
    assert exporter.returncode == 0
    assert json.loads(answer)["data"] | {"position": "", "to": ""} == {
        "to": "", "format": "jsonl", "records": 15, "next": 15, "position": "",
    }  # fmt: skip
    assert CliRunner().invoke(app, words(log, server, authority)).exit_code == 0
    assert server.all() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("logs.example", ("logs.example", 6514)),
        ("logs.example:10514", ("logs.example", 10514)),
        ("[::1]:99", ("::1", 99)),
        ("::1", ("::1", 6514)),
    ],
)
def test_an_address_is_read(text: str, expected: tuple[str, int]) -> None:
    assert receiver_address(text) == expected


@pytest.mark.parametrize("text", ["", ":99", "host:", "host:port", "host:0", "host:65536"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        receiver_address(text)


def test_a_ca_file_that_is_none_is_named(log: Path, authority: Authority, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing\n")
    with pytest.raises(UsageError, match=r"empty\.pem holds no certificate"):
        Receiver("localhost", 1, empty).tls()
    with pytest.raises(NotAllowedError, match="others may read"):
        certificate, key = authority.issue("exporter")
        key.chmod(0o640)
        Receiver("localhost", 1, authority.file, certificate=certificate, key=key).tls()
