"""Which run `silo report benefit` is about, and why it refuses; and `fedsilo run verify`: a signed record and no
other, and the adapter beside it. Each refusal stands beside the case that passes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from certs.encoding import public_key_pem
from fedsilo.cli import run as cli_run
from fedsilo.cli.silo import private_text
from fedsilo.files.durable import lock_exclusively
from fedsilo.protocol.codec import encode_factors, sha256_hex
from fedsilo.protocol.errors import ConflictError, FedSiloError, NotFoundError, OperationError, UsageError
from silo.config import load_config
from silo.guard.adapters import AdapterStore
from silo.guard.ledger import Ledger
from silo.guard.site import LEDGER, LOCK, trained_with
from silo.link import Listener, dial
from silo.report import measure
from silo.report.measure import (
    _address_to_itself,
    _check_split,
    _kept,
    adapter_at_start,
    check_inputs,
    find_run,
    report_benefit,
)
from tests.policies import setting
from tests.simulated.coordinator_parts import federation, joined, until_quiet
from tests.world import Loop

SPLIT, FINAL, START = "5" * 64, "f" * 64, "a" * 64
SETTINGS = '{"load":"fp32","public_verifier":"choice","verifier":"exact"}'


def config_of(folder: Path, share: float = 0.1) -> Any:
    return SimpleNamespace(
        state_dir=folder, source=folder / "silo.yaml", data=SimpleNamespace(holdout_share=share), silo="hospital_a"
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Three runs: one finished, one aborted by its outcome, one under way; one plan was declined."""
    ledger = Ledger(tmp_path / LEDGER)
    for run, state in (("good", "finished"), ("bad", "failed"), ("open", "")):
        ledger.start_run(run, setting.PLAN.model_copy(update={"run": run}).canonical())
        ledger.remember_of_run(run, "split", SPLIT)
        ledger.remember_of_run(run, "trained_with", SETTINGS)
        ledger.remember_of_run(run, "start_adapter", START)
        if state:
            ledger.remember_of_run(run, "final_adapter", FINAL)
            ledger.end_run(run, state)
    ledger.decline_run("declined")
    return ledger


@pytest.mark.parametrize("name", ["", "good"])
def test_the_latest_finished_run_or_the_named_one(tmp_path: Path, ledger: Ledger, name: str) -> None:
    found = find_run(config_of(tmp_path), name)
    assert (found.plan.run, found.split, found.start_digest, found.final_digest) == ("good", SPLIT, START, FINAL)
    assert ledger.run_state("open") == "running"  # the daemon's own connection goes on


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("nobody", NotFoundError, "knows no run 'nobody'"),
        ("bad", NotFoundError, "no adapter here: failed"),
        ("declined", NotFoundError, "no adapter here: declined"),
        ("open", ConflictError, "has not ended"),
    ],
)
def test_other_runs_are_refused(
    tmp_path: Path, ledger: Ledger, name: str, error: type[FedSiloError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        find_run(config_of(tmp_path), name)
    assert "good" in caught.value.hint or name == "open"


def test_a_site_that_took_part_in_nothing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no run"):
        find_run(config_of(tmp_path), "")
    assert not list(tmp_path.iterdir())
    Ledger(tmp_path / LEDGER).close()
    with pytest.raises(NotFoundError, match="no run has finished"):
        find_run(config_of(tmp_path), "")


def test_rows_that_changed_during_the_run_spoil_its_holdout(tmp_path: Path, ledger: Ledger) -> None:
    ledger.remember_of_run("good", "split", SPLIT)  # a restart with the same rows
    assert find_run(config_of(tmp_path), "good").split == SPLIT
    ledger.remember_of_run("good", "split", "6" * 64)
    with pytest.raises(UsageError, match="under way") as caught:
        find_run(config_of(tmp_path), "good")
    assert caught.value.code == "HOLDOUT_CHANGED"


def site_of_run(folder: Path, **changes: str) -> Any:
    """A site as the run had it, but for `changes`."""
    public = SimpleNamespace(verifier=changes.get("public_verifier", "choice"), path=folder / "public.jsonl")
    return SimpleNamespace(
        state_dir=folder, model=SimpleNamespace(path=folder, load=changes.get("load", "fp32")),
        data=SimpleNamespace(verifier=changes.get("verifier", "exact"), public=public), held_out_verifier="choice",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("verifier", r"the data\.verifier exact, this site has math"),
        ("public_verifier", r"the data\.public\.verifier choice, this site has math"),
        ("load", r"the model\.load fp32, this site has other"),
        ("tokenizer_sha256", "the tokenizer "),
        ("template_sha256", "the chat template "),
        ("base_model_sha256", "the base model "),
        ("public_set", "the public set "),
        ("schema", "the LoRA schema "),
    ],
)
def test_local_only_is_trained_with_what_the_run_had(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, change: str, words: str
) -> None:
    finished = find_run(config_of(tmp_path), "good")
    plan = finished.plan
    model = {name: getattr(plan, name) for name in ("base_model_sha256", "tokenizer_sha256", "template_sha256")}
    found = {"public_set": plan.public_set_sha256, "schema": plan.lora.schema_sha256}

    def check(**settings: str) -> None:
        check_inputs(site_of_run(tmp_path, **settings), finished, SimpleNamespace(digest=found["schema"]))  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "site_fingerprints", lambda config: SimpleNamespace(**model))
    monkeypatch.setattr(measure, "read_tasks", lambda path: SimpleNamespace(sha256=found["public_set"]))
    check()
    for values in (model, found):
        if change in values:
            values[change] = "9" * 64
    with pytest.raises(UsageError, match=words) as caught:
        check(**({change: "math" if "verifier" in change else "other"} if change not in model | found else {}))
    assert caught.value.code == "INPUTS_CHANGED"


def test_verifiers_that_changed_during_the_run_spoil_it(tmp_path: Path, ledger: Ledger) -> None:
    ledger.remember_of_run("good", "trained_with", SETTINGS)  # a restart with the same configuration
    assert find_run(config_of(tmp_path), "good").settings == SETTINGS
    ledger.remember_of_run("good", "trained_with", SETTINGS.replace("exact", "math"))
    with pytest.raises(UsageError, match="verifiers") as caught:
        find_run(config_of(tmp_path), "good")
    assert caught.value.code == "INPUTS_CHANGED"


def test_the_guard_remembers_what_a_run_is_trained_with(tmp_path: Path) -> None:
    assert trained_with(site_of_run(tmp_path)) == SETTINGS
    loop = Loop(tmp_path / "a", setting.policy_of(setting.policy_text()))
    try:
        assert loop.bench.ledger.remembered_of_run("run-1", "trained_with") == []
        loop.offer_plan()
        assert loop.bench.ledger.remembered_of_run("run-1", "trained_with") == [SETTINGS]
        loop.restart()
        assert loop.bench.ledger.remembered_of_run("run-1", "trained_with") == [SETTINGS]
    finally:
        loop.close()


def test_while_the_daemon_runs_an_external_trainer_is_its_own(tmp_path: Path) -> None:
    def external(launch: str) -> Any:
        address = f"unix:{tmp_path}/trainer.sock"
        return SimpleNamespace(state_dir=tmp_path, trainer=SimpleNamespace(launch=launch, address=address))

    with lock_exclusively(tmp_path / LOCK):
        with pytest.raises(ConflictError, match="daemon runs and waits at unix:") as caught:
            _address_to_itself(external("external"))
        assert "silo stop" in caught.value.hint
        with _address_to_itself(external("child")):
            pass
    # what a killed daemon left behind, its lock file and its socket, stops nobody
    (tmp_path / "trainer.sock").touch()
    with _address_to_itself(external("external")), pytest.raises(ConflictError, match="is held by process"):
        lock_exclusively(tmp_path / LOCK)  # as the daemon does when it starts


def test_a_listener_takes_a_stale_socket_and_removes_only_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trainer.sock"

    def listener() -> Listener:
        return Listener(f"unix:{path}", user_ids=frozenset({os.getuid()}))

    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(str(path))
    stale.close()  # as after kill -9: the file stays
    first = listener()
    second = listener()  # another process that came to the same place
    first.close()
    assert path.is_socket()
    trainer = dial(f"unix:{path}")
    second.accept(10).close()
    trainer.close()
    second.close()
    assert not path.exists()
    path.touch()
    second.close()
    assert path.exists()


def test_rows_that_changed_since_the_run_are_refused(tmp_path: Path, ledger: Ledger) -> None:
    finished = find_run(config_of(tmp_path), "good")
    ready = {"split": SPLIT, "holdout_rows": 3, "private_rows": 30}
    _check_split(ready, finished)
    for change, code in (({"split": "7" * 64}, "HOLDOUT_CHANGED"), ({"holdout_rows": 0}, "NO_HOLDOUT")):
        with pytest.raises(UsageError) as caught:
            _check_split({**ready, **change}, finished)
        assert caught.value.code == code


def test_without_a_share_nothing_is_asked_of_anybody(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holdout_share is 0") as caught:
        report_benefit(config_of(tmp_path, share=0.0), run="", samples=None, say=lambda line: None)
    assert caught.value.code == "NO_HOLDOUT"
    assert not list(tmp_path.iterdir())


def test_the_initial_adapter_is_kept_or_drawn_again_and_never_another_one(tmp_path: Path, ledger: Ledger) -> None:
    from dataclasses import replace

    from coordinator.aggregate import initial_adapter

    finished = find_run(config_of(tmp_path), "good")
    store = AdapterStore(tmp_path / "adapters")
    drawn = initial_adapter(setting.SCHEMA, finished.plan.seed)
    for digest in ("", sha256_hex(drawn)):
        assert adapter_at_start(replace(finished, start_digest=digest), setting.SCHEMA, store) == drawn
    with pytest.raises(NotFoundError, match="which its seed does not give"):
        adapter_at_start(finished, setting.SCHEMA, store)
    named = finished.plan.model_copy(update={"start_adapter_sha256": "ab" * 32})
    with pytest.raises(NotFoundError, match="which its seed does not give"):
        adapter_at_start(replace(finished, plan=named, start_digest=""), setting.SCHEMA, store)
    other = encode_factors({}, base_digest="", schema_sha256=START, rank=2, scale=1.0, dtype="float32")
    store.keep(sha256_hex(other), other, None)
    assert adapter_at_start(replace(finished, start_digest=sha256_hex(other)), setting.SCHEMA, store) == other


def test_a_kept_adapter_is_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    assert _kept(tmp_path, "in") is None
    path = tmp_path / f"in-{sha256_hex(b'factors')}"
    path.write_bytes(b"factors")
    assert _kept(tmp_path, "in") == b"factors"
    assert _kept(tmp_path, "other") is None
    path.write_bytes(b"factor")
    assert _kept(tmp_path, "in") is None


def test_a_reading_ledger_cannot_write(tmp_path: Path, ledger: Ledger) -> None:
    reading = Ledger(tmp_path / LEDGER, read_only=True)
    assert reading.run_state("good") == "finished"
    with pytest.raises(OperationError, match="readonly"):
        reading.end_run("good", "failed")
    assert ledger.run_state("good") == "finished"
    reading.close()


def test_the_share_is_a_number_up_to_a_half_and_nothing_where_it_is_not_written(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "examples" / "hospital_a.yaml").read_text()
    assert "  holdout_share: 0.1\n" in text
    text = text.replace("prompts: [private]", "prompts: [held_out]")  # which needs none of the rows

    def share_of(line: str) -> float:
        path = tmp_path / "silo.yaml"
        path.write_text(text.replace("  holdout_share: 0.1\n", line))
        return load_config(path).data.holdout_share

    assert (share_of("  holdout_share: 0.5\n"), share_of("")) == (0.5, 0.0)
    for wrong in ("0.51", "-0.1", "some"):
        with pytest.raises(UsageError, match=r"silo\.yaml:\d+: .*holdout_share"):
            share_of(f"  holdout_share: {wrong}\n")


def test_status_says_how_many_rows_are_set_aside() -> None:
    assert private_text({"private_rows": 360, "holdout_rows": 40}) == "360 rows to train on, 40 set aside"
    assert private_text({"private_rows": 400, "holdout_rows": 0}) == "400 rows"


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
        (lambda folder: changed(folder, lambda data: data + bytes(4)), "not one that can be told"),
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
