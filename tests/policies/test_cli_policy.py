"""`fedsilo policy`: from a model folder, public files and a federation bundle to a policy that loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.launch.cli_policy import app
from fedsilo.treaty.wire.codec import canonical_json
from policies.load import load_policy
from policies.schema import schema_from_json
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
    assert code == 0 and [warning.split(" bytes of ")[1][:4] for warning in answer["warnings"]] == ["text", "text"]
    capacity = {row["kind"]: row["bits"] for row in answer["data"]["capacity_per_round"]}
    assert set(capacity) == {"lora.factors", "public.responses", "metrics.eval", "control.*"}
    assert 0 < capacity["metrics.eval"] < capacity["public.responses"]
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


def test_check_show_and_explain_agree_on_the_worst_case_and_say_why_where_they_cannot(site: Path) -> None:
    assert _init(site)[0] == 0
    policy = site / "policy.yaml"
    (site / "log" / "keys").mkdir(parents=True)
    record = {
        "v": 1, "seq": 0, "salt": "00" * 16, "t": 1, "boot": "b", "mono": 1, "actor": PEERS[0],
        "event": "egress.decision", "kind": "control.poll", "run": "", "round": 0, "step": 0, "decision": "deny",
        "link": {"previous": "0" * 64},
        "facts": {"final": {"kind": "control.poll", "direction": "egress"}, "history": {}},
    }  # fmt: skip
    (site / "log" / f"{0:012}.jsonl").write_text(canonical_json(record).decode() + "\n")

    def answers() -> list[tuple[Any, list[str]]]:
        found = []
        for arguments in (
            ("check", str(policy)),
            ("show", str(policy)),
            ("explain", "0", "--log", str(site / "log"), "--policy", str(policy)),
        ):
            answer = _run(site, *arguments)[1]
            found.append(((answer["data"] or {}).get("worst_case_per_round"), answer["warnings"]))
        return found

    (checked, _), (shown, quiet), (explained, quiet_too) = answers()
    assert checked == shown == explained and quiet == quiet_too == []
    schema = schema_from_json((site / "lora_schema.json").read_bytes(), "lora_schema.json")
    assert shown[0]["kind"] == "lora.factors" and shown[0]["payload_bytes"] == schema.payload_bytes
    (site / "lora_schema.json").unlink()
    _, (shown, (why,)), (explained, (why_too,)) = answers()
    limit = load_policy(policy.read_bytes(), "policy.yaml").file.budgets.message_bytes
    assert shown[0]["payload_bytes"] == explained[0]["payload_bytes"] == limit > schema.payload_bytes
    assert why == why_too and "there is no such LoRA schema" in why


@pytest.mark.parametrize("command", [("diff", "GOOD"), ("show",), ("hash",)])
def test_a_file_that_is_named_and_not_there_is_not_found_and_no_reason_to_make_a_policy(
    site: Path, command: tuple[str, ...]
) -> None:
    assert _init(site)[0] == 0
    good = str(site / "policy.yaml")
    words = [word.replace("GOOD", good) for word in command]
    code, answer = _run(site, *words, str(site / "nope.yaml"))
    assert (code, answer["error"]["message"]) == (8, f"{site / 'nope.yaml'} does not exist")
    assert answer["error"]["hint"] == ""
    assert _run(site, *words, good)[0] == 0
