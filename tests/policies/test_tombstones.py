"""Kinds that no method sends any more: refused in files, null in digests, and still told apart in old logs."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UsageError
from policies.compare import effective
from policies.history import History
from policies.kinds import policy_file
from policies.load import load_policy
from policies.model import GONE
from policies.replay import replayed
from tests.policies.setting import policy_of, policy_text
from tests.simulated.policy_site import PolicySite, text_of

# A block of each, as a version that had the kind took it.
BLOCKS: dict[str, dict[str, Any]] = {
    "public.rewards": {"set": "public", "max_prompts_per_step": 3, "samples_per_prompt": 4, "per_round": 2},
    "diag.drift": {"fields": {"alpha_max": {"min": 0.0, "max": 1.0, "quantum": 0.25}}, "per_round": 1},
    "count.examples": {"values": {"min": 100.0, "max": 1000.0, "quantum": 100.0}, "per_round": 1},
}
# What such a version measured of a good message, beside what it measured of every message.
MEASURED: dict[str, dict[str, Any]] = {
    "public.rewards": {
        "step": 2, "payload_bytes": 79, "prompts": 2, "prompts_repeated": 0, "prompts_not_of_step": 0,
        "prompts_out_of_order": 0, "prompts_not_in_set": 0, "public_set_sha256": "04" * 32,
        "header_set_sha256": "04" * 32, "samples_max": 3, "plan_samples_per_prompt": 4, "step_is_public": True,
    },
    "diag.drift": {
        "step": 0, "payload_bytes": 45, "diagnostics": [["alpha_max", 0.75], ["alpha_mean", -2.0]],
        "diagnostics_at_fault": 0, "diagnostics_out_of_order": 0,
    },
    "count.examples": {"step": 0, "payload_bytes": 3, "values": [300], "values_at_fault": 0},
}  # fmt: skip
OF_EVERY_MESSAGE: dict[str, Any] = {
    "direction": "egress", "stage": "final", "run": "run-1", "round": 1, "now": 1800000000.0,
    "sender": "spiffe://cardio-net/silo/hospital_a", "sender_expected": True, "run_is_open": True,
    "kind_of_method": True, "open_round": 1, "open_step": 2, "asked_step": 2, "plan_local_steps": 4, "measured": True,
    "fields_at_fault": {},
}  # fmt: skip
# Digests that the version with these kinds gave to policies that name none of them.
DIGESTS = {
    "pubswap": "e8ce129a26834a87f50748486bb480dcb602ff90442a561e2144fb074680e669",
    "knexa": "a8447d088c2173017e91762096ef068ae24a2516e0690a5b2120e859f058b61e",
}
# What it gave to pubswap with all of them; to what that and a narrower charter allow; and to that and one without them.
KEPT = """egress:
  public.rewards: {set: public, max_prompts_per_step: 3, samples_per_prompt: 4, per_round: 2}
  diag.drift: {fields: {alpha_max: {min: 0, max: 1, quantum: 0.25}}, per_round: 1}
  count.examples: {values: {min: 100, max: 1000, quantum: 100}, per_round: 1}
"""
KEPT_DIGESTS = (
    "95c3aeaa392f63d93561fb860a8efefe976f142a09ab2942bcdd6d370b279c1e",
    "a4546d226b022ba5aa73342a1e4b0bc614f2c952031294b353cb943ec60b544a",
    "ae1b8408f95f6c4ffb242ecd7ef473d68b32829b175e6d529ced385f39678006",
)


def test_these_are_the_kinds_that_are_gone() -> None:
    assert set(GONE) == set(BLOCKS)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_policy_file_that_names_one_is_refused_with_its_line(kind: str) -> None:
    text = policy_text().replace("egress:\n", f"egress:\n  {kind}:\n    per_round: 1\n", 1)
    line = text.split("\n").index(f"  {kind}:") + 1
    with pytest.raises(UsageError) as refused:
        load_policy(text.encode(), "policy.yaml")
    assert refused.value.message == f"policy.yaml:{line}: egress.{kind}: no method of this version sends this kind"
    assert refused.value.hint == "take the block out: nothing of that kind leaves or comes in"


@pytest.mark.parametrize("kind", BLOCKS)
def test_no_known_key_is_one_of_them(kind: str) -> None:
    misspelled = policy_text().replace("egress:\n", "egress:\n  lora.factor: {}\n", 1)
    with pytest.raises(UsageError) as refused:
        load_policy(misspelled.encode(), "policy.yaml")
    assert "metrics.eval" in refused.value.hint and kind not in refused.value.hint


@pytest.mark.parametrize("ruleset", DIGESTS)
def test_a_policy_that_names_none_keeps_its_digest_in_which_they_are_null(ruleset: str) -> None:
    policy = policy_of(policy_text(ruleset))
    assert policy.digest == DIGESTS[ruleset]
    content = policy.file.model_dump(mode="json", by_alias=True)
    assert {kind: content["egress"][kind] for kind in GONE} == dict.fromkeys(GONE)
    # what a ledger kept of it is read, with the null and, as a version before the kinds had them, without
    assert policy_file(content) == policy.file
    content["egress"] = {kind: block for kind, block in content["egress"].items() if kind not in GONE}
    assert policy_file(content) == policy.file


def test_a_kept_policy_that_names_them_is_read_without_them_and_keeps_its_digest() -> None:
    text = policy_text().replace("egress:\n", KEPT, 1)
    narrower = text.replace("max: 1000", "max: 500").replace("step: 3, samples", "step: 2, samples")
    own, charter = (load_policy(each.encode(), "policy.yaml", kept=True) for each in (text, narrower))
    plain = policy_of(policy_text())
    assert (own.digest, effective(own, charter).digest, effective(own, plain).digest) == KEPT_DIGESTS
    assert own.file == plain.file


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_silo_whose_last_policy_named_one_starts_without_a_person_once_the_block_is_out(
    kind: str, tmp_path: Path
) -> None:
    place = PolicySite(tmp_path)
    place.policy_is(text_of())
    place.start()
    with closing(place.ledger()) as ledger:
        last = ledger.policy_in_force
        assert last is not None
        content = {**last.content, "egress": {**last.content["egress"], kind: BLOCKS[kind]}}
        before = dataclasses.replace(last, digest="ab" * 32, content=content, logged=last.digest)
        assert before.file is not None and before.content["egress"][kind] == BLOCKS[kind]
        ledger.put_in_force(before)
    assert place.start().how in ("same", "tighter")
    assert place.in_force() == last.digest


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_decision_of_an_old_log_is_judged_again_and_denied_by_its_name_alone(kind: str) -> None:
    facts = {**OF_EVERY_MESSAGE, "kind": kind, **MEASURED[kind]}
    record = {
        "seq": 7, "event": "egress.decision", "kind": kind, "decision": "allow", "reasons": [], "rules": [],
        "facts": {"final": facts, "history": History().to_json()},
    }  # fmt: skip
    again = replayed(record, policy_of(policy_text()))
    assert again.decision is not None and again.changed
    assert (again.decision.verdict, again.decision.reasons) == ("deny", ("KIND_NOT_ALLOWED",))


@pytest.mark.parametrize(
    ("message", "numbers"), [(pb.PublicRewards, {1, 2}), (pb.DiagDrift, {1}), (pb.CountExamples, {1})]
)
def test_their_numbers_are_reserved(message: Any, numbers: set[int]) -> None:
    described = DescriptorProto()
    message.DESCRIPTOR.CopyToProto(described)
    assert {number for each in described.reserved_range for number in range(each.start, each.end)} == numbers
    assert not described.field
