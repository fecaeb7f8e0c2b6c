"""`fedsilo policy`: from a model folder, public files and a federation bundle to a policy that loads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.cli.policy import app, dated
from fedsilo.protocol.codec import canonical_json
from policies.load import load_policy
from policies.schema import schema_from_json
from tests.policies.setting import COORDINATOR, PEERS
from tests.policies.test_model_folder import whole_folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    whole_folder(tmp_path / "model", max_position_embeddings=4096)
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


def test_check_says_how_many_own_patterns_there_are_and_refuses_a_policy_without_their_file(site: Path) -> None:
    assert _init(site)[0] == 0
    policy, patterns = site / "policy.yaml", site / "site.patterns.yaml"
    assert _run(site, "check", str(policy))[1]["data"]["custom_patterns"] == ""
    with policy.open("a") as file:
        file.write("text_screens:\n  pii_basic: {patterns: [email], custom_file: site.patterns.yaml}\n")
    code, answer = _run(site, "check", str(policy))
    assert (code, answer["error"]["code"]) == (2, "NO_CUSTOM_FILE")
    patterns.write_text("patterns:\n  - {name: badge, pattern: 'badge ['}\n")
    code, answer = _run(site, "check", str(policy))
    assert code == 2 and answer["error"]["message"].startswith(f"{patterns}:2: patterns.0.pattern: ")
    patterns.write_text("patterns:\n  - {name: badge, pattern: 'badge [0-9]+'}\n")
    code, answer = _run(site, "check", str(policy))
    assert (code, answer["data"]["custom_patterns"]) == (0, "1 own pattern of site.patterns.yaml")


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


@pytest.mark.parametrize(("more", "said"), [(0, True), (1, False)])
def test_T20_check_says_that_half_of_the_peers_can_agree_on_their_own(site: Path, more: int, said: bool) -> None:
    assert _init(site)[0] == 0
    policy = site / "policy.yaml"
    text = policy.read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("  min_peers: "))
    policy.write_text(text.replace(line, f"  min_peers: {len(PEERS) // 2 + more}"))
    code, answer = _run(site, "check", str(policy))
    found = [notice for notice in answer["data"]["notices"] if notice.startswith("T20: ")]
    assert code == 0 and bool(found) is said
    assert not said or f"min_peers of at least {len(PEERS) // 2 + 1} " in found[0]


@pytest.mark.parametrize("missing", ["model", "public.jsonl", "federation.json"])
def test_init_names_what_is_missing(site: Path, missing: str) -> None:
    (site / missing).rename(site / "elsewhere")
    code, answer = _init(site)
    assert code in (2, 8) and missing in answer["error"]["message"]
    assert not (site / "policy.yaml").exists()


def test_no_policy_names_the_way_to_one(site: Path) -> None:
    code, answer = _run(site, "check", str(site / "policy.yaml"))
    assert (code, answer["error"]["code"]) == (8, "NOT_FOUND")
    assert "fedsilo policy init --ruleset pubswap" in answer["error"]["hint"]


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

    (checked, told), (shown, told_too), (explained, (unverified,)) = answers()
    assert checked == shown == explained and "verif" in unverified
    assert told_too and set(told_too) <= set(told) and all("bytes of text" in each for each in told_too)
    schema = schema_from_json((site / "lora_schema.json").read_bytes(), "lora_schema.json")
    assert shown[0]["kind"] == "lora.factors" and shown[0]["payload_bytes"] == schema.payload_bytes
    (site / "lora_schema.json").unlink()
    _, (shown, (*_, why)), (explained, (_, why_too)) = answers()
    limit = load_policy(policy.read_bytes(), "policy.yaml").file.budgets.message_bytes
    assert shown[0]["payload_bytes"] == explained[0]["payload_bytes"] == limit > schema.payload_bytes
    assert why == why_too and "there is no such LoRA schema" in why


@pytest.mark.parametrize("command", [("diff", "GOOD"), ("show",), ("hash",)])
def test_a_file_that_is_named_and_not_there_is_not_found_and_perhaps_another(
    site: Path, command: tuple[str, ...]
) -> None:
    assert _init(site)[0] == 0
    good = str(site / "policy.yaml")
    words = [word.replace("GOOD", good) for word in command]
    code, answer = _run(site, *words, str(site / "nope.yaml"))
    assert (code, answer["error"]["message"]) == (8, f"{site / 'nope.yaml'} does not exist")
    assert answer["error"]["hint"].startswith("silo.yaml names a site's own under `policy`; ")
    assert _run(site, *words, good)[0] == 0


def test_T07_init_and_check_warn_where_no_plan_gives_the_records_that_the_policy_asks_for(site: Path) -> None:
    sizes = ("--local-steps", "4", "--prompts-per-step", "4")
    arguments = ("init", "--ruleset", "pubswap-strict", "--model", str(site / "model"), "--public",
                 str(site / "public.jsonl"), "--federation", str(site / "federation.json"), "--rank", "2",
                 "--out", str(site / "policy.yaml"))  # fmt: skip
    code, made = _run(site, *arguments, *sizes)
    assert code == 0
    lines = (site / "policy.yaml").read_text().splitlines()
    at = {key: 1 + next(number for number, line in enumerate(lines) if line.strip().startswith(key))
          for key in ("min_records: 64", "local_steps:", "prompts_per_step:")}  # fmt: skip
    code, checked = _run(site, "check", str(site / "policy.yaml"))
    for answer in (made, checked):
        (told,) = (warning for warning in answer["warnings"] if "min_records" in warning)
        assert (
            f":{at['min_records: 64']}: min_records is 64 and no allowed plan gives a round more than 16 records"
            in told
        )
        assert (
            f"local_steps 4 at line {at['local_steps:']}, prompts_per_step 4 at line {at['prompts_per_step:']}" in told
        )
    # 20 steps of which every second is public: 40 of 80 records
    code, made = _run(site, *arguments, "--local-steps", "20", "--prompts-per-step", "4", "--force")
    assert code == 0 and any("a round 40 records where 10 of its steps are public" in each for each in made["warnings"])
    code, made = _run(site, *arguments, "--local-steps", "32", "--prompts-per-step", "4", "--force")
    assert code == 0 and not any("min_records" in warning for warning in made["warnings"])


@pytest.mark.parametrize("words", ["check {}", "show {}", "hash {}", "diff {} {}", "test cases --policy {}"])
def test_a_missing_policy_is_not_found_and_a_directory_or_a_pipe_is_said_to_be_one(site: Path, words: str) -> None:
    os.mkfifo(site / "pipe")
    for name, said in (("model", "it is a folder"), ("pipe", "it is a pipe")):
        code, answer = _run(site, *words.replace("{}", str(site / name)).split())
        assert code == 2 and said in answer["error"]["message"] and answer["error"]["hint"]
    code, answer = _run(site, *words.replace("{}", str(site / "none.yaml")).split())
    assert (code, answer["error"]["code"]) == (8, "NOT_FOUND")
    assert "fedsilo policy init" in answer["error"]["hint"]


def test_a_pipe_among_the_cases_is_refused_at_once(site: Path) -> None:
    assert _init(site)[0] == 0
    os.mkfifo(site / "pipe")
    code, answer = _run(site, "test", str(site / "pipe"), "--policy", str(site / "policy.yaml"))
    assert code == 2 and "it is a pipe" in answer["error"]["message"]


@pytest.mark.parametrize("alpha", ["nan", "inf", "-1"])
def test_an_alpha_that_is_no_number_is_refused(site: Path, alpha: str) -> None:
    code, answer = _run(site, "schema", "make", "--model", str(site / "model"), "--out", str(site / "s.json"),
                        "--alpha", alpha)  # fmt: skip
    assert code == 2 and "not a LoRA schema" in answer["error"]["message"] and not (site / "s.json").exists()


def test_what_explain_shows_of_validity_are_dates() -> None:
    times = dated("valid", [1_800_000_000, 1_800_000_001.5])
    assert times == ["2027-01-15T08:00:00Z", "2027-01-15T08:00:01Z"] and dated("rounds", 3) == 3


@pytest.mark.parametrize("charter_rate", ["0.0015", ""])
def test_T20_init_for_a_smaller_plan_lets_in_what_peers_with_larger_deltas_make(site: Path, charter_rate: str) -> None:
    """The charter's limit counts; in a bundle without one, that of the size which the bundle states (here: 0.001)."""
    assert _init(site, *(("--learning-rate", charter_rate) if charter_rate else ()))[0] == 0
    policy = site / "policy.yaml"
    federation = load_policy(policy.read_bytes(), "charter.yaml")
    (peers,) = (block.max_l2 for block in federation.file.egress.updates.values())
    if charter_rate:
        bundle = json.loads((site / "federation.json").read_text())
        bundle |= {"charter": policy.read_text(), "charter_sha256": federation.digest}
        (site / "federation.json").write_text(json.dumps(bundle))

    def own_and_step(learning_rate: str) -> tuple[float, float]:
        assert _init(site, "--force", "--learning-rate", learning_rate)[0] == 0
        made = load_policy(policy.read_bytes(), "policy.yaml").file
        (own,) = (block.max_l2 for block in made.egress.updates.values())
        assert made.ingress.global_adapter is not None
        return own, made.ingress.global_adapter.max_step_l2

    own, step = own_and_step("0.0005")
    assert own < peers == step
    # and where this site's own deltas are the longest, those get in
    own, step = own_and_step("0.002")
    assert own == step > peers
