"""A silo that does not fit, and certificates that are wrong, against the real daemons: the line at both ends."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from fedsilo.demo.provision import enrol, init_ca
from silo.guard.channel import connection_fault
from silo.guard.messages import TlsFiles
from tests.loopback.bad_input.place import HASH, Place, command, daemon, edit

# ---- joining --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_silo_with_another_tokenizer_or_load_type_is_refused_at_join_with_both_values_at_both_ends(
    place: Place,
) -> None:
    other = place.root / "model_b"
    shutil.copytree(place.root / "model", other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "note": "another"}))
    edit(place.config, f'"{place.root}/model"', f'"{other}"')
    seen = re.search(rf"tokenizer_sha256 is ({HASH}); .* pins ({HASH})", place.start().error)
    assert seen
    got, expected = seen.groups()
    place.policy.write_text(place.policy.read_text().replace(expected, got))  # the site agrees with itself
    second = place.root / "hospital_b" / "silo.yaml"
    edit(second, "load: fp32", "load: bf16")

    with daemon("coordinator", "start", "--config", place.coordinator) as coordinator:
        coordinator.ready()
        with ThreadPoolExecutor(2) as both:
            tokenizer = both.submit(place.start)
            load = both.submit(command, "silo", "start", "--config", second)
        assert tokenizer.result().exit_code == 1
        assert f"tokenizer_sha256: it expects {expected}, here it is {got} [TOKENIZER_MIS" in tokenizer.result().error
        assert f"ours is the model folder {other}; use what the federation agreed on" in tokenizer.result().hint
        assert load.result().exit_code == 1
        assert "load: it expects fp32, here it is bf16 [LOAD_MISMATCH]" in load.result().error
        listed = command("coordinator", "silos", "list", "--config", place.coordinator).stdout
        assert f"TOKENIZER_MISMATCH: tokenizer_sha256 expected {expected}, got {got}" in listed
        assert "LOAD_MISMATCH: load expected fp32, got bf16" in listed
        coordinator.process.terminate()
        said = coordinator.ended().stderr
    assert f"refused spiffe://demo/silo/hospital_a: tokenizer_sha256 differs: expected {expected}, got {got} [T" in said
    assert "refused spiffe://demo/silo/hospital_b: load differs: expected fp32, got bf16 [LOAD_MISMATCH]" in said
    log = (place.state / "logs" / "guard.log").read_text()
    assert re.search(rf"here it is {got}; ours is the model folder .* \[TOKENIZER_MISMATCH\]$", log, re.M)


# ---- certificates ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_T28_a_wrong_ca_and_T26_an_expired_certificate_are_refused_with_a_line_at_both_ends(place: Place) -> None:
    root = place.root
    init_ca(root / "strangers", name="demo", kind="federation")
    enrol(root / "strangers", root / "stranger", "silo/hospital_a")
    enrol(root / "federation_ca", root / "late", "silo/hospital_a", lifetime=timedelta(milliseconds=1))
    trust = root / "federation_ca" / "ca.crt"
    with daemon("coordinator", "start", "--config", place.coordinator) as coordinator:
        coordinator.ready()

        def refused(folder: str, trusted: Path = trust) -> tuple[str, str]:
            files = TlsFiles(root / folder / "hospital_a.crt", root / folder / "hospital_a.key", trusted)
            fault = connection_fault(place.address, files)
            assert fault is not None
            return fault.line, coordinator.until("in the TLS handshake")

        ours, theirs = refused("stranger")
        assert f"does not accept this silo's certificate {root}/stranger/hospital_a.crt (" in ours
        assert "wrong CA: the certificate spiffe://demo/silo/hospital_a (" in ours
        assert re.search(
            r"refused a connection from 127.0.0.1:\d+ in .*: its certificate is not signed by this federation's CA",
            theirs,
        )
        ours, theirs = refused("late")
        assert re.search(
            r"does not accept .*late/hospital_a.crt \(.*\): .* expired at 20\d\d-.*Z, now is .*get a fresh", ours
        )
        assert "its certificate is expired" in theirs
        ours, theirs = refused("stranger", root / "strangers" / "ca.crt")
        assert "its certificate is refused: wrong CA: the certificate spiffe://demo/coordinator/main (" in ours
        assert f"but by another CA of that name; trusted is {root}/strangers/ca.crt; is coordinator.address" in ours
        assert "it broke off; it may not accept this coordinator's certificate" in theirs
        assert "it was shown the certificate" in theirs and "of spiffe://demo/coordinator/main, " in theirs

        # the counterpart: the right certificate, as a command
        joined = command("silo", "join", "--config", place.config)
        assert joined.exit_code == 0 and "key as pinned" in joined.stdout
        events = command("coordinator", "logs", "--config", place.coordinator).stdout
        assert re.search(r"connection.refused cause=its certificate is expired.* peer=127.0.0.1:\d+", events)
        coordinator.process.terminate()
        done = coordinator.ended()
        assert done.exit_code == 0 and "handshake_manager" not in done.stderr
        assert not re.search(r"^[IWEF]\d{4} ", done.stderr, re.M)  # not a line in the C library's own words


@pytest.mark.slow
def test_T26_a_silo_whose_own_certificate_is_expired_or_of_another_ca_does_not_start(place: Place) -> None:
    identities = place.root / "hospital_a" / "id"
    init_ca(place.root / "strangers", name="demo", kind="federation")
    for authority, lifetime, words, code in (
        ("federation_ca", timedelta(milliseconds=1), "expired", "CERTIFICATE_TIME"),
        ("strangers", timedelta(days=1), "not issued by", "NOT_ALLOWED"),
    ):
        fresh = place.root / f"from_{authority}"
        enrol(place.root / authority, fresh, "silo/hospital_a", lifetime=lifetime)
        for path in fresh.glob("hospital_a.*"):
            shutil.copy(path, identities / path.name)
        done = place.start()
        assert done.exit_code == 4
        assert words in done.error and f"{identities}/hospital_a.crt" in done.error
        checked = command("silo", "check", "--config", place.config, "--json")
        answer = json.loads(checked.stdout)
        assert (checked.exit_code, answer["error"]["code"]) == (4, code)
        results = {row["check"]: row for row in answer["data"]["checks"]}
        assert answer["error"]["message"] == f"1 of {len(results)} checks failed, 5 not tried: certificate"
        assert [name for name, row in results.items() if row["ok"] is False] == ["certificate"]
        assert words in results["certificate"]["found"]
        untried = {name: row["found"] for name, row in results.items() if row["ok"] is None}
        assert untried == {
            "pinned files": "not tried: it needs certificate",
            **dict.fromkeys(
                ("coordinator", "prompts", "prompts in two places", "verifiers"), "not tried: it needs pinned files"
            ),
        }  # fmt: skip


@pytest.mark.slow
def test_T31_a_key_that_does_not_fit_or_that_others_may_read_is_refused_before_anybody_is_dialled(place: Place) -> None:
    """One end only: the coordinator hears nothing."""
    key = place.root / "hospital_a" / "id" / "hospital_a.key"
    own = key.read_bytes()
    with socket.create_server(("127.0.0.1", place.port)) as listener:
        key.chmod(0o640)
        done = place.start()
        assert done.exit_code == 4 and str(key) in done.error and "0640" in done.error
        assert f"chmod 600 {key}" in done.hint
        key.chmod(0o600)
        key.write_bytes((place.root / "hospital_b" / "id" / "hospital_b.key").read_bytes())
        done = place.start()
        assert done.exit_code == 4
        assert "the TLS key does not match the certificate of spiffe://demo/silo/hospital_a" in done.error
        assert str(key.with_suffix(".crt")) in done.error
        assert done.hint == "hint: use the key the request was made with"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    key.write_bytes(own)
    log = (place.state / "logs" / "guard.log").read_text()
    assert "CRITICAL hospital_a ended: " in log and "; use the key the request was made with [NOT_ALLOWED]" in log


@pytest.mark.slow
def test_T26_T30_a_coordinator_with_an_expired_certificate_is_refused_before_anything_is_said(place: Place) -> None:
    folder = place.root / "late"
    enrol(
        place.root / "federation_ca", folder, "coordinator/main", ip_addresses=["127.0.0.1"],
        lifetime=timedelta(milliseconds=1),
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "main.crt", folder / "main.key")
    with socket.create_server(("127.0.0.1", place.port)) as listener, ThreadPoolExecutor(1) as pool:
        got = pool.submit(_serve, listener, context)
        done = command("silo", "join", "--config", place.config)
        with daemon("silo", "start", "--config", place.config) as silo:
            line = silo.until(f"coordinator {place.address}: its certificate is refused: ")
            assert "expired at 20" in line and "coordinator.address in silo.yaml" in line
        listener.shutdown(socket.SHUT_RDWR)  # ends the accept that waits
    assert done.exit_code == 3
    assert "its certificate is refused: the certificate spiffe://demo/coordinator/main (" in done.error
    assert re.search(r"\) expired at 20\d\d-.*Z, now is 20\d\d-.*Z; trusted is .*/federation_ca.crt", done.error)
    assert "coordinator.address in silo.yaml" in done.hint and "get a fresh one" in done.hint
    assert got.result() == b""


def _serve(listener: socket.socket, context: ssl.SSLContext) -> bytes:
    """What silos said after the handshake, all in all."""
    said = b""
    while True:
        try:
            plain, _ = listener.accept()
        except OSError:
            return said
        with contextlib.suppress(OSError), plain, context.wrap_socket(plain, server_side=True) as connection:
            said += connection.recv(100)
