"""`fedsilo run verify`: a signed record and no other, and the adapter that stands beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from certs.encoding import public_key_pem
from fedsilo.cli import run as cli_run
from fedsilo.protocol.errors import NotFoundError
from tests.simulated.coordinator_parts import federation, joined, until_quiet


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a coordinator leaves of a run, and its key."""
    folder = tmp_path_factory.mktemp("finished")
    house, silos = joined(folder)
    until_quiet(silos)
    house.close()
    (folder / "own.pub").write_bytes(public_key_pem(house.key.public_key()))
    return folder


def verified(file: Path, key: Path) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(cli_run.app, ["verify", str(file), "--key", str(key), "--json"])
    envelope = json.loads(done.stdout)
    assert envelope["ok"] == (done.exit_code == 0)
    return done.exit_code, envelope["data"] or {}


def test_run_verify_takes_the_signed_record_and_no_other(finished: Path, tmp_path: Path) -> None:
    record, own = finished / "runs" / "run-1" / "run_record.json", finished / "own.pub"
    foreign, changed = tmp_path / "foreign.pub", tmp_path / "changed.json"
    foreign.write_bytes(public_key_pem(Ed25519PrivateKey.generate().public_key()))
    text = record.read_text()
    assert text.count('"quorum": 2') == 1
    changed.write_text(text.replace('"quorum": 2', '"quorum": 1'))
    code, data = verified(record, own)
    assert code == 0 and data["state"] == "finished"
    assert data["adapter_sha256"] == json.loads(text)["record"]["adapter_sha256"]
    for file, key in ((changed, own), (record, foreign), (own, own)):
        assert verified(file, key)[0] == 7, (file, key)
    assert verified(tmp_path / "none.json", own)[0] == NotFoundError.exit_code != 7


def of_folder(folder: Path, **changes: Any) -> None:
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def shadowed(folder: Path) -> None:
    """Other values under the names that peft loads, and the right ones beside them under names that it does not."""
    right = load_file(folder / "adapter_model.safetensors")
    beside = {name.removeprefix("base_model.model."): values for name, values in right.items()}
    save_file({**{name: values + 1 for name, values in right.items()}, **beside}, folder / "adapter_model.safetensors")


def changed(folder: Path, change: Callable[[bytes], bytes]) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(change(weights.read_bytes()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: None, "the one of the record"),
        (lambda folder: of_folder(folder, base_model_name_or_path="/models/mine"), "the one of the record"),
        (lambda folder: (folder / "README.md").write_text(""), "the one of the record, "),
        (shutil.rmtree, "not there, not looked at"),
        (lambda folder: changed(folder, lambda data: data[:-1] + bytes([data[-1] ^ 1])), "another"),
        (shadowed, "not one that can be told"),
        (lambda folder: changed(folder, lambda data: data[:-1]), "not one that can be told"),
        (lambda folder: changed(folder, lambda data: b""), "not one that can be told"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "not one that can be told"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "not one that can be told"),
        (lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000), "not one that can be told"),
        # the same values, used in another way
        *(
            (lambda folder, each=each: of_folder(folder, **each), "not one that can be told")
            for each in (
                {"use_rslora": True}, {"alpha_pattern": {".*": 1000}}, {"target_modules": ["nothing"]}, {"r": 1},
                {"lora_alpha": 10**400}, {"peft_type": "LOHA"},
            )
        ),
    ],
)  # fmt: skip
def test_run_verify_looks_at_the_adapter_beside_a_record(
    finished: Path, tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    run = tmp_path / "copy" / "runs" / "run-1"
    change(run / "adapter")
    code, data = verified(run / "run_record.json", tmp_path / "copy" / "own.pub")
    assert data["adapter"].startswith(said)
    assert code == (0 if said.startswith(("the one", "not there")) else 7)
    assert ("not looked at: README.md" in data["adapter"]) == (run / "adapter" / "README.md").exists()


def test_run_verify_takes_no_adapter_for_that_of_a_run_that_has_none(tmp_path: Path) -> None:
    house, _ = federation(tmp_path)
    house.submit()
    house.submissions.abort("run-1")  # it waits for its silos
    house.close()
    own, run = tmp_path / "own.pub", tmp_path / "runs" / "run-1"
    own.write_bytes(public_key_pem(house.key.public_key()))
    code, data = verified(run / "run_record.json", own)
    assert (code, data["adapter"], data["adapter_sha256"]) == (0, "not there, not looked at", "")
    (run / "adapter").mkdir()
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"any")
    code, data = verified(run / "run_record.json", own)
    assert (code, data["adapter"]) == (7, "of no round of this run")
