"""A real coordinator's folder for the tests that need no silo's process: everything but its keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedsilo.files.site_policy import read_ruleset
from fedsilo.files.task_files import read_tasks
from policies.render import render_policy
from tests.policies.setting import HASH, SCHEMA, site_facts


def write_coordinator(folder: Path, silos: Sequence[str]) -> Path:
    """Write public set, charter, schema and configuration of cardio-net's coordinator `main`; returns the last.

    Args:
        folder: holds `id/`, as `provision_site` makes it.
        silos: listed names.
    """
    rows = [f'{{"id":"p{row}","prompt":"{row}","answer":"{row}","topic":"rotate"}}' for row in range(10)]
    (folder / "public.jsonl").write_text("\n".join(rows) + "\n")
    public = read_tasks(folder / "public.jsonl").sha256
    facts = site_facts(public_sha256=public, valid_from="2025-01-01T00:00:00Z", valid_until="2099-01-01T00:00:00Z")
    (folder / "charter.yaml").write_text(render_policy(read_ruleset("pubswap"), facts))
    (folder / "lora_schema.json").write_bytes(SCHEMA.canonical())
    config = folder / "coordinator.yaml"
    config.write_text(
        f"""\
coordinator: main
federation: cardio-net
listen: "127.0.0.1:0"
state_dir: state
identity: {{certificate: id/main.crt, key: id/main.key, signing_key: id/main.ed25519,
           federation_ca: id/federation_ca.crt, site_ca: id/site_ca.crt, operators: id/roles.yaml}}
charter: charter.yaml
silos: [{", ".join(silos)}]
expected: {{base_model_sha256: "{HASH["base"]}", tokenizer_sha256: "{HASH["tokenizer"]}",
           template_sha256: "{HASH["template"]}", lora_schema: lora_schema.json}}
public: {{path: public.jsonl, sha256: "{public}", verifier: exact}}
held_out: {{sha256: "{HASH["held"]}"}}
"""
    )
    return config
