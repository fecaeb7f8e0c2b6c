"""`fedsilo policy`: from a model folder, public files and a federation bundle to a policy that loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.launch.cli_policy import app
from policies.load import load_policy
from tests.policies.setting import COORDINATOR, PEERS
from tests.policies.test_model_folder import _folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    _folder(tmp_path / "model")
    for name in ("public", "held_out"):
        rows = [{"id": f"{name}{n}", "prompt": f"{n}?", "answer": str(n), "topic": f"t{n % 2}"} for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bundle = {
        "federation": "cardio-net",
        "coordinator_spiffe_id": COORDINATOR,
        "coordinator_address": "127.0.0.1:1",
        "coordinator_signing_key_hex": "00" * 32,
        "federation_ca_pem": "",
        "peers": list(PEERS),
    }
    (tmp_path / "federation.json").write_text(json.dumps(bundle))
    return tmp_path


def _run(site: Path, *arguments: str) -> tuple[int, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def _init(site: Path, *extra: str) -> tuple[int, Any]:
    return _run(
        site, "init", "--ruleset", "pubswap", "--model", str(site / "model"), "--public", str(site / "public.jsonl"),
        "--federation", str(site / "federation.json"), "--held-out", str(site / "held_out.jsonl"),
        "--site", "hospital_a", "--rank", "2", "--alpha", "4", "--out", str(site / "policy.yaml"), *extra,
    )  # fmt: skip


def test_init_writes_a_policy_that_checks(site: Path) -> None:
    code, answer = _init(site)
    assert code == 0, answer
    policy = load_policy((site / "policy.yaml").read_bytes(), "policy.yaml")
    assert policy.digest == answer["data"]["policy_sha256"]
    metrics = policy.file.egress.metrics_eval
    assert metrics is not None and metrics.topics == ("t0", "t1")
    assert policy.file.public_sets["public"].rows == 4
    code, answer = _run(site, "check", str(site / "policy.yaml"))
    assert code == 0 and answer["warnings"] == []
    assert _run(site, "hash", str(site / "policy.yaml"))[1]["data"]["policy_sha256"] == policy.digest
    assert _run(site, "show", str(site / "policy.yaml"))[1]["data"]["policy"]["name"] == "pubswap"
    assert _init(site)[0] == 2  # nothing is overwritten unasked
    assert _init(site, "--force")[0] == 0


def test_check_notices_another_public_set_and_another_schema(site: Path) -> None:
    assert _init(site)[0] == 0
    public = site / "public.jsonl"
    original = public.read_text()
    public.write_text(original.replace('"1?"', '"one?"'))
    code, answer = _run(site, "check", str(site / "policy.yaml"))
    assert code == 2 and "public.jsonl has hash" in answer["error"]["message"]
    public.write_text(original)
    assert _run(site, "schema", "make", "--model", str(site / "model"), "--rank", "3", "--out",
                str(site / "lora_schema.json"), "--force")[0] == 0  # fmt: skip
    code, answer = _run(site, "check", str(site / "policy.yaml"))
    assert code == 2 and "the policy pins" in answer["error"]["message"]


@pytest.mark.parametrize("missing", ["model", "public.jsonl", "federation.json"])
def test_init_names_what_is_missing(site: Path, missing: str) -> None:
    (site / missing).rename(site / "elsewhere")
    code, answer = _init(site)
    assert code in (2, 8) and missing in answer["error"]["message"]
    assert not (site / "policy.yaml").exists()


def test_no_policy_names_the_way_to_one(site: Path) -> None:
    code, answer = _run(site, "check", str(site / "policy.yaml"))
    assert code == 2 and answer["error"]["hint"].startswith("fedsilo policy init --ruleset pubswap")
