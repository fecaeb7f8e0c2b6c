"""A yes is to what was shown: the guard refuses one that does not say so, or says something else (T36)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.log import AuditLog
from fedsilo.audit.orders import check_orders
from fedsilo.protocol.errors import ConflictError
from silo.guard.answers.release import shown_facts
from silo.guard.ledger import Release
from silo.guard.messages import Held
from silo.guard.releases import Releases
from tests.policies import setting
from tests.protocol.audit_parties import Clock
from tests.security.test_T36_what_people_signed import WORLD
from tests.world import OUR_KEY, Bench, command


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Two persons approve each update."""
    text = setting.policy_text(first_rounds=2)
    place = text.index("  lora.factors:")
    text = text[:place] + text[place:].replace("persons: 1", "persons: 2", 1)
    with closing(Bench(tmp_path / "silo", setting.policy_of(text))) as made:
        yield made


def held(bench: Bench, value: str = "factors") -> Release:
    offered = bench.factors() if value == "factors" else bench.responses()
    assert isinstance(offered, Held)
    return bench.releases.hold(offered, deadline_seconds=None)


def arguments(bench: Bench, release: Release) -> dict[str, Any]:
    return {
        "release": release.id, "digest": release.digest, "policy_digest": bench.gate.policy.digest,
        **bench.opened(release.id),
    }  # fmt: skip


def shown(bench: Bench, release: Release) -> str:
    return str(bench.view(bench.ledger.release(release.id))["shown"])


def test_T36_a_client_that_did_not_fetch_the_facts_cannot_approve(bench: Bench) -> None:
    release = held(bench)
    right = arguments(bench, release)
    for signed, code in ((None, "NOT_SHOWN"), ("", "NOT_SHOWN"), ("0" * 64, "STALE_VIEW"), (7, "STALE_VIEW")):
        with pytest.raises(ConflictError) as refused:
            bench.releases.approve(command("approvals.approve", right | {"shown": signed}))
        assert refused.value.code == code
    assert bench.ledger.approvals(release.id) == [] and bench.events("approval.grant") == []
    assert bench.releases.approve(command("approvals.approve", right))[1] is None  # the counterpart: it counts
    assert len(bench.ledger.approvals(release.id)) == 1


def test_T36_a_no_needs_nothing_shown(bench: Bench) -> None:
    release = held(bench)
    no = {name: value for name, value in arguments(bench, release).items() if name != "shown"}
    bench.releases.reject(command("approvals.reject", no | {"reason_code": "OTHER"}))
    assert bench.ledger.release(release.id).state == "rejected"


def test_T36_what_moves_while_a_release_waits_is_not_in_what_is_signed(bench: Bench) -> None:
    """Else a person who read for a minute could not answer, nor a second one after the first."""
    release = held(bench)
    before = shown(bench, release)
    bench.clock_now += 3600
    bench.releases.defer(
        command("approvals.defer", arguments(bench, release) | {"until_seconds": bench.clock_now + 60}, person="carol")
    )
    bench.releases.approve(command("approvals.approve", arguments(bench, release), person="alice"))
    assert shown(bench, release) == before
    with closing(bench.restart()) as again:
        assert shown(again, release) == before


def test_T36_what_a_person_decides_by_is_in_what_is_signed(bench: Bench) -> None:
    release = held(bench)
    before = shown(bench, release)
    for changed in (
        replace(release, facts={**release.facts, "records": 7}), replace(release, persons=1),
        replace(release, revision=2), replace(release, payload_bytes=release.payload_bytes + 1),
        replace(release, recorded={**release.recorded, "sha256": "0" * 64}), replace(release, id="r1/hospital_a/7"),
    ):  # fmt: skip
        assert bench.view(changed)["shown"] != before
    assert bench.view(replace(release, expires_at=release.expires_at + 60))["shown"] == before
    elsewhere = Releases(bench.gate, bench.ledger, silo="hospital_a", destination={"address": "elsewhere:1"})
    assert elsewhere.view(release).shown != before


def facts_shown(bench: Bench, release: Release) -> str:
    return str(bench.view(bench.ledger.release(release.id))["shown_facts"])


def test_T36_how_many_of_a_site_s_records_are_behind_an_update_is_in_what_is_signed(bench: Bench) -> None:
    release = held(bench)
    kept, before = bench.ledger.kept_of_release(release.id), facts_shown(bench, release)
    found = {before}
    for records in (78, 7800):
        bench.ledger.keep_of_release(release.id, kept | {"private_records": records})
        found.add(facts_shown(bench, release))
    assert len(found) == 3
    bench.ledger.keep_of_release(release.id, kept)
    assert facts_shown(bench, release) == before


def test_T36_what_a_yes_leaves_to_the_policy_is_in_what_is_signed(tmp_path: Path) -> None:
    """Also where the digest of the policy is the same, as of a guard that says another thing of the same policy."""
    policy = setting.policy_of(setting.policy_text(first_rounds=2))
    block = policy.file.egress.lora_factors
    assert block is not None
    found: dict[str, str] = {}
    for name, asked in {"once": (1, 0), "always": (1, 1), "again": (1, 1)}.items():
        asks = block.approvals.model_copy(update=dict(zip(("first_rounds", "then"), asked, strict=True)))
        egress = policy.file.egress.model_copy(update={"lora_factors": block.model_copy(update={"approvals": asks})})
        said = replace(policy, file=policy.file.model_copy(update={"egress": egress}))
        with closing(Bench(tmp_path / name, said)) as made:
            release = held(made)
            plan = {"quorum": 2, "silos": ["hospital_a", "hospital_b"], "rounds": 4}
            made.ledger.start_run(release.run, json.dumps(plan))
            consequences = made.view(release)["consequences"]
            assert ("UNASKED" in consequences["later"]) is (name == "once") and "2 of 2" in consequences["reject"]
            found[name] = facts_shown(made, release)
    assert found["always"] == found["again"] != found["once"]


@pytest.mark.parametrize("kind", ["factors", "responses"])
def test_T36_every_sentence_that_does_not_move_is_in_what_is_signed(tmp_path: Path, kind: str) -> None:
    """Whoever has the release finds the digest by what the screen said, and no other by another sentence."""
    with closing(Bench(tmp_path / "silo", asking_for_answers())) as bench:
        release = held(bench, kind)
        view = bench.view(release)
        (leaves,), consequences = view["leaves"]["kinds"], view["consequences"]
        sentences = {
            "asked_by": view["asked_by"], "to": view["leaves"]["destination"]["name"], "says": leaves["says"],
            "items": leaves["items"], "stays": "; ".join(view["leaves"]["stays"]), "budget": view["budget"],
            "findings": view["findings"], "approve": consequences["approve"], "later": consequences["later"],
            "reject": consequences["reject"],
        }  # fmt: skip

        def digest(**changes: str) -> str:
            return shown_facts(
                release, name=view["policy"]["name"], roles=view["approvers"]["roles"],
                address=view["leaves"]["destination"]["address"], base=view["base"]["now"],
                sentences=sentences | changes,
            )  # fmt: skip

        assert digest() == view["shown_facts"]
        others = {digest(**{name: f"{said} or not"}) for name, said in sentences.items()}
        assert len(others) == len(sentences) and view["shown_facts"] not in others


def test_T36_T40_the_digest_of_what_was_shown_confirms_no_guess_of_an_answer(bench: Bench) -> None:
    """It is in the log: the site's key is in it, by the keyed digest that the log names."""
    with closing(Bench(bench.folder.with_name("other"), asking_for_answers())) as first:
        release = held(first, "responses")
        assert set(release.recorded) == {"bytes", "hmac_sha256"}
        other_key = replace(release, recorded={**release.recorded, "hmac_sha256": "0" * 64})
        assert first.view(release)["shown"] != first.view(other_key)["shown"]
        same_facts = replace(release, digest="0" * 64)  # the plain digest alone changes nothing
        assert first.view(release)["shown"] == first.view(same_facts)["shown"]


def asking_for_answers() -> Any:
    text = setting.policy_text(first_rounds=2)
    place = text.index("  public.responses:")
    return setting.policy_of(text[:place] + text[place:].replace("first_rounds: 0", "first_rounds: 1", 1))


@pytest.mark.parametrize("changed", ["", "facts", "payload", "nothing shown"])
def test_T36_a_verifier_finds_the_digest_of_what_was_shown(bench: Bench, tmp_path: Path, changed: str) -> None:
    release = held(bench)
    bench.releases.approve(WORLD.command("approvals.approve", arguments(bench, release)))
    (record,) = bench.events("approval.grant")
    fields = {
        name: record[name] for name in ("kind", "run", "round", "step", "payload", "policy", "detail", "orders")
    }  # fmt: skip
    match changed:
        case "facts":
            fields["detail"] = fields["detail"] | {"facts": "0" * 64}
        case "payload":
            fields["payload"] = fields["payload"] | {"sha256": "0" * 64}
        case "nothing shown":
            fields["detail"] = {name: value for name, value in fields["detail"].items() if name != "facts"}
    with AuditLog(
        tmp_path / "log", origin=setting.SILO, key=OUR_KEY, actor=setting.SILO, clock=Clock(record["t"] / 1000),
        reserve_bytes=0,
    ) as log:  # fmt: skip
        log.append("approval.grant", **fields)
        log.checkpoint()
    results = verify_logs([tmp_path / "log"])
    check_orders(results, [tmp_path / "log"], [WORLD.ca.certificate_pem])
    assert results[0]["verified"] is not bool(changed)
