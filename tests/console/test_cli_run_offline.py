"""`fedsilo run` where no coordinator runs, or with another file than was asked for: the hint leads to what is there."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from typer.testing import CliRunner

from certs.encoding import load_signing_public_key
from coordinator.config import load_config
from fedsilo.cli import run as cli_run
from fedsilo.files.durable import lock_exclusively
from fedsilo.files.identity_files import load_coordinator_key
from fedsilo.protocol.errors import NotAllowedError
from tests.coordinator_folder import write_coordinator
from tests.simulated.coordinator_parts import SILOS


def refused(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli_run.app, [*words, "--json"])
    assert done.exit_code != 0
    error: dict[str, Any] = json.loads(done.stdout)["error"]
    return error


@pytest.mark.parametrize(("run", "is_there"), [("run-1", True), ("run-2", False), ("../runs/run-1", False)])
def test_an_ended_run_can_be_copied_where_the_coordinator_is_stopped(tmp_path: Path, run: str, is_there: bool) -> None:
    config = write_coordinator(tmp_path, SILOS)
    folder = load_config(config).state_dir / "runs" / "run-1"
    folder.mkdir(parents=True)
    (folder / "run_record.json").write_text("{}")
    error = refused("export", run, str(tmp_path / "out"), "--config", str(config))
    assert error["code"] == "UNREACHABLE" and (f"copy {folder}:" in error["hint"]) == is_there
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("runs", [False, True])
def test_a_folder_without_a_record_and_a_coordinator_that_runs_are_no_reason_to_copy(
    tmp_path: Path, runs: bool
) -> None:
    config = write_coordinator(tmp_path, SILOS)
    folder = load_config(config).state_dir / "runs" / "run-1"
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        if runs:
            (folder / "run_record.json").write_text("{}")
            stack.enter_context(lock_exclusively(load_config(config).state_dir / "lock"))
        error = refused("export", "run-1", str(tmp_path / "out"), "--config", str(config))
    assert error["code"] == "UNREACHABLE" and "copy" not in error["hint"]


def test_a_certificate_is_no_signing_key_and_is_named(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate().public_key()
    assert load_signing_public_key(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)) == key
    (tmp_path / "other.crt").write_bytes(b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n")
    with pytest.raises(NotAllowedError, match="a certificate, and no message-signing public key") as told:
        load_coordinator_key(tmp_path / "other.crt")
    assert "id/coordinator.pub" in told.value.hint and str(tmp_path / "other.crt") in told.value.message
    with pytest.raises(NotAllowedError, match="not PEM"):
        load_signing_public_key(b"nothing")
